"""What the decode side checks by itself before it uses a block, and how blocks are dealt to streams."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_transfer import FINGERPRINT, LAYOUT, MemoryPool
from helpers_transfer_peers import NUM_BLOCKS, TOKENS, block_bytes, good_manifest
from phasesplit.api.reports import LinkSample
from phasesplit_worker.transfer.deadlines import SHORTEST_S, SLACK, UNKNOWN_BYTES_PER_S, choose_deadline_s
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.integrity import checksum, count_blocks, hash_token_ids
from phasesplit_worker.transfer.messages import MAX_GROUP_BLOCKS, Pull
from phasesplit_worker.transfer.pull import PullRequest, Reception
from phasesplit_worker.transfer.stripes import (
    choose_group_blocks,
    choose_max_streams,
    choose_num_streams,
    stripe,
)


def make_request(**changes):
    fields = {
        "request_id": "r",
        "host": "127.0.0.1",
        "port": 1,
        "engine_id": None,
        "token_ids": tuple(TOKENS),
        "block_ids": tuple(range(NUM_BLOCKS)),
        "first_block": 0,
        "transfer_s": 5.0,
        "deadline": time.monotonic() + 5,
    }
    return PullRequest(**{**fields, **changes})


def make_reception(**changes):
    return Reception(make_request(**changes), MemoryPool(), FINGERPRINT)


BAD_MANIFESTS = {
    "request": ({"request_id": "s"}, "unknown_request", "asked for request r, offered s"),
    "model": ({"model_fingerprint": "model-b"}, "fingerprint", "model is model-b, this worker's model-a"),
    "dtype": (
        {"kv_layout": LAYOUT.model_copy(update={"dtype": "bfloat16"})},
        "layout",
        r"dtype \(bfloat16 there, float32 here\)",
    ),
    "block size": ({"kv_layout": LAYOUT.model_copy(update={"block_size": 8})}, "layout", "block_size"),
    "number of tokens": ({"num_tokens": 38}, "token_hash", "other tokens"),
    "tokens": (
        {"token_ids_hash": hash_token_ids(TOKENS[::-1], 4, FINGERPRINT)},
        "token_hash",
        "other tokens",
    ),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_manifest_that_differs_is_refused_by_name(case):
    changes, reason, message = case
    with pytest.raises(TransferError, match=message) as caught:
        make_reception().check_manifest(good_manifest(**changes))
    assert str(caught.value.reason) == reason


def test_reservation_must_fit_the_tokens():
    with pytest.raises(TransferError, match="39 tokens need 10 blocks, 9 are reserved") as caught:
        make_reception(block_ids=tuple(range(9)))
    assert caught.value.reason is TransferFailure.LAYOUT


def receive(reception, start, stop):
    views = reception.views(start, stop)
    for block, view in enumerate(views, start):
        view[:] = block_bytes(block)
    reception.verify(start, views, tuple(checksum(view) for view in views))


def test_missing_blocks_are_known():
    reception = make_reception(first_block=2)
    assert reception.first_missing == 2
    receive(reception, 2, 4)
    receive(reception, 6, 8)
    assert (reception.first_missing, reception.num_verified) == (4, 4)
    receive(reception, 4, 6)
    receive(reception, 8, 10)
    assert reception.first_missing == reception.num_blocks == NUM_BLOCKS
    reception.check_sealed(good_manifest())


def test_block_that_was_computed_again_is_asked_for_again():
    reception = make_reception()
    receive(reception, 0, NUM_BLOCKS)
    checksums = list(good_manifest().checksums)
    checksums[3] = "0" * 16
    with pytest.raises(TransferError, match="block 3 again") as caught:
        reception.check_sealed(good_manifest(checksums=tuple(checksums)))
    assert caught.value.reason is TransferFailure.CHECKSUM
    assert reception.first_missing == 3


def test_pull_that_lacks_a_block_is_not_complete():
    reception = make_reception()
    receive(reception, 0, 9)
    with pytest.raises(TransferError, match="block 9 did not arrive"):
        reception.check_sealed(good_manifest())


@given(
    first_block=st.integers(0, 40),
    more_blocks=st.integers(0, 200),
    num_streams=st.integers(1, 4),
    group_blocks=st.integers(1, 16),
)
def test_streams_share_the_blocks_without_gap_or_overlap(first_block, more_blocks, num_streams, group_blocks):
    num_blocks = first_block + more_blocks
    dealt = [
        block
        for stream in range(num_streams)
        for start, stop in stripe(
            Pull(
                request_id="r",
                model_fingerprint="f",
                first_block=first_block,
                num_blocks=num_blocks,
                stream=stream,
                num_streams=num_streams,
                group_blocks=group_blocks,
            )
        )
        for block in range(start, stop)
    ]
    assert sorted(dealt) == list(range(first_block, num_blocks))


@given(st.integers(1, 1 << 30))
def test_groups_are_bounded(bytes_per_block):
    assert 1 <= choose_group_blocks(bytes_per_block) <= MAX_GROUP_BLOCKS


@pytest.mark.parametrize(("num_bytes", "streams"), [(0, 1), (10 << 20, 1), (40 << 20, 2), (1 << 30, 4)])
def test_large_pulls_use_more_streams(num_bytes, streams):
    assert choose_num_streams(num_bytes, 4) == streams
    assert choose_num_streams(num_bytes, 1) == 1


@pytest.mark.parametrize(("num_cores", "streams"), [(1, 1), (2, 1), (4, 2), (8, 4), (96, 4)])
def test_more_cores_allow_more_streams(num_cores, streams):
    assert choose_max_streams(num_cores) == streams


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), st.integers(1, 16))
def test_token_hash_is_chained_per_block(token_ids, block_size):
    whole = hash_token_ids(token_ids, block_size, "m")
    assert len(whole) == count_blocks(len(token_ids), block_size)
    aligned = len(token_ids) // block_size * block_size
    assert hash_token_ids(token_ids[:aligned], block_size, "m") == whole[: aligned // block_size]
    changed = hash_token_ids([token_ids[0] + 1, *token_ids[1:]], block_size, "m")
    assert all(one != other for one, other in zip(whole, changed, strict=True))
    assert whole != hash_token_ids(token_ids, block_size, "another model")


def sample(bytes_per_s):
    return LinkSample(
        from_node="a", to_node="b", from_pod="p", to_pod="d", transport="TCP", age_s=0,
        bytes=int(bytes_per_s), busy_s=1.0,
    )  # fmt: skip


def test_deadline_is_three_times_what_the_link_needs_and_at_least_five_seconds():
    assert choose_deadline_s(100_000_000, [sample(5e6)]) == 60
    assert choose_deadline_s(100_000_000, [sample(1e9)]) == SHORTEST_S
    assert choose_deadline_s(100_000_000, []) == SLACK * 100_000_000 / UNKNOWN_BYTES_PER_S
    assert choose_deadline_s(0, []) == SHORTEST_S


def test_deadline_follows_the_slowest_of_the_newest_samples():
    newest_first = [sample(1e9), sample(1e7), sample(1e9), sample(1e6)]
    assert choose_deadline_s(100_000_000, newest_first) == 30
