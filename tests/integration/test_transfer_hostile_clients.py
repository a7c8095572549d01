"""A live prefill side against peers that send nonsense, too much, or somebody else's words."""

import asyncio
import contextlib

import msgpack
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_transfer import FINGERPRINT, KEY, eventually, params_for, running_side
from helpers_transfer_peers import (
    NUM_BLOCKS,
    TOKENS,
    authenticated_channel,
    limits,
    raw_connection,
    read_to_end,
    receive,
)
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import (
    MAGIC,
    PREFIX,
    Challenge,
    Heartbeat,
    Hello,
    Kind,
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
