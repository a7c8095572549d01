"""A live decode side against servers that send other things than they should, or too slowly."""

import asyncio
import contextlib
import itertools
import struct
import time

import pytest

from helpers_transfer import LAYOUT, MemoryPool, params_for, running_side
from helpers_transfer_peers import (
    NUM_BLOCKS,
    TOKENS,
    block_bytes,
    good_manifest,
    limits,
    receive,
    scripted_server,
)
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.integrity import checksum
from phasesplit_worker.transfer.messages import (
    Blocks,
    Final,
    Heartbeat,
    Manifest,
    encode,
)

pytestmark = pytest.mark.integration


def send_blocks(channel, start, stop, *, label=None, sums=None):
    views = [block_bytes(block) for block in range(start, stop)]
    sums = tuple(checksum(view) for view in views) if sums is None else sums
    channel.send(Blocks(first_block=start if label is None else label, checksums=sums), limits(), views)


def start_well(channel, **changes):
    channel.send(Manifest(manifest=good_manifest(**changes)), limits())


def wait_for_close(channel):
    with contextlib.suppress(TransferError):
        receive(channel)


def other_request(channel, pull):
    start_well(channel, request_id="somebody else's")
    wait_for_close(channel)


def huge_manifest(channel, pull):
    start_well(channel, model_fingerprint="x" * (1 << 20))
    wait_for_close(channel)


def blocks_out_of_order(channel, pull):
    start_well(channel)
    send_blocks(channel, 2, 4)
    wait_for_close(channel)


def more_blocks_than_asked(channel, pull):
    start_well(channel)
    send_blocks(channel, 0, NUM_BLOCKS + 2)
    wait_for_close(channel)


def fewer_bytes_than_labelled(channel, pull):
    start_well(channel)
    send_blocks(channel, 0, 3, sums=tuple("0" * 16 for _ in range(5)))
    wait_for_close(channel)


def wrong_bytes(channel, pull):
    start_well(channel)
    send_blocks(channel, 0, 2, sums=("0" * 16, "1" * 16))
    wait_for_close(channel)


def stall_after_manifest(channel, pull):
    start_well(channel)
    wait_for_close(channel)


def excuses_for_ready_blocks(channel, pull):
    start_well(channel)
    while True:
        channel.send(Heartbeat(num_ready_blocks=NUM_BLOCKS), limits())
        time.sleep(0.05)


def die_in_the_middle_of_a_block(channel, pull):
    start_well(channel)
    header = encode(Blocks(first_block=0, checksums=("0" * 16,)), LAYOUT.bytes_per_block)
    channel._socket.sendall(header + b"x" * 10)


def drip(channel, pull):
    start_well(channel)
    header = encode(Blocks(first_block=0, checksums=("0" * 16,)), LAYOUT.bytes_per_block)
    for byte in header + bytes(LAYOUT.bytes_per_block):
        channel._socket.sendall(bytes([byte]))
        time.sleep(0.05)


def final_without_a_token(channel, pull):
    start_well(channel)
    send_blocks(channel, 0, NUM_BLOCKS)
    channel.send(Final(manifest=good_manifest(first_token=None)), limits())
    wait_for_close(channel)


def final_of_other_blocks(channel, pull):
    start_well(channel)
    send_blocks(channel, pull.first_block, NUM_BLOCKS)
    sums = tuple("0" * 16 for _ in range(NUM_BLOCKS))
    channel.send(Final(manifest=good_manifest(checksums=sums)), limits())
    wait_for_close(channel)


def newer_version(channel, pull):
    data = bytearray(encode(Manifest(manifest=good_manifest())))
    struct.pack_into(">B", data, 4, 2)
    channel._socket.sendall(data)
    wait_for_close(channel)


def answer_with_a_request(channel, pull):
    channel.send(pull, limits())
    wait_for_close(channel)


BAD_SERVERS = {
    other_request: "unknown_request",
    huge_manifest: "too_large",
    blocks_out_of_order: "protocol",
    more_blocks_than_asked: "too_large",
    fewer_bytes_than_labelled: "protocol",
    wrong_bytes: "checksum",
    stall_after_manifest: "progress",
    excuses_for_ready_blocks: "progress",
    die_in_the_middle_of_a_block: "connect",
    drip: "timeout",
    final_without_a_token: "protocol",
    final_of_other_blocks: "checksum",
    newer_version: "protocol",
    answer_with_a_request: "protocol",
}


@pytest.mark.parametrize(
    ("script", "reason"), BAD_SERVERS.items(), ids=lambda item: getattr(item, "__name__", item)
)
async def test_bad_server_is_refused_by_name_and_writes_only_reserved_blocks(script, reason):
    async with running_side("decode", silence_s=0.4) as decode:
        reserved = range(20, 20 + NUM_BLOCKS)
        started = time.monotonic()
        with scripted_server(script) as params, pytest.raises(TransferError) as caught:
            await decode.manager.pull(params, TOKENS, reserved, deadline_s=1.5)
        assert str(caught.value.reason) == reason
        assert time.monotonic() - started < 2.5
        untouched = tuple(itertools.chain(range(20), range(20 + NUM_BLOCKS, 64)))
        assert decode.pool.read(untouched) == bytes(len(untouched) * LAYOUT.bytes_per_block)


async def test_server_without_the_key_learns_no_tokens_and_gets_no_pull():
    seen = []

    def pretend(channel, pull):
        seen.append(pull)

    async with running_side("decode", key=b"another key of thirty-two bytes!") as decode:
        with scripted_server(pretend) as params, pytest.raises(TransferError) as caught:
            await decode.manager.pull(params, TOKENS, range(NUM_BLOCKS), deadline_s=2)
        assert caught.value.reason is TransferFailure.AUTH
        assert seen == []


async def test_broken_transfer_is_resumed_from_the_first_missing_block():
    asked = []

    def break_once(channel, pull):
        asked.append(pull.first_block)
        start_well(channel)
        if len(asked) == 1:
            send_blocks(channel, 0, 6)
            return
        send_blocks(channel, pull.first_block, NUM_BLOCKS)
        channel.send(Final(manifest=good_manifest()), limits())
        wait_for_close(channel)

    async with running_side("decode") as decode:
        with scripted_server(break_once) as params:
            result = await decode.manager.pull(params, TOKENS, range(NUM_BLOCKS), deadline_s=5)
        assert asked == [0, 6]
        assert (result.num_retries, result.num_blocks) == (1, NUM_BLOCKS)
        assert decode.pool.read(tuple(range(NUM_BLOCKS))) == b"".join(
            bytes(block_bytes(block)) for block in range(NUM_BLOCKS)
        )


async def test_failure_after_the_prefill_finished_still_tells_the_first_token():
    async with running_side("decode") as decode:
        with scripted_server(wrong_bytes) as params, pytest.raises(TransferError) as caught:
            await decode.manager.pull(params, TOKENS, range(NUM_BLOCKS), deadline_s=2)
        assert caught.value.first_token == 7


def compute_slowly(channel, pull):
    """A prefill of three seconds that sends its heartbeats, then everything at once."""
    start_well(channel)
    started = time.monotonic()
    while time.monotonic() - started < 3:
        time.sleep(0.3)
        channel.send(Heartbeat(num_ready_blocks=0), limits())
    views = [block_bytes(block) for block in range(NUM_BLOCKS)]
    sums = tuple(checksum(view) for view in views)
    channel.send(Blocks(first_block=0, checksums=sums, waited_s=3.0), limits(), views)
    channel.send(Final(manifest=good_manifest()), limits())
    wait_for_close(channel)


@contextlib.asynccontextmanager
async def slow_relay(port, bytes_per_s):
    """A relay in front of a server whose answers come at a limited speed."""

    async def copy(reader, writer, delay_s):
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(4096):
                await asyncio.sleep(delay_s * len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, there_writer, 0), copy(there_reader, writer, 1 / bytes_per_s))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_deadline_of_the_transfer_leaves_the_prefill_its_time():
    async with running_side("decode", transfer_deadline_s=0.5) as decode:
        with scripted_server(compute_slowly) as params:
            result = await decode.manager.pull(params, TOKENS, range(NUM_BLOCKS))
        assert result.transfer_s > 2.9
        assert result.busy_s < 0.5


async def test_link_too_slow_for_the_deadline_fails_and_is_measured():
    layout = LAYOUT.model_copy(update={"head_dim": 512})  # 64 KiB per block
    async with (
        running_side("prefill", pool=MemoryPool(64, layout)) as prefill,
        running_side("decode", pool=MemoryPool(64, layout), transfer_deadline_s=1.0) as decode,
    ):
        prefill.engine.run("r", TOKENS)
        async with slow_relay(prefill.manager.port, bytes_per_s=300_000) as port:
            params = params_for(prefill, "r", len(TOKENS)).model_copy(update={"remote_port": port})
            with pytest.raises(TransferError) as caught:
                await decode.manager.pull(params, TOKENS, range(NUM_BLOCKS))
        assert caught.value.reason is TransferFailure.TIMEOUT
        [measured] = decode.manager.link_samples()
        assert measured.from_pod == "prefill-0"
        assert 100_000 < measured.bytes_per_s < 600_000


async def test_a_slow_link_is_measured_while_the_pull_still_runs():
    layout = LAYOUT.model_copy(update={"head_dim": 8192})  # 1 MiB per block
    async with (
        running_side("prefill", pool=MemoryPool(16, layout)) as prefill,
        running_side("decode", pool=MemoryPool(16, layout)) as decode,
    ):
        prefill.engine.run("r", TOKENS)
        async with slow_relay(prefill.manager.port, bytes_per_s=6_000_000) as port:
            params = params_for(prefill, "r", len(TOKENS)).model_copy(update={"remote_port": port})
            pull = asyncio.create_task(decode.manager.pull(params, TOKENS, range(NUM_BLOCKS)))
            while not decode.manager.link_samples() and not pull.done():  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(0.02)
            assert not pull.done()
            result = await pull
        samples = decode.manager.link_samples()
        assert len(samples) > 1
        assert sum(sample.bytes for sample in samples) == result.num_bytes
        assert all(2_000_000 < sample.bytes_per_s < 12_000_000 for sample in samples)
