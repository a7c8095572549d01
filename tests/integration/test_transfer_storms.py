"""Aborts, disconnects and deaths in numbers: afterwards every block, thread and socket is back."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from helpers_transfer import FINGERPRINT, LAYOUT, MemoryPool, eventually, params_for, running_side
from helpers_transfer_peers import (
    NUM_BLOCKS,
    TOKENS,
    authenticated_channel,
    limits,
    raw_connection,
)
from phasesplit.api.legs import KVTransferParams
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import Hello, Pull, encode

pytestmark = pytest.mark.integration


async def is_soon(condition, timeout_s=10.0):
    return await asyncio.to_thread(eventually, condition, timeout_s)


def disconnect_somewhere(port: int, request_id: str, randomness: random.Random) -> None:
    """Speak the protocol up to a random point, then be gone."""
    stage = randomness.randrange(4)
    if stage == 0:
        raw_connection(port).close()
        return
    if stage == 1:
        with raw_connection(port) as connection:
            data = encode(Hello(nonce=b"n" * 32, engine_id="e"))
            connection.sendall(data[: randomness.randrange(len(data))])
        return
    channel = authenticated_channel(port)
    if stage == 3:
        pull = Pull(request_id=request_id, model_fingerprint=FINGERPRINT, num_blocks=NUM_BLOCKS)
        channel.send(pull, limits())
        with contextlib.suppress(TransferError):
            channel.receive_into([memoryview(bytearray(randomness.randrange(1, 3000)))], limits(0.05))
    channel.close()


async def cancel_somewhere(prefill, decode, request_id: str, randomness: random.Random) -> None:
    """A client that leaves during leg 2."""
    block_ids = decode.engine.allocator.take(NUM_BLOCKS)
    params = params_for(prefill, request_id, len(TOKENS))
    pulling = asyncio.create_task(decode.manager.pull(params, TOKENS, block_ids))
    await asyncio.sleep(randomness.random() * 0.02)
    pulling.cancel()
    with contextlib.suppress(asyncio.CancelledError, TransferError):
        await pulling
    decode.engine.allocator.give(block_ids)


async def play_prefill(prefill, request_id: str, randomness: random.Random) -> None:
    """Half of the prefills finish at once, some later, some are aborted."""
    running = prefill.engine.accept(request_id, TOKENS)
    prefill.engine.compute(running, randomness.randrange(len(TOKENS) + 1))
    await asyncio.sleep(randomness.choice([0, 0.01]))
    if randomness.random() < 0.2:
        prefill.engine.abort(request_id)
        return
    prefill.engine.compute(running, len(TOKENS))
    prefill.engine.finish(running)


async def test_thousand_disconnects_return_every_block():
    randomness = random.Random(5)
    async with (
        running_side("prefill", pool=MemoryPool(2000), ttl_s=0.3) as prefill,
        running_side("decode", pool=MemoryPool(2000)) as decode,
    ):
        threads_before = threading.active_count()
        descriptors_before = psutil.Process().num_fds()

        async def one(number: int) -> None:
            request_id = f"r{number}"
            playing = asyncio.create_task(play_prefill(prefill, request_id, randomness))
            if number % 2:
                await cancel_somewhere(prefill, decode, request_id, randomness)
            else:
                await asyncio.to_thread(
                    disconnect_somewhere, prefill.manager.port, request_id, random.Random(number)
                )
            await playing

        for start in range(0, 1000, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))

        assert await is_soon(lambda: prefill.engine.allocator.num_used == 0)
        assert decode.engine.allocator.num_used == 0
        assert prefill.manager.num_exports == 0
        # What stays: kept connections (two threads' worth at most per peer) and the pools of threads.
        assert await is_soon(lambda: prefill.manager._server.num_connections <= 4)
        assert psutil.Process().num_fds() - descriptors_before <= 16
        assert threading.active_count() - threads_before <= 64


async def test_fifty_aborts_in_five_seconds_free_their_slots_at_once():
    randomness = random.Random(6)
    async with (
        running_side("prefill", pool=MemoryPool(600)) as prefill,
        running_side("decode", pool=MemoryPool(600), max_pulls=64) as decode,
    ):

        async def one(number: int) -> float:
            request_id = f"r{number}"
            running = prefill.engine.accept(request_id, TOKENS)
            prefill.engine.compute(running, 20)
            block_ids = decode.engine.allocator.take(NUM_BLOCKS)
            params = params_for(prefill, request_id, len(TOKENS))
            pulling = asyncio.create_task(decode.manager.pull(params, TOKENS, block_ids))
            await asyncio.sleep(randomness.random() * 5)
            prefill.engine.abort(request_id)
            aborted = time.monotonic()
            with pytest.raises(TransferError) as caught:
                await pulling
            assert caught.value.reason is TransferFailure.ABORTED
            decode.engine.allocator.give(block_ids)
            return time.monotonic() - aborted

        held_s = await asyncio.gather(*(one(number) for number in range(50)))

        assert max(held_s) < 1.5
        assert prefill.engine.allocator.num_used == decode.engine.allocator.num_used == 0
        assert decode.manager.quarantined_peers() == {}, "aborts say nothing about the pair"
        prefill.engine.run("after", TOKENS)
        await decode.manager.pull(params_for(prefill, "after", len(TOKENS)), TOKENS, range(NUM_BLOCKS))


@contextlib.contextmanager
def prefill_process(num_ready_tokens: int):
    """A prefill side in another process, stuck in the middle of a prompt."""
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers_transfer_peers", str(num_ready_tokens)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield process, KVTransferParams.model_validate(json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("number", "reasons"),
    [
        (signal.SIGKILL, {TransferFailure.CONNECT}),
        # A stopped process keeps its sockets: first silence, then a handshake without an answer.
        (signal.SIGSTOP, {TransferFailure.PROGRESS}),
    ],
    ids=["killed", "stopped"],
)
async def test_death_of_the_prefill_is_noticed_within_seconds(number, reasons):
    async with running_side("decode") as decode:
        with prefill_process(num_ready_tokens=20) as (process, params):
            pulling = asyncio.create_task(decode.manager.pull(params, TOKENS, range(NUM_BLOCKS)))
            assert await is_soon(lambda: len(decode.pool.committed) == 5)
            process.send_signal(number)
            died = time.monotonic()
            with pytest.raises(TransferError) as caught:
                await pulling
            assert time.monotonic() - died < 5
            assert caught.value.reason in reasons
        assert decode.pool.read(tuple(range(NUM_BLOCKS, 64))) == bytes(54 * LAYOUT.bytes_per_block)


async def test_stop_cancels_pulls_and_returns_promptly():
    async with running_side("prefill") as prefill:
        prefill.engine.accept("r", TOKENS)
        async with running_side("decode") as decode:
            params = params_for(prefill, "r", len(TOKENS))
            pulling = asyncio.create_task(decode.manager.pull(params, TOKENS, range(NUM_BLOCKS)))
            await asyncio.sleep(0.2)
            started = time.monotonic()
            await decode.manager.stop()
            assert time.monotonic() - started < 1
            with pytest.raises(TransferError) as caught:
                await pulling
            assert caught.value.reason is TransferFailure.CANCELLED
