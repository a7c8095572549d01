"""The block pool keeps its books whatever happens, and finds prefixes by content."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phasesplit_worker.errors import IntegrityError
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.sequence import SamplingParams, Sequence

BLOCK_SIZE = 4
SALT = b"salt"


def sequence_of(token_ids: list[int], name: str = "s") -> Sequence:
    return Sequence(request_id=name, prompt_token_ids=tuple(token_ids), sampling=SamplingParams(), seed=0)


def admit(blocks: BlockManager, token_ids: list[int], name: str = "s") -> Sequence:
    """Admit and compute everything."""
    sequence = sequence_of(token_ids, name)
    sequence.num_computed_tokens = blocks.admit(sequence, len(token_ids), len(token_ids) - 1)
    before, sequence.num_computed_tokens = sequence.num_computed_tokens, len(token_ids)
    blocks.commit(sequence, before)
    return sequence


def test_a_prefix_is_shared_while_used_and_found_after_it_was_freed() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, SALT)
    first = admit(blocks, list(range(10)), "first")
    second = admit(blocks, [*range(8), 99, 98], "second")
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert blocks.num_used_blocks == 4
    blocks.free(first)
    blocks.free(second)
    assert blocks.num_used_blocks == 0
    assert len(blocks.find_cached_prefix(sequence_of(list(range(10))), 10)) == 2
    assert blocks.hit_tokens_total == 8


def test_a_prefix_depends_on_everything_before_it() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, SALT)
    admit(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert not blocks.find_cached_prefix(sequence_of([9, 9, 9, 9, 5, 6, 7, 8]), 8)
    other = BlockManager(8, BLOCK_SIZE, b"another model")
    assert not other.find_cached_prefix(sequence_of([1, 2, 3, 4]), 4)


def test_the_least_recently_freed_block_is_evicted_first_and_tails_before_heads() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, SALT)
    old = admit(blocks, list(range(8)), "old")
    new = admit(blocks, list(range(100, 108)), "new")
    blocks.free(old)
    blocks.free(new)
    admit(blocks, list(range(200, 204)), "third")
    assert len(blocks.find_cached_prefix(sequence_of(list(range(8))), 8)) == 1
    assert len(blocks.find_cached_prefix(sequence_of(list(range(100, 108))), 8)) == 2


def test_reviving_a_cached_block_takes_it_from_the_free_ones() -> None:
    blocks = BlockManager(3, BLOCK_SIZE, SALT)
    blocks.free(admit(blocks, list(range(8))))
    again = sequence_of(list(range(12)))
    assert blocks.can_admit(again, 12, 11, spare_blocks=0)
    assert not blocks.can_admit(again, 12, 11, spare_blocks=1)


def test_a_wrong_count_is_found() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, SALT)
    sequence = admit(blocks, list(range(6)))
    blocks.check_integrity([sequence])
    with pytest.raises(IntegrityError, match="references"):
        blocks.check_integrity([])


def test_clearing_the_cache_forgets_prefixes_and_keeps_used_blocks() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, SALT)
    used = admit(blocks, list(range(8)), "used")
    blocks.free(admit(blocks, list(range(50, 54)), "freed"))
    blocks.clear_cache()
    blocks.check_integrity([used])
    assert not blocks.find_cached_prefix(sequence_of(list(range(8))), 8)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow, commit and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, BLOCK_SIZE, SALT)
        self.live: list[Sequence] = []
        self.count = 0

    @rule(start=st.integers(0, 2), length=st.integers(1, 30))
    def arrive(self, start: int, length: int) -> None:
        sequence = sequence_of(list(range(start, start + length)), str(self.count))
        self.count += 1
        if self.blocks.can_admit(sequence, length, length - 1, 0):
            free = self.blocks.num_free_blocks
            sequence.num_computed_tokens = self.blocks.admit(sequence, length, length - 1)
            assert sequence.num_computed_tokens < length
            assert len(sequence.block_table) == self.blocks.num_blocks_for(length)
            assert self.blocks.num_free_blocks >= free - len(sequence.block_table)
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(before + count, sequence.num_tokens)
        self.blocks.commit(sequence, before)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 3))
    def grow(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if self.blocks.can_grow(sequence, sequence.num_tokens + 1):
            sequence.output_token_ids.append(token)
            self.blocks.grow(sequence, sequence.num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.blocks.free(sequence)

    @rule()
    def clear(self) -> None:
        self.blocks.clear_cache()

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check_integrity(self.live)

    @invariant()
    def shared_blocks_hold_the_same_tokens(self) -> None:
        owners: dict[int, tuple[int, ...]] = {}
        for sequence in self.live:
            for index, block_id in enumerate(sequence.block_table):
                content = tuple(sequence.slice_token_ids(0, (index + 1) * BLOCK_SIZE))
                assert owners.setdefault(block_id, content) == content


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
