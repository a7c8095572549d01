"""One stream of a pull over TCP: ask, receive in the agreed order, verify.

Refuses whatever is out of turn, too long or of another request before anything is received for it.
Knows frames, peers and a Reception; does not know the pull's other streams.
"""

import time
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


@dataclass(frozen=True)
class StreamEnd:
    """A stream that has received all its blocks. Its connection is between messages."""

    connection: Connection
    busy_s: float
    final: Final | None  # of stream 0 only
    ended_s: float  # monotonic time of the last frame's arrival


class PullStream:
    """Runs one stream. Used by one thread."""

    def __init__(self, reception: Reception, pull: Pull, peers: PeerBook, limits: Limits) -> None:
        self._reception = reception
        self._pull = pull
        self._peers = peers
        self._limits = limits
        self._max_header_bytes = MAX_SMALL_HEADER_BYTES + MANIFEST_BYTES_PER_BLOCK * reception.num_blocks
        self._busy_s = 0.0
        self._idle_since_s = 0.0  # end of the last frame
        self._progress_s = 0.0  # last time that the peer had no reason to send more

    def run(self, together: Cancellation) -> StreamEnd:
        """Receive everything. Raises TransferError; then the connection is closed."""
        while True:
            connection = self._connect()
            try:
                with together.guarding(connection.channel):
                    manifest = self._ask(connection.channel)
                    return self._receive(connection, manifest)
            except _KeptConnectionDiedError:
                connection.channel.close()
                self._peers.forget(connection.address)
                if not connection.is_reused:
                    raise
            except BaseException:  # whatever it was: bytes left in the connection belong to nobody
                connection.channel.close()
                raise

    def _connect(self) -> Connection:
        request = self._reception.request
        address = (request.host, request.port)
        kept = self._peers.take(address, request.engine_id)
        return kept or self._peers.connect(address, request.engine_id, self._limits)

    def _ask(self, channel: Channel) -> Frame:
        """Send the pull and await its manifest, for which the prefill must have been accepted."""
        self._idle_since_s = self._progress_s = time.monotonic()
        try:
            channel.send(self._pull, self._limits)
            frame = self._await_frame(channel, 0)
        except TransferError as error:
            if error.reason is TransferFailure.CONNECT:
                raise _KeptConnectionDiedError(error.reason, str(error)) from error
            raise
        return frame

    def _receive(self, connection: Connection, frame: Frame) -> StreamEnd:
        if not isinstance(frame.message, Manifest):
            raise _unexpected(frame.message)
        self._reception.check_manifest(frame.message.manifest)
        self._account(frame, 0.0)
        for start, stop in stripe(self._pull):
            self._receive_group(connection.channel, start, stop)
        final = self._receive_final(connection.channel) if self._pull.stream == 0 else None
        return StreamEnd(connection, self._busy_s, final, self._idle_since_s)

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
            views = self._reception.views(start, end)
            channel.receive_into(views, self._limits)
            self._reception.verify(start, views, message.checksums)
            self._account(frame, message.waited_s)
            start = end

    def _receive_final(self, channel: Channel) -> Final:
        frame = self._await_frame(channel, self._reception.num_blocks)
        if not isinstance(frame.message, Final):
            raise _unexpected(frame.message)
        self._reception.check_final(frame.message.manifest)
        self._account(frame, frame.message.waited_s)
        return frame.message

    def _await_frame(self, channel: Channel, block: int, max_payload_bytes: int = 0) -> Frame:
        """The next frame that is no heartbeat.

        A heartbeat is progress only while the peer says that `block` is not ready yet.
        """
        while True:
            frame = channel.receive(
                self._limits, max_header_bytes=self._max_header_bytes, max_payload_bytes=max_payload_bytes
            )
            if frame.payload_bytes and not isinstance(frame.message, Blocks):
                raise _unexpected(frame.message)
            if not isinstance(frame.message, Heartbeat):
                return frame
            if frame.message.num_ready_blocks <= block:
                self._progress_s = frame.arrived_s
            self._limits.check(self._progress_s)
            if self._busy_s == 0.0:
                self._idle_since_s = frame.arrived_s  # not even accepted: nothing could be sent

    def _account(self, frame: Frame, waited_s: float) -> None:
        """Add the time since the last frame, without what the sender waited for the prefill."""
        now_s = time.monotonic()
        idle_s = max(0.0, frame.arrived_s - self._idle_since_s)
        self._busy_s += now_s - self._idle_since_s - min(waited_s, idle_s)
        self._idle_since_s = self._progress_s = now_s


class _KeptConnectionDiedError(TransferError):
    """The connection broke before the peer answered: if it was a kept one, a new one may do."""


def _unexpected(message: Message) -> TransferError:
    return TransferError(TransferFailure.PROTOCOL, f"{type(message).__name__} came out of turn")
