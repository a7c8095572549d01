"""Peers of the KV protocol that do not behave: raw clients of a server, scripted servers for a client.

Run as a module it is a real prefill side in a process of its own, to be stopped or killed:
`python -m helpers_transfer_peers NUM_READY_TOKENS` prints the transfer parameters as JSON.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from helpers_transfer import FINGERPRINT, KEY, LAYOUT, running_side
from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVManifest, ManifestState
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import TransferError
from phasesplit_worker.transfer.integrity import checksum, hash_token_ids
from phasesplit_worker.transfer.messages import (
    MAX_SMALL_HEADER_BYTES,
    Challenge,
    Hello,
    Message,
    Proof,
    Pull,
)
from phasesplit_worker.transfer.peers import LocalIdentity, PeerBook

TOKENS = list(range(100, 139))  # 39 tokens: ten blocks of four, the last of three
NUM_BLOCKS = 10
SCRIPTED_ENGINE_ID = "scripted"


def limits(seconds: float = 5.0) -> Limits:
    return Limits(deadline=time.monotonic() + seconds, silence_s=seconds)


def authenticated_channel(port: int, key: bytes = KEY) -> Channel:
    """A connection that has proven the key and may now send anything."""
    book = PeerBook(LocalIdentity(engine_id="raw", pod="raw", node="raw"), key)
    return book.connect(("127.0.0.1", port), None, limits()).channel


def raw_connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the peer closes."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    return received


Script = Callable[[Channel, Pull], None]


@contextmanager
def scripted_server(script: Script) -> Iterator[KVTransferParams]:
    """A server that knows the key, and answers each pull with `script`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve(connection: socket.socket) -> None:
            channel = Channel(connection)
            with closing(channel), suppress(TransferError, ConnectionError):
                pull = accept_pull(channel)
                if pull is not None:
                    script(channel, pull)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=SCRIPTED_ENGINE_ID,
            remote_request_id="r",
            remote_host="127.0.0.1",
            remote_port=listener.getsockname()[1],
            remote_pod="scripted-0",
        )
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def receive(channel: Channel) -> Message:
    return channel.receive(limits(), max_header_bytes=MAX_SMALL_HEADER_BYTES).message


def accept_pull(channel: Channel) -> Pull | None:
    """Shake hands and take the first request; None when it is no pull (a failed one's release)."""
    hello = receive(channel)
    assert isinstance(hello, Hello)
    parts = auth.Parts(hello.nonce, auth.new_nonce(), hello.engine_id, SCRIPTED_ENGINE_ID)
    proof = auth.prove(KEY, auth.SERVER_LABEL, parts)
    channel.send(Challenge(nonce=parts.server_nonce, proof=proof, engine_id=SCRIPTED_ENGINE_ID), limits())
    assert isinstance(receive(channel), Proof)
    message = receive(channel)
    return message if isinstance(message, Pull) else None


def block_bytes(block: int) -> memoryview:
    return memoryview(bytes([block + 1]) * LAYOUT.bytes_per_block)


def good_manifest(**changes: object) -> KVManifest:
    manifest = KVManifest(
        request_id="r",
        model_fingerprint=FINGERPRINT,
        kv_layout=LAYOUT,
        token_ids_hash=hash_token_ids(TOKENS, LAYOUT.block_size, FINGERPRINT),
        num_tokens=len(TOKENS),
        num_ready_tokens=len(TOKENS),
        first_token=7,
        checksums=tuple(checksum(block_bytes(block)) for block in range(NUM_BLOCKS)),
        state=ManifestState.READY,
    )
    return manifest.model_copy(update=changes)


async def _serve_half(num_ready_tokens: int) -> None:
    async with running_side("killed") as side:
        prefill = side.engine.accept("r", TOKENS)
        side.engine.compute(prefill, num_ready_tokens)
        print(json.dumps(side.manager.offer("r", len(TOKENS)).model_dump()), flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(_serve_half(int(sys.argv[1])))
