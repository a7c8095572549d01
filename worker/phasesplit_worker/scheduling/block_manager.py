"""The pool of KV blocks: reference counts, prefix cache, eviction. Knows no bytes, only block ids.

every block is exactly one of
  used    ref_count > 0, in the block tables of that many sequences
  free    ref_count = 0; still findable by hash until it is taken (least recently freed first)
A block is `cached` when its hash is in the index: full, computed, immutable.
A sequence writes only into blocks that it does not share.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from phasesplit_worker.errors import IntegrityError
from phasesplit_worker.sequence import Sequence
from phasesplit_worker.token_hash import hash_block


class BlockManager:
    """Hands out blocks to sequences. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int, block_size: int, salt: bytes) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hit_tokens_total = 0
        self.query_tokens_total = 0
        self._salt = salt
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))  # free and not cached
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free and cached, oldest first
        self._index: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Block ids of the longest cached prefix of at most `max_tokens` tokens. No side effects."""
        block_ids: list[int] = []
        for index in range(max_tokens // self.block_size):
            block_id = self._index.get(self._hash(sequence, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_admit(
        self, sequence: Sequence, num_tokens: int, max_cached_tokens: int, spare_blocks: int
    ) -> bool:
        """Whether `admit` would succeed and leave `spare_blocks` free."""
        cached = self.find_cached_prefix(sequence, max_cached_tokens)
        taken = self.num_blocks_for(num_tokens) - len(cached)
        revived = sum(1 for block_id in cached if self._ref_counts[block_id] == 0)
        return taken + revived + spare_blocks <= self.num_free_blocks

    def admit(self, sequence: Sequence, num_tokens: int, max_cached_tokens: int) -> int:
        """Give an empty sequence its blocks for `num_tokens` tokens; returns the tokens found cached.

        The caller has asked `can_admit`. The shared prefix must not be written.
        """
        cached = self.find_cached_prefix(sequence, max_cached_tokens)
        for block_id in cached:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1
        sequence.block_table = list(cached)
        self.grow(sequence, num_tokens)
        num_cached_tokens = len(cached) * self.block_size
        self.hit_tokens_total += num_cached_tokens
        self.query_tokens_total += num_tokens
        return num_cached_tokens

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence's table can be extended to `num_tokens` tokens."""
        return self.num_blocks_for(num_tokens) - len(sequence.block_table) <= self.num_free_blocks

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the table to `num_tokens` tokens. The caller has asked `can_grow`."""
        for _ in range(self.num_blocks_for(num_tokens) - len(sequence.block_table)):
            sequence.block_table.append(self._take())

    def commit(self, sequence: Sequence, num_before: int) -> None:
        """Make blocks that became full since `num_before` computed tokens findable."""
        full = sequence.num_computed_tokens // self.block_size
        for index in range(num_before // self.block_size, full):
            digest = self._hash(sequence, index)
            block_id = sequence.block_table[index]
            if digest not in self._index and self._hashes[block_id] is None:
                self._index[digest] = block_id
                self._hashes[block_id] = digest

    def free(self, sequence: Sequence) -> None:
        """Give all blocks back. Tails are freed first, so that prefixes stay cached longest."""
        for block_id in reversed(sequence.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._evictable[block_id] = None
        sequence.block_table = []

    def clear_cache(self) -> None:
        """Forget every cached prefix; blocks in use stay in use."""
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        self._blank.extend(self._evictable)
        self._evictable.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless counts, free lists and tables agree."""
        counts = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        for block_id, ref_count in enumerate(self._ref_counts):
            if counts[block_id] != ref_count:
                message = f"block {block_id} has {ref_count} references but is in {counts[block_id]} tables"
                raise IntegrityError(message)
        free = [*self._blank, *self._evictable]
        expected = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        if len(free) != len(expected) or set(free) != expected:
            raise IntegrityError(f"{len(free)} blocks are listed as free, {len(expected)} are unreferenced")
        for digest, block_id in self._index.items():
            if self._hashes[block_id] != digest:
                raise IntegrityError(f"block {block_id} is indexed under a hash that it does not have")
        if sum(digest is not None for digest in self._hashes) != len(self._index):
            raise IntegrityError("a cached block is missing in the index")
        if any(self._hashes[block_id] is not None for block_id in self._blank):
            raise IntegrityError("a cached block is listed as blank")

    def _take(self) -> int:
        if self._blank:
            block_id = self._blank.popleft()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            digest = self._hashes[block_id]
            if digest is not None:
                del self._index[digest]
            self._hashes[block_id] = None
        self._ref_counts[block_id] = 1
        return block_id

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Chained hash of a full block, remembered on the sequence (its tokens only ever grow)."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            token_ids = sequence.slice_token_ids(start, start + self.block_size)
            hashes.append(hash_block(hashes[-1] if hashes else self._salt, token_ids))
        return hashes[index]
