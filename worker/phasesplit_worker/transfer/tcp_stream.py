"""One stream of a pull over TCP: ask, receive in the agreed order, verify.

Refuses whatever is out of turn, too long or of another request before anything is received for it.
Counts its time: `busy_s` is what the link needed, waiting for the prefill to compute left out, and
is what the transfer's deadline limits. Knows frames, peers and a Reception; does not know the
pull's other streams.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.channel import Channel, Frame, Limits
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import (
    MANIFEST_BYTES_PER_BLOCK,
    MAX_SMALL_HEADER_BYTES,
    Blocks,
    Final,
    Heartbeat,
    Manifest,
    Message,
    Pull,
)
from phasesplit_worker.transfer.peers import Connection, PeerBook
from phasesplit_worker.transfer.pull import Reception
from phasesplit_worker.transfer.stripes import stripe

# Two heartbeats: a shorter deadline cannot tell a prefill that computes from a link that hangs.
SHORTEST_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one stream."""

    transfer_s: float  # busy time
    silence_s: float  # without a single byte


class PullStream:
    """Runs one stream. Used by one thread; its figures are read when that has ended."""

    def __init__(
        self,
        reception: Reception,
        pull: Pull,
        peers: PeerBook,
        limits: StreamLimits,
        on_progress: Callable[[], None],
    ) -> None:
        """`on_progress` is called after each frame of blocks."""
        self._on_progress = on_progress
        self._reception = reception
        self._pull = pull
        self._peers = peers
        self._limits = limits
        self._together = Cancellation()
        self._max_header_bytes = MAX_SMALL_HEADER_BYTES + MANIFEST_BYTES_PER_BLOCK * reception.num_blocks
        self._counted_until_s = 0.0  # busy_s includes the time up to here
        self._progress_s = 0.0  # last time that the peer had no reason to send more
        self.connection: Connection | None = None  # between messages once `run` has returned
        self.final: Final | None = None  # of stream 0 only
        self.busy_s = 0.0
        self.num_bytes = 0

    @property
    def ended_s(self) -> float:
        """Monotonic time of the end of the last frame."""
        return self._counted_until_s

    def run(self, together: Cancellation) -> None:
        """Receive everything. Raises TransferError; then the connection is closed."""
        self._together = together
        while True:
            connection = self._connect()
            try:
                with together.guarding(connection.channel):
                    manifest = self._ask(connection.channel)
                    self._receive(connection.channel, manifest)
            except _KeptConnectionDiedError:
                connection.channel.close()
                self._peers.forget(connection.address)
                if not connection.is_reused:
                    raise
            except BaseException:  # whatever it was: bytes left in the connection belong to nobody
                connection.channel.close()
                raise
            else:
                return

    def _connect(self) -> Connection:
        request = self._reception.request
        address = (request.host, request.port)
        kept = self._peers.take(address, request.engine_id)
        self.connection = kept or self._peers.connect(address, request.engine_id, self._waiting())
        return self.connection

    def _ask(self, channel: Channel) -> Frame:
        """Send the pull and await its manifest, for which the prefill must have been accepted."""
        self._counted_until_s = self._progress_s = time.monotonic()
        try:
            channel.send(self._pull, self._waiting())
            return self._await_frame(channel, 0)
        except TransferError as error:
            if error.reason is TransferFailure.CONNECT:
                raise _KeptConnectionDiedError(error.reason, str(error)) from error
            raise

    def _receive(self, channel: Channel, frame: Frame) -> None:
        if not isinstance(frame.message, Manifest):
            raise _unexpected(frame.message)
        self._reception.check_manifest(frame.message.manifest)
        self._count(time.monotonic())
        for start, stop in stripe(self._pull):
            self._receive_group(channel, start, stop)
        if self._pull.stream == 0:
            self.final = self._receive_final(channel)

    def _receive_group(self, channel: Channel, start: int, stop: int) -> None:
        """Receive and verify blocks `[start, stop)`, in as many frames as the prefill's chunks make."""
        bytes_per_block = self._reception.layout.bytes_per_block
        while start < stop:
            frame = self._await_frame(channel, start, (stop - start) * bytes_per_block)
            message = frame.message
            if not isinstance(message, Blocks) or message.first_block != start:
                raise _unexpected(message)
            end = start + len(message.checksums)
            if not start < end <= stop or frame.payload_bytes != (end - start) * bytes_per_block:
                raise TransferError(
                    TransferFailure.PROTOCOL,
                    f"{frame.payload_bytes} bytes came as blocks {start} to {end} of {stop}",
                )
            self._count(frame.arrived_s, message.waited_s)
            views = self._reception.views(start, end)
            self._receive_payload(channel, views)
            self._reception.verify(start, views, message.checksums)
            self._count(time.monotonic())
            self._progress_s = self._counted_until_s
            self._on_progress()
            start = end

    def _receive_payload(self, channel: Channel, views: list[memoryview]) -> None:
        before = channel.num_received_bytes
        try:
            channel.receive_into(views, self._receiving())
        finally:  # a link too slow for the deadline shows in what it did carry
            self.num_bytes += channel.num_received_bytes - before
            self._count(time.monotonic())

    def _receive_final(self, channel: Channel) -> Final:
        frame = self._await_frame(channel, self._reception.num_blocks)
        if not isinstance(frame.message, Final):
            raise _unexpected(frame.message)
        self._reception.check_final(frame.message.manifest)
        self._count(frame.arrived_s, frame.message.waited_s)
        return frame.message

    def _await_frame(self, channel: Channel, block: int, max_payload_bytes: int = 0) -> Frame:
        """The next frame that is no heartbeat.

        A heartbeat excuses the peer only while it says that `block` is not ready yet.
        """
        while True:
            frame = channel.receive(
                self._waiting(), max_header_bytes=self._max_header_bytes, max_payload_bytes=max_payload_bytes
            )
            if frame.payload_bytes and not isinstance(frame.message, Blocks):
                raise _unexpected(frame.message)
            if not isinstance(frame.message, Heartbeat):
                return frame
            if frame.message.num_ready_blocks <= block:
                self._progress_s = self._counted_until_s = frame.arrived_s
            self._waiting().check(self._progress_s)

    def _count(self, until_s: float, waited_s: float = 0.0) -> None:
        """Add the time up to `until_s`, without what the sender waited for the prefill."""
        elapsed_s = max(0.0, until_s - self._counted_until_s)
        self.busy_s += elapsed_s - min(waited_s, elapsed_s)
        self._counted_until_s = until_s

    def _receiving(self) -> Limits:
        return self._limit(self._limits.transfer_s - self.busy_s)

    def _waiting(self) -> Limits:
        return self._limit(max(SHORTEST_WAIT_S, self._limits.transfer_s - self.busy_s))

    def _limit(self, left_s: float) -> Limits:
        return Limits(
            deadline=min(self._reception.request.deadline, time.monotonic() + left_s),
            silence_s=self._limits.silence_s,
            is_cancelled=self._together.is_set,
        )


class _KeptConnectionDiedError(TransferError):
    """The connection broke before the peer answered: if it was a kept one, a new one may do."""


def _unexpected(message: Message) -> TransferError:
    return TransferError(TransferFailure.PROTOCOL, f"{type(message).__name__} came out of turn")
