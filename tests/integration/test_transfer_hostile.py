"""A live transfer side against peers that send nonsense, too much, too little or somebody else's words."""

import asyncio
import contextlib
import itertools
import struct
import time

import msgpack
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_transfer import FINGERPRINT, KEY, LAYOUT, MemoryPool, eventually, params_for, running_side
from helpers_transfer_peers import (
    NUM_BLOCKS,
    TOKENS,
    authenticated_channel,
    block_bytes,
    good_manifest,
    limits,
    raw_connection,
    read_to_end,
    receive,
    scripted_server,
)
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.integrity import checksum
from phasesplit_worker.transfer.messages import (
    MAGIC,
    PREFIX,
    Blocks,
    Challenge,
    Final,
    Heartbeat,
    Hello,
    Kind,
    Manifest,
    Message,
    Probe,
    Proof,
    Pull,
    Release,
    encode,
)
from phasesplit_worker.transfer.tcp_session import ServerLimits

pytestmark = pytest.mark.integration

PULL = Pull(request_id="r", model_fingerprint=FINGERPRINT, num_blocks=NUM_BLOCKS)


async def pull_works(prefill, decode, request_id="after"):
    prefill.engine.run(request_id, TOKENS)
    result = await decode.manager.pull(
        params_for(prefill, request_id, len(TOKENS)), TOKENS, range(NUM_BLOCKS)
    )
    return result.num_blocks == NUM_BLOCKS


async def in_thread(function, *args):
    return await asyncio.to_thread(function, *args)


# -- a server among bad clients -------------------------------------------------------------------


def frame(kind, header, *, magic=MAGIC, version=1, payload_bytes=0, header_bytes=None):
    size = len(header) if header_bytes is None else header_bytes
    return PREFIX.pack(magic, version, kind, 0, size, payload_bytes) + header


BAD_FIRST_WORDS = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", "protocol"),
    "a newer version": (frame(Kind.HELLO, b"\x80", version=2), "protocol"),
    "an unknown kind": (frame(99, b"\x80"), "protocol"),
    "a header of four gigabytes": (frame(Kind.HELLO, b"", header_bytes=0xFFFFFFFF), "too_large"),
    "a payload nobody asked for": (frame(Kind.HELLO, b"\x80", payload_bytes=1 << 40), "too_large"),
    "a header that is no msgpack": (frame(Kind.HELLO, b"\xc1\xc1\xc1"), "protocol"),
    "a header that is no map": (frame(Kind.HELLO, msgpack.packb([1, 2])), "protocol"),
    "a short nonce": (frame(Kind.HELLO, msgpack.packb({"nonce": b"x", "engine_id": "e"})), "protocol"),
    "a pull without a handshake": (encode(PULL), "auth"),
    "a release without a handshake": (encode(Release(request_id="r", pulled=True)), "auth"),
}


@pytest.mark.parametrize(("words", "reason"), BAD_FIRST_WORDS.values(), ids=BAD_FIRST_WORDS.keys())
async def test_bad_first_words_are_refused_and_counted(words, reason):
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        held = prefill.engine.run("r", TOKENS)
        with raw_connection(prefill.manager.port) as connection:
            connection.sendall(words)
            await in_thread(read_to_end, connection)
        assert prefill.manager.counts.refused == {reason: 1}
        assert prefill.engine.held == {"r": held}, "an unauthenticated peer frees nothing"
        assert await pull_works(prefill, decode)


async def test_recorded_handshake_cannot_be_replayed():
    async with running_side("prefill") as prefill:
        hello = Hello(nonce=b"n" * 32, engine_id="client")
        with raw_connection(prefill.manager.port) as first, contextlib.closing(Channel(first)) as channel:
            channel.send(hello, limits())
            challenge = await in_thread(receive, channel)
            assert isinstance(challenge, Challenge)
            parts = auth.Parts(hello.nonce, challenge.nonce, "client", challenge.engine_id)
            proof = Proof(proof=auth.prove(KEY, auth.CLIENT_LABEL, parts))
            channel.send(proof, limits())
        with raw_connection(prefill.manager.port) as second:
            second.sendall(encode(hello) + encode(proof) + encode(PULL))
            await in_thread(read_to_end, second)
        assert prefill.manager.counts.refused == {"auth": 1}


async def test_the_servers_own_proof_reflected_is_refused():
    async with running_side("prefill") as prefill:
        with raw_connection(prefill.manager.port) as connection:
            channel = Channel(connection)
            channel.send(Hello(nonce=b"n" * 32, engine_id="client"), limits())
            challenge = await in_thread(receive, channel)
            assert isinstance(challenge, Challenge)
            channel.send(Proof(proof=challenge.proof), limits())
            with pytest.raises(TransferError) as caught:
                await in_thread(receive, channel)
            assert caught.value.reason is TransferFailure.AUTH
            channel.close()


async def test_silent_connections_cannot_keep_peers_out_for_long():
    server_limits = ServerLimits(handshake_s=0.3, max_unauthenticated=4)
    async with (
        running_side("prefill", server_limits=server_limits) as prefill,
        running_side("decode") as decode,
    ):
        silent = [raw_connection(prefill.manager.port) for _ in range(12)]
        assert await in_thread(eventually, lambda: prefill.manager.counts.refused.get("connect") == 8)
        assert await in_thread(eventually, lambda: prefill.manager.counts.refused.get("progress", 0) +
                               prefill.manager.counts.refused.get("timeout", 0) == 4)  # fmt: skip
        assert await pull_works(prefill, decode)
        for connection in silent:
            connection.close()


BAD_REQUESTS: dict[str, tuple[Message, TransferFailure]] = {
    "of more blocks than there are": (
        PULL.model_copy(update={"num_blocks": 1 << 40}),
        TransferFailure.TOKEN_HASH,
    ),
    "of a stream beyond the last": (
        PULL.model_copy(update={"stream": 3, "num_streams": 2}),
        TransferFailure.PROTOCOL,
    ),
    "of another process": (PULL.model_copy(update={"engine_id": "old"}), TransferFailure.ENGINE_ID),
    "of an unknown request": (PULL.model_copy(update={"request_id": "x"}), TransferFailure.UNKNOWN_REQUEST),
    "that is an answer": (Heartbeat(num_ready_blocks=1), TransferFailure.PROTOCOL),
}


@pytest.mark.parametrize(("message", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
async def test_bad_request_of_an_authenticated_peer_is_refused_by_name(message, reason):
    async with running_side("prefill") as prefill:
        prefill.engine.run("r", TOKENS)
        channel = await in_thread(authenticated_channel, prefill.manager.port)

        def answers():
            channel.send(message, limits())
            while True:
                channel.receive(limits(), max_header_bytes=1 << 16, max_payload_bytes=1 << 20)

        with pytest.raises(TransferError) as caught:
            await in_thread(answers)
        assert caught.value.reason is reason
        channel.close()
        assert await in_thread(eventually, lambda: prefill.manager._server.num_connections == 0)


async def test_peer_that_asks_and_never_reads_is_dropped():
    server_limits = ServerLimits(silence_s=0.4)
    async with running_side("prefill", server_limits=server_limits) as prefill:
        channel = await in_thread(authenticated_channel, prefill.manager.port)
        channel.send(Probe(num_bytes=64 << 20), limits())
        assert await in_thread(eventually, lambda: prefill.manager._server.num_connections == 0)
        channel.close()


frames = st.builds(
    frame,
    st.integers(0, 255),
    st.one_of(
        st.binary(max_size=200),
        st.dictionaries(
            st.sampled_from(["request_id", "num_blocks", "nonce", "proof", "pulled", "stream", "num_bytes"]),
            st.one_of(st.integers(-(2**63), 2**63), st.binary(max_size=40), st.text(max_size=40), st.none()),
            max_size=6,
        ).map(msgpack.packb),
    ),
    magic=st.sampled_from([MAGIC, MAGIC, MAGIC, b"HTTP"]),
    version=st.sampled_from([1, 1, 1, 0, 255]),
    payload_bytes=st.sampled_from([0, 0, 0, 1, 2**63]),
    header_bytes=st.one_of(st.none(), st.none(), st.integers(0, 2**32 - 1)),
)


async def test_server_survives_random_frames_with_bounded_memory():
    async with running_side("prefill") as prefill, running_side("decode") as decode:
        held = prefill.engine.run("r", TOKENS)
        before = psutil.Process().memory_info().rss

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(frames, max_size=4), st.binary(max_size=60), st.booleans())
        def throw(sent, tail, is_authenticated):
            if is_authenticated:
                channel = authenticated_channel(prefill.manager.port)
                connection = channel._socket
            else:
                connection = raw_connection(prefill.manager.port)
            with connection, contextlib.suppress(ConnectionError, BlockingIOError):
                connection.sendall(b"".join(sent) + tail)

        await in_thread(throw)
        assert await in_thread(eventually, lambda: prefill.manager._server.num_connections == 0, 20)
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert prefill.engine.held == {"r": held}
        assert await pull_works(prefill, decode)


# -- a client among bad servers -------------------------------------------------------------------


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
