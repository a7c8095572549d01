"""Pulls that must not succeed: wrong key, model, layout, tokens, bytes, peer. Over real sockets."""

import time

import pytest

from helpers_transfer import (
    KEY,
    LAYOUT,
    MemoryPool,
    params_for,
    running_side,
)
from helpers_transfer_pull import TOKENS, failed_pull, is_soon, pull
from phasesplit_worker.transfer.errors import TransferError, TransferFailure

pytestmark = pytest.mark.integration


async def test_wrong_key_is_refused_on_both_sides():
    async with (
        running_side("prefill", key=KEY[::-1]) as prefill,
        running_side("decode") as decode,
    ):
        prefill.engine.run("r", TOKENS)
        assert await failed_pull(prefill, decode) is TransferFailure.AUTH
        assert (decode.manager.transfers_total, decode.manager.failures_total) == (1, {"auth": 1})


async def test_other_model_is_refused_by_name():
    async with (
        running_side("prefill", model_fingerprint="model-b") as prefill,
        running_side("decode") as decode,
    ):
        prefill.engine.run("r", TOKENS)
        assert await failed_pull(prefill, decode) is TransferFailure.FINGERPRINT
        assert prefill.manager.counts.refused == {"fingerprint": 1}


async def test_other_layout_is_refused_by_name():
    pool = MemoryPool(layout=LAYOUT.model_copy(update={"num_kv_heads": 4}))
    async with running_side("prefill", pool=pool) as prefill, running_side("decode") as decode:
        prefill.engine.run("r", TOKENS)
        with pytest.raises(TransferError, match=r"num_kv_heads \(4 there, 2 here\)") as caught:
            await pull(prefill, decode)
        assert caught.value.reason is TransferFailure.LAYOUT


@pytest.mark.parametrize("tokens", [[*TOKENS[:-1], 0], TOKENS[:-1], [*TOKENS, 1, 2, 3, 4, 5]])
async def test_kv_of_other_tokens_is_refused(tokens):
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        prefill.engine.run("r", TOKENS)
        assert await failed_pull(prefill, decode, tokens=tokens) is TransferFailure.TOKEN_HASH
        assert decode.pool.committed == []


async def test_block_reused_too_early_is_refused_by_checksum():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        done = prefill.engine.run("r", TOKENS)
        assert await is_soon(lambda: len(prefill.manager.manifest("r").checksums) == 10)
        prefill.pool.fill(done.block_ids[4], seed=99)
        assert await failed_pull(prefill, decode) is TransferFailure.CHECKSUM
        assert decode.pool.committed.count(4) == 0
        assert await is_soon(lambda: prefill.engine.allocator.num_used == 0), "freed without its time to live"


async def test_unknown_request_is_refused_at_once():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        params = params_for(prefill, "r", 39).model_copy(update={"remote_request_id": "other"})
        started = time.monotonic()
        with pytest.raises(TransferError) as caught:
            await decode.manager.pull(params, TOKENS, decode.engine.allocator.take(10))
        assert caught.value.reason is TransferFailure.UNKNOWN_REQUEST
        assert time.monotonic() - started < 1


async def test_restarted_peer_is_noticed_at_once():
    async with running_side("decode") as decode:
        async with running_side("prefill") as prefill:
            prefill.engine.run("r0", TOKENS)
            await pull(prefill, decode, "r0")
            prefill.engine.run("r", TOKENS)
            stale = params_for(prefill, "r", len(TOKENS))
            port = prefill.manager.port
        async with running_side("prefill", port=port) as prefill:
            prefill.engine.run("r", TOKENS)
            started = time.monotonic()
            with pytest.raises(TransferError) as caught:
                await decode.manager.pull(stale, TOKENS, decode.engine.allocator.take(10))
            assert caught.value.reason is TransferFailure.ENGINE_ID
            assert time.monotonic() - started < 1
            result, _ = await pull(prefill, decode)
            assert result.num_retries == 0, "the kept connection to the old process is not used"


async def test_nobody_listening_is_a_connect_failure():
    async with running_side("decode") as decode:
        async with running_side("prefill") as prefill:
            params = params_for(prefill, "r", len(TOKENS))
        with pytest.raises(TransferError) as caught:
            await decode.manager.pull(params, TOKENS, decode.engine.allocator.take(10))
        assert caught.value.reason is TransferFailure.CONNECT


async def test_repeated_failures_rest_the_pair_and_a_success_ends_it():
    async with running_side("decode") as decode:
        async with running_side("prefill") as prefill:
            params = params_for(prefill, "r", len(TOKENS))
        for _ in range(3):
            with pytest.raises(TransferError):
                await decode.manager.pull(params, TOKENS, tuple(range(10)))
        assert list(decode.manager.quarantined_peers()) == ["prefill-0"]
        with pytest.raises(TransferError, match="rest for") as caught:
            await decode.manager.pull(params, TOKENS, tuple(range(10)))
        assert caught.value.reason is TransferFailure.CONNECT
