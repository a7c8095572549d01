"""Pulls between two transfer sides over real sockets on the loopback interface."""

import asyncio
import time

import pytest

from helpers_transfer import (
    KEY,
    LAYOUT,
    MemoryPool,
    Side,
    eventually,
    params_for,
    running_side,
)
from phasesplit.api.manifest import ManifestState
from phasesplit.api.reports import ProbeRequest
from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.errors import TransferError, TransferFailure

pytestmark = pytest.mark.integration

TOKENS = list(range(100, 139))  # 39 tokens: ten blocks of four, the last of three


def num_blocks(token_ids):
    return -(-len(token_ids) // LAYOUT.block_size)


async def pull(prefill: Side, decode: Side, request_id="r", tokens=None, *, release=True, **options):
    tokens = TOKENS if tokens is None else tokens
    block_ids = decode.engine.allocator.take(num_blocks(tokens))
    try:
        result = await decode.manager.pull(
            params_for(prefill, request_id, len(tokens)), tokens, block_ids, **options
        )
        return result, decode.pool.read(block_ids)
    finally:
        if release:
            decode.engine.allocator.give(block_ids)


async def failed_pull(*args, **options) -> TransferFailure:
    with pytest.raises(TransferError) as caught:
        await pull(*args, **options)
    return caught.value.reason


async def is_soon(condition, timeout_s=5.0):
    return await asyncio.to_thread(eventually, condition, timeout_s)


async def test_finished_prefill_arrives_whole_and_is_freed():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        done = prefill.engine.run("r", TOKENS)
        expected = prefill.pool.read(done.block_ids)

        result, received = await pull(prefill, decode)

        assert received == expected
        assert result.first_token == done.first_token
        assert result.sampling_state == {"seed": 1, "position": len(TOKENS)}
        assert (result.num_tokens, result.num_blocks) == (39, 10)
        assert result.num_bytes == 10 * LAYOUT.bytes_per_block
        assert (result.transport, result.measured.peer_node) == ("TCP", "node-prefill")
        assert 0 < result.busy_s <= result.transfer_s
        assert await is_soon(lambda: prefill.engine.allocator.num_used == 0)
        assert prefill.engine.released == ["r"]
        manifest = prefill.manager.manifest("r")
        assert manifest is not None
        assert manifest.state is ManifestState.PULLED


async def test_chunks_are_pulled_while_the_prefill_computes():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        running = prefill.engine.accept("r", TOKENS)
        pulling = asyncio.create_task(pull(prefill, decode))
        for num_tokens in (10, 22, 36):
            prefill.engine.compute(running, num_tokens)
            want = num_tokens // LAYOUT.block_size
            assert await is_soon(lambda want=want: len(decode.pool.committed) == want)
            await asyncio.sleep(0.25)
        prefill.engine.compute(running, len(TOKENS))
        prefill.engine.finish(running)

        result, received = await pulling

        assert received == prefill.pool.read(running.block_ids)
        assert result.transfer_s > 0.7
        assert result.busy_s < 0.3, "waiting for the prefill is not busy time"
        assert result.exposed_s < 0.4, "only the last chunk lies after the prefill"


async def test_pull_may_come_before_the_engine_has_accepted_the_request():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        pulling = asyncio.create_task(pull(prefill, decode))
        await asyncio.sleep(0.4)
        done = prefill.engine.run("r", TOKENS)
        result, received = await pulling
        assert received == prefill.pool.read(done.block_ids)
        assert result.busy_s < 0.3


async def test_cached_blocks_are_not_pulled_or_written():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        done = prefill.engine.run("r", TOKENS)
        expected = prefill.pool.read(done.block_ids)
        size = LAYOUT.bytes_per_block

        result, received = await pull(prefill, decode, num_cached_tokens=12)

        assert result.num_blocks == 7
        assert received[: 3 * size] == bytes(3 * size)
        assert received[3 * size :] == expected[3 * size :]


async def test_large_pull_uses_several_streams():
    layout = LAYOUT.model_copy(update={"head_dim": 2048})  # 256 KiB per block
    tokens = list(range(4 * 256))
    async with (
        running_side("prefill", pool=MemoryPool(300, layout)) as prefill,
        running_side("decode", pool=MemoryPool(300, layout), max_streams=4) as decode,
    ):
        running = prefill.engine.accept("r", tokens)
        prefill.engine.compute(running, 400)
        pulling = asyncio.create_task(pull(prefill, decode, tokens=tokens))
        await asyncio.sleep(0.2)
        prefill.engine.compute(running, len(tokens))
        prefill.engine.finish(running)
        result, received = await pulling
        assert received == prefill.pool.read(running.block_ids)
        assert result.num_streams == 4


async def test_concurrent_pulls_do_not_mix():
    async with (
        running_side("prefill", pool=MemoryPool(400)) as prefill,
        running_side("decode", pool=MemoryPool(400)) as decode,
    ):
        prompts = {f"r{i}": list(range(i, i + 20 + i)) for i in range(20)}
        expected = {
            request_id: prefill.pool.read(prefill.engine.run(request_id, tokens).block_ids)
            for request_id, tokens in prompts.items()
        }
        results = await asyncio.gather(
            *(pull(prefill, decode, request_id, tokens) for request_id, tokens in prompts.items())
        )
        for (request_id, _), (_, received) in zip(prompts.items(), results, strict=True):
            assert received == expected[request_id]
        assert await is_soon(lambda: prefill.engine.allocator.num_used == 0)
        assert decode.manager.transfers_total == 20


async def test_connections_are_reused():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        for number in range(5):
            prefill.engine.run(f"r{number}", TOKENS)
            await pull(prefill, decode, f"r{number}")
        assert prefill.manager._server.num_connections == 1


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


async def test_unpulled_kv_expires_and_says_so():
    expired: list[int] = []
    async with (
        running_side("prefill", ttl_s=0.2, on_expired=expired.append) as prefill,
        running_side("decode") as decode,
    ):
        running = prefill.engine.accept("running", TOKENS)
        prefill.engine.compute(running, 20)
        prefill.engine.run("r", TOKENS)
        assert await is_soon(lambda: expired == [10])
        assert await is_soon(lambda: prefill.engine.released == ["r"])
        assert await failed_pull(prefill, decode) is TransferFailure.EXPIRED
        manifest = prefill.manager.manifest("running")
        assert manifest is not None
        assert manifest.state is ManifestState.RUNNING, "a prefill that still runs does not expire"


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


async def test_aborted_prefill_ends_the_pull():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        running = prefill.engine.accept("r", TOKENS)
        prefill.engine.compute(running, 20)
        pulling = asyncio.create_task(failed_pull(prefill, decode))
        assert await is_soon(lambda: len(decode.pool.committed) == 5)
        prefill.engine.abort("r")
        started = time.monotonic()
        assert await pulling is TransferFailure.ABORTED
        assert time.monotonic() - started < 1


async def test_cancelled_pull_returns_when_nothing_writes_any_more_and_frees_the_peer():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        running = prefill.engine.accept("r", TOKENS)
        prefill.engine.compute(running, 20)
        pulling = asyncio.create_task(pull(prefill, decode))
        assert await is_soon(lambda: len(decode.pool.committed) == 5)
        started = time.monotonic()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert time.monotonic() - started < 0.5
        prefill.engine.compute(running, len(TOKENS))
        prefill.engine.finish(running)
        assert await is_soon(lambda: prefill.engine.allocator.num_used == 0)
        assert len(decode.pool.committed) == 5
        assert decode.manager.counts.failures == {"cancelled": 1}
        assert (decode.manager.transfers_total, decode.manager.failures_total) == (0, {})


async def test_cancellation_object_ends_a_pull_too():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        prefill.engine.accept("r", TOKENS)
        cancellation = Cancellation()
        pulling = asyncio.create_task(failed_pull(prefill, decode, cancellation=cancellation))
        await asyncio.sleep(0.1)
        cancellation.cancel()
        assert await pulling is TransferFailure.CANCELLED


async def test_whole_deadline_bounds_a_prefill_that_never_ends():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        prefill.engine.accept("r", TOKENS)
        started = time.monotonic()
        assert await failed_pull(prefill, decode, deadline_s=0.5) is TransferFailure.TIMEOUT
        assert time.monotonic() - started < 1.5


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


async def test_preempted_prefill_is_pulled_from_its_new_blocks():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        running = prefill.engine.accept("r", TOKENS)
        prefill.engine.compute(running, 20)
        pulling = asyncio.create_task(pull(prefill, decode))
        assert await is_soon(lambda: len(decode.pool.committed) == 5)
        old = running.block_ids
        running.block_ids = prefill.engine.allocator.take(10)
        for block_id in old:
            prefill.pool.fill(block_id, seed=1)
        prefill.engine.allocator.give(old)
        prefill.engine.compute(running, 12)
        prefill.engine.compute(running, len(TOKENS))
        prefill.engine.finish(running)
        _, received = await pulling
        assert received == prefill.pool.read(running.block_ids)


async def test_probe_measures_the_link():

    async with running_side("prefill") as prefill, running_side("decode") as decode:
        request = ProbeRequest(host="127.0.0.1", port=prefill.manager.port, bytes=(3 << 20) + 5)
        result = await decode.manager.probe(request)
        assert result.error == ""
        assert result.sample is not None
        assert (result.sample.from_node, result.sample.to_node) == ("node-prefill", "node-decode")
        assert result.sample.bytes == (3 << 20) + 5
        assert result.sample.bytes_per_s > 1e6
        assert [sample.probe for sample in decode.manager.link_samples()] == [True]
        again = await decode.manager.probe(request)
        assert again.sample is not None
        refused = await decode.manager.probe(request.model_copy(update={"port": 1}))
        assert refused.sample is None
        assert "127.0.0.1:1" in refused.error
