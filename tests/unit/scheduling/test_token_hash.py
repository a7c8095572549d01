"""Chained hashes: equal exactly when everything up to and including the block is equal."""

from hypothesis import given
from hypothesis import strategies as st

from phasesplit_worker.token_hash import chain_hashes, salt_of

TOKENS = st.lists(st.integers(0, 2**31), max_size=40)


@given(TOKENS, TOKENS)
def test_a_common_prefix_gives_common_hashes_and_nothing_else_does(
    first: list[int], second: list[int]
) -> None:
    salt = salt_of("model")
    hashes = [chain_hashes(tokens, 4, salt) for tokens in (first, second)]
    for index, (left, right) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * 4
        assert (left == right) == (first[:end] == second[:end])


def test_the_salt_separates_models() -> None:
    assert chain_hashes([1, 2], 4, salt_of("a")) != chain_hashes([1, 2], 4, salt_of("b"))


def test_the_last_block_may_be_partial() -> None:
    assert len(chain_hashes(range(9), 4, salt_of("a"))) == 3
    assert chain_hashes([], 4, salt_of("a")) == []
