"""One authenticated connection on the prefill side: proves, then serves pulls, releases, probes.

The peer can make this side hold nothing but small headers. Blocks go to the socket straight from
the pool. Knows KVStore and frames; does not know who will decode.
"""

import time
from collections.abc import Callable
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

MAX_GROUP_BYTES = 64 << 20
_PROBE_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds of the serving side."""

    handshake_s: float = 5.0
    idle_s: float = 120.0  # an authenticated connection without a request
    silence_s: float = 10.0  # a peer that does not read what it asked for
    pull_s: float = 3600.0  # whole pull, a long prefill included
    probe_s: float = 60.0
    heartbeat_s: float = 0.5
    max_connections: int = 512
    max_unauthenticated: int = 32


@dataclass(frozen=True, kw_only=True)
class ServerIdentity:
    """Who this worker is in handshakes, and what it serves."""

    engine_id: str
    pod: str
    node: str
    model_fingerprint: str


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """What all sessions of a server share."""

    store: KVStore
    pool: KVBlocks
    identity: ServerIdentity
    key: bytes
    limits: ServerLimits
    is_stopped: Callable[[], bool]


class Session:
    """Serves one connection on its own thread."""

    def __init__(self, channel: Channel, context: SessionContext) -> None:
        self._channel = channel
        self._context = context
        self._store = context.store
        self._limits = context.limits

    def authenticate(self) -> None:
        """Mutual proof of the key. Raises TransferError(AUTH)."""
        limits = self._limit(self._limits.handshake_s, self._limits.handshake_s)
        hello = self._receive(limits)
        if not isinstance(hello, Hello):
            raise TransferError(TransferFailure.AUTH, "the first message must be a HELLO")
        me = self._context.identity
        parts = auth.Parts(hello.nonce, auth.new_nonce(), hello.engine_id, me.engine_id)
        challenge = Challenge(
            nonce=parts.server_nonce,
            proof=auth.prove(self._context.key, auth.SERVER_LABEL, parts),
            engine_id=me.engine_id,
            pod=me.pod,
            node=me.node,
        )
        self._channel.send(challenge, limits)
        proof = self._receive(limits)
        expected = auth.prove(self._context.key, auth.CLIENT_LABEL, parts)
        if not isinstance(proof, Proof) or not auth.is_proof(expected, proof.proof):
            raise TransferError(TransferFailure.AUTH, "the peer does not hold this object's transfer key")

    def serve_request(self) -> None:
        """Serve the next request. Raises TransferError(CANCELLED) when none comes."""
        try:
            message = self._receive(self._limit(self._limits.idle_s, self._limits.idle_s))
        except TransferError as error:
            if error.reason in (TransferFailure.TIMEOUT, TransferFailure.PROGRESS):
                raise TransferError(TransferFailure.CANCELLED, "nothing was asked for") from error
            raise
        if isinstance(message, Pull):
            self._serve_pull(message)
        elif isinstance(message, Release):
            self._store.release(message.request_id, pulled=message.pulled)
        elif isinstance(message, Probe):
            self._serve_probe(message)
        else:
            raise TransferError(TransferFailure.PROTOCOL, f"{type(message).__name__} is no request")

    def _serve_pull(self, pull: Pull) -> None:
        self._check_pull(pull)
        self._await_accepted(pull.request_id)
        with self._store.reading(pull.request_id) as export:
            limits = Limits(
                deadline=time.monotonic() + self._limits.pull_s,
                silence_s=self._limits.silence_s,
                is_cancelled=lambda: export.is_ended or self._context.is_stopped(),
            )
            self._channel.send(Manifest(manifest=self._store.to_manifest(export)), limits)
            if pull.num_blocks != export.num_blocks:
                raise TransferError(
                    TransferFailure.TOKEN_HASH,
                    f"request {pull.request_id} has {export.num_blocks} blocks, not {pull.num_blocks}",
                )
            for start, stop in stripe(pull):
                self._send_group(export, start, stop, limits)
            if pull.stream == 0:
                self._send_final(export, limits)

    def _check_pull(self, pull: Pull) -> None:
        me = self._context.identity
        if pull.engine_id is not None and pull.engine_id != me.engine_id:
            raise TransferError(TransferFailure.ENGINE_ID, "this worker was restarted since the prefill")
        if pull.model_fingerprint != me.model_fingerprint:
            raise TransferError(
                TransferFailure.FINGERPRINT,
                f"this worker serves model {me.model_fingerprint}, the peer {pull.model_fingerprint}",
            )
        group_bytes = pull.group_blocks * self._context.pool.layout.bytes_per_block
        if pull.stream >= pull.num_streams or (pull.group_blocks > 1 and group_bytes > MAX_GROUP_BYTES):
            raise TransferError(TransferFailure.PROTOCOL, "the pull's stream or group makes no sense")

    def _await_accepted(self, request_id: str) -> None:
        limits = self._limit(self._limits.pull_s, self._limits.silence_s)
        while not self._store.wait_accepted(request_id, self._limits.heartbeat_s):
            self._beat(0, limits)

    def _send_group(self, export: Export, start: int, stop: int, limits: Limits) -> None:
        while start < stop:
            num_sealed, waited_s = self._await_blocks(export, start, limits)
            block_ids, checksums = self._store.sealed(export, start, min(stop, num_sealed))
            views = [self._context.pool.block_view(block_id) for block_id in block_ids]
            if views:  # else a preemption came between
                blocks = Blocks(first_block=start, checksums=checksums, waited_s=waited_s)
                self._channel.send(blocks, limits, views)
            start += len(views)

    def _await_blocks(self, export: Export, block: int, limits: Limits) -> tuple[int, float]:
        """Sealed blocks once there are more than `block`, and the time waited for the prefill."""
        started_s = time.monotonic()
        while True:
            num_sealed = self._store.wait_sealed(export, block, self._limits.heartbeat_s)
            if num_sealed > block:
                return num_sealed, time.monotonic() - started_s
            self._beat(num_sealed, limits)

    def _send_final(self, export: Export, limits: Limits) -> None:
        started_s = time.monotonic()
        while not self._store.wait_complete(export, self._limits.heartbeat_s):
            self._beat(export.num_sealed_blocks, limits)
        final = Final(
            manifest=self._store.to_manifest(export),
            finished_age_s=self._store.finished_age_s(export),
            waited_s=time.monotonic() - started_s,
        )
        self._channel.send(final, limits)

    def _beat(self, num_ready_blocks: int, limits: Limits) -> None:
        limits.check(time.monotonic())
        self._channel.send(Heartbeat(num_ready_blocks=num_ready_blocks), limits)

    def _serve_probe(self, probe: Probe) -> None:
        buffer = memoryview(bytes(min(probe.num_bytes, _PROBE_BUFFER_BYTES)))
        whole, rest = divmod(probe.num_bytes, len(buffer))
        limits = self._limit(self._limits.probe_s, self._limits.silence_s)
        self._channel.send(ProbeData(), limits, [buffer] * whole + ([buffer[:rest]] if rest else []))

    def _receive(self, limits: Limits) -> Message:
        return self._channel.receive(limits, max_header_bytes=MAX_SMALL_HEADER_BYTES).message

    def _limit(self, whole_s: float, silence_s: float) -> Limits:
        return Limits(
            deadline=time.monotonic() + whole_s,
            silence_s=silence_s,
            is_cancelled=self._context.is_stopped,
        )
