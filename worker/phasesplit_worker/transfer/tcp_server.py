"""The prefill side of the TCP transport: serves pulls, releases and probes.

One thread per connection, bounded in number; a peer must prove the key within a few seconds and
can then make this side hold nothing but a small header. Blocks go to the socket straight from the
pool. Knows KVStore and frames; does not know who will decode.
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.transfer import auth
from phasesplit_worker.transfer.channel import Channel, Limits
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.export import Export
from phasesplit_worker.transfer.messages import (
    MAX_SMALL_HEADER_BYTES,
    Blocks,
    Challenge,
    Error,
    Final,
    Heartbeat,
    Hello,
    Manifest,
    Message,
    Probe,
    ProbeData,
    Proof,
    Pull,
    Release,
)
from phasesplit_worker.transfer.store import KVStore
from phasesplit_worker.transfer.stripes import stripe

logger = logging.getLogger(__name__)

MAX_GROUP_BYTES = 64 << 20
_PROBE_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds of the serving side."""

    handshake_s: float = 5.0
    idle_s: float = 120.0  # an authenticated connection without a request
    silence_s: float = 10.0  # a peer that does not read what it asked for
    pull_s: float = 3600.0  # whole pull, a long prefill included
    heartbeat_s: float = 0.5
    max_connections: int = 256
    max_unauthenticated: int = 32


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this worker is in handshakes."""

    engine_id: str
    pod: str
    node: str
    model_fingerprint: str


class TcpServer:
    """Listens on one port. `start` binds; `stop` closes every connection."""

    def __init__(
        self,
        store: KVStore,
        pool: KVBlocks,
        identity: Identity,
        key: bytes,
        *,
        host: str,
        port: int,
        limits: ServerLimits | None = None,
        on_refused: Callable[[TransferFailure], None] = lambda _: None,
    ) -> None:
        auth.check_key(key)
        self._store = store
        self._pool = pool
        self._identity = identity
        self._key = key
        self._address = (host, port)
        self._limits = limits or ServerLimits()
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._num_unauthenticated = 0
        self._listener: socket.socket | None = None
        self._is_stopped = threading.Event()
        self.refused: Counter[TransferFailure] = Counter()

    def start(self) -> None:
        """Bind and listen. Raises OSError when the port is taken."""
        self._listener = socket.create_server(self._address, backlog=128)
        self._address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, args=(self._listener,), name="kv-accept", daemon=True).start()

    @property
    def port(self) -> int:
        """The port listened on; the one asked for until `start`."""
        return self._address[1]

    @property
    def num_connections(self) -> int:
        """Open connections, authenticated or not."""
        with self._lock:
            return len(self._connections)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close listener and connections and wait for their threads."""
        self._is_stopped.set()
        if self._listener is not None:
            with suppress(OSError):  # wakes accept; not connected is what a listener is
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for channel in connections:
            channel.interrupt()
        deadline = time.monotonic() + timeout_s
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._is_stopped.is_set():
                    logger.warning("accepting a KV connection failed: %s", error)
                    self._is_stopped.wait(0.1)  # out of descriptors: do not spin
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
        except OSError:  # reset before it was looked at
            connection.close()
            return
        with self._lock:
            is_full = (
                len(self._connections) >= self._limits.max_connections
                or self._num_unauthenticated >= self._limits.max_unauthenticated
            )
            if not is_full:
                thread = threading.Thread(target=self._serve, args=(channel,), name="kv-serve", daemon=True)
                self._connections[channel] = thread
                self._num_unauthenticated += 1
        if is_full:
            self._count_refused(TransferFailure.CONNECT)
            channel.close()
            return
        thread.start()

    def _serve(self, channel: Channel) -> None:
        try:
            try:
                self._authenticate(channel)
            finally:
                with self._lock:
                    self._num_unauthenticated -= 1
            while not self._is_stopped.is_set():
                self._serve_request(channel)
        except TransferError as error:
            self._refuse(channel, error)
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(channel, None)

    def _authenticate(self, channel: Channel) -> None:
        limits = self._limit(self._limits.handshake_s, self._limits.handshake_s)
        hello = channel.receive(limits, max_header_bytes=MAX_SMALL_HEADER_BYTES).message
        if not isinstance(hello, Hello):
            raise TransferError(TransferFailure.AUTH, "the first message must be a HELLO")
        nonce = auth.new_nonce()
        me = self._identity
        parts = auth.Parts(hello.nonce, nonce, hello.engine_id, me.engine_id)
        challenge = Challenge(
            nonce=nonce,
            proof=auth.prove(self._key, auth.SERVER_LABEL, parts),
            engine_id=me.engine_id,
            pod=me.pod,
            node=me.node,
        )
        channel.send(challenge, limits)
        proof = channel.receive(limits, max_header_bytes=MAX_SMALL_HEADER_BYTES).message
        expected = auth.prove(self._key, auth.CLIENT_LABEL, parts)
        if not isinstance(proof, Proof) or not auth.is_proof(expected, proof.proof):
            raise TransferError(TransferFailure.AUTH, "the peer does not hold this object's transfer key")

    def _serve_request(self, channel: Channel) -> None:
        idle = self._limit(self._limits.idle_s, self._limits.idle_s)
        try:
            message = channel.receive(idle, max_header_bytes=MAX_SMALL_HEADER_BYTES).message
        except TransferError as error:
            if error.reason in (TransferFailure.TIMEOUT, TransferFailure.PROGRESS):
                raise TransferError(TransferFailure.CANCELLED, "nothing was asked for") from error
            raise
        if isinstance(message, Pull):
            self._serve_pull(channel, message)
        elif isinstance(message, Release):
            self._store.release(message.request_id, pulled=message.pulled)
        elif isinstance(message, Probe):
            self._serve_probe(channel, message)
        else:
            kind = type(message).__name__
            raise TransferError(TransferFailure.PROTOCOL, f"{kind} is no request")

    def _serve_pull(self, channel: Channel, pull: Pull) -> None:
        self._check_pull(pull)
        waiting = self._limit(self._limits.pull_s, self._limits.silence_s)
        while not self._store.wait_accepted(pull.request_id, self._limits.heartbeat_s):
            self._beat(channel, 0, waiting)
        with self._store.reading(pull.request_id) as export:
            limits = Limits(
                deadline=time.monotonic() + self._limits.pull_s,
                silence_s=self._limits.silence_s,
                is_cancelled=lambda: export.is_ended or self._is_stopped.is_set(),
            )
            channel.send(Manifest(manifest=self._store.to_manifest(export)), limits)
            if pull.num_blocks != export.num_blocks:
                raise TransferError(
                    TransferFailure.TOKEN_HASH,
                    f"request {pull.request_id} has {export.num_blocks} blocks, not {pull.num_blocks}",
                )
            for start, stop in stripe(pull):
                self._send_group(channel, export, start, stop, limits)
            if pull.stream == 0:
                self._send_final(channel, export, limits)

    def _check_pull(self, pull: Pull) -> None:
        me = self._identity
        if pull.engine_id is not None and pull.engine_id != me.engine_id:
            raise TransferError(TransferFailure.ENGINE_ID, "this worker was restarted since the prefill")
        if pull.model_fingerprint != me.model_fingerprint:
            raise TransferError(
                TransferFailure.FINGERPRINT,
                f"this worker serves model {me.model_fingerprint}, the peer {pull.model_fingerprint}",
            )
        group_bytes = pull.group_blocks * self._pool.layout.bytes_per_block
        if pull.stream >= pull.num_streams or (pull.group_blocks > 1 and group_bytes > MAX_GROUP_BYTES):
            raise TransferError(TransferFailure.PROTOCOL, "the pull's stream or group makes no sense")

    def _send_group(self, channel: Channel, export: Export, start: int, stop: int, limits: Limits) -> None:
        while start < stop:
            num_sealed, waited_s = self._await_blocks(channel, export, start, limits)
            end = min(stop, num_sealed)
            block_ids, checksums = self._store.sealed(export, start, end)
            views = [self._pool.block_view(block_id) for block_id in block_ids]
            channel.send(Blocks(first_block=start, checksums=checksums, waited_s=waited_s), limits, views)
            start += len(block_ids)

    def _await_blocks(
        self, channel: Channel, export: Export, block: int, limits: Limits
    ) -> tuple[int, float]:
        """Sealed blocks once there are more than `block`, and the time waited for the prefill."""
        started = time.monotonic()
        while True:
            num_sealed = self._store.wait_sealed(export, block, self._limits.heartbeat_s)
            if num_sealed > block:
                return num_sealed, time.monotonic() - started
            self._beat(channel, num_sealed, limits)

    def _send_final(self, channel: Channel, export: Export, limits: Limits) -> None:
        started = time.monotonic()
        while not self._store.wait_complete(export, self._limits.heartbeat_s):
            self._beat(channel, export.num_sealed_blocks, limits)
        final = Final(
            manifest=self._store.to_manifest(export),
            finished_age_s=self._store.finished_age_s(export),
            waited_s=time.monotonic() - started,
        )
        channel.send(final, limits)

    def _beat(self, channel: Channel, num_ready_blocks: int, limits: Limits) -> None:
        limits.check(time.monotonic())
        channel.send(Heartbeat(num_ready_blocks=num_ready_blocks), limits)

    def _serve_probe(self, channel: Channel, probe: Probe) -> None:
        buffer = memoryview(bytes(min(probe.num_bytes, _PROBE_BUFFER_BYTES)))
        whole, rest = divmod(probe.num_bytes, len(buffer))
        limits = self._limit(60.0, self._limits.silence_s)
        channel.send(ProbeData(), limits, [buffer] * whole + ([buffer[:rest]] if rest else []))

    def _limit(self, whole_s: float, silence_s: float) -> Limits:
        return Limits(
            deadline=time.monotonic() + whole_s,
            silence_s=silence_s,
            is_cancelled=self._is_stopped.is_set,
        )

    def _refuse(self, channel: Channel, error: TransferError) -> None:
        """Tell the peer why, if it still listens, and count."""
        if error.reason in (TransferFailure.CONNECT, TransferFailure.CANCELLED):
            return  # the peer went away, or an end in mid-frame: nothing can be said any more
        self._count_refused(error.reason)
        message: Message = Error(reason=error.reason, message=str(error))
        with suppress(TransferError):  # the peer does not listen: closing says enough
            channel.send(message, Limits(deadline=time.monotonic() + 1.0, silence_s=1.0))

    def _count_refused(self, reason: TransferFailure) -> None:
        with self._lock:
            self.refused[reason] += 1
        self._on_refused(reason)
