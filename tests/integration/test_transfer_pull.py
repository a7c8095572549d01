"""Pulls between two transfer sides over real sockets on the loopback interface."""

import asyncio
import time

import pytest

from helpers_transfer import (
    LAYOUT,
    MemoryPool,
    running_side,
)
from helpers_transfer_pull import TOKENS, failed_pull, is_soon, pull
from phasesplit.api.manifest import ManifestState
from phasesplit.api.reports import ProbeRequest
from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.errors import TransferFailure

pytestmark = pytest.mark.integration


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
