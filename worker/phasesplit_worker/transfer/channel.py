"""One connection: whole frames over a blocking socket, with bounds on every wait.

The kernel is asked for whole buffers at a time (MSG_WAITALL, many buffers per call), because each
return from a call takes the interpreter lock back from a busy engine. It gives up every
`_SLICE_S`, so that deadlines, silence and cancellation are looked at. Buffer sizes are left to the
kernel's own tuning. Knows frames and time; does not know what they mean.
"""

import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.messages import (
    PREFIX,
    Error,
    Kind,
    Message,
    decode_header,
    decode_prefix,
    encode,
)

_SLICE_S = 0.25
_SLICE = struct.pack("ll", int(_SLICE_S), int(_SLICE_S % 1 * 1e6))


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long one side waits. Times are on the monotonic clock."""

    deadline: float  # when the whole of it must be over
    silence_s: float  # longest time without a single byte
    is_cancelled: Callable[[], bool] = _never

    def check(self, last_progress: float) -> None:
        """Raise TransferError when one of the bounds is passed."""
        now = time.monotonic()
        if self.is_cancelled():
            raise TransferError(TransferFailure.CANCELLED, "the transfer was cancelled")
        if now >= self.deadline:
            raise TransferError(TransferFailure.TIMEOUT, "the transfer's deadline has passed")
        if now - last_progress >= self.silence_s:
            raise TransferError(TransferFailure.PROGRESS, f"the peer was silent for {self.silence_s:.1f} s")

    def fail_closed(self, what: str) -> TransferError:
        """The error for a broken connection: our own doing if we cancelled."""
        if self.is_cancelled():
            return TransferError(TransferFailure.CANCELLED, "the transfer was cancelled")
        return TransferError(TransferFailure.CONNECT, what)


@dataclass(frozen=True)
class Frame:
    """A received frame; its payload, if any, is still in the socket."""

    kind: Kind
    message: Message
    payload_bytes: int
    arrived_s: float  # monotonic time of its first byte, as near as a blocking read can tell


class Channel:
    """Frames over a connected socket. Used by one thread at a time; `close` by any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
        self._socket = sock
        self.num_received_bytes = 0  # since the connection was made

    def send(self, message: Message, limits: Limits, payload: Sequence[memoryview] = ()) -> None:
        """Send one frame, its payload straight from the given buffers."""
        payload_bytes = sum(view.nbytes for view in payload)
        pending = [memoryview(encode(message, payload_bytes)), *payload]
        progress = time.monotonic()
        while pending:
            try:
                sent = self._socket.sendmsg(pending)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise limits.fail_closed(f"the connection broke ({error.strerror})") from error
            if sent:
                progress = time.monotonic()
                pending = _drop(pending, sent)
            if pending:
                limits.check(progress)

    def receive(self, limits: Limits, *, max_header_bytes: int, max_payload_bytes: int = 0) -> Frame:
        """Receive prefix and header of the next frame. An Error frame is raised as its exception."""
        prefix_bytes = bytearray(PREFIX.size)
        self.receive_into([memoryview(prefix_bytes)], limits)
        arrived_s = time.monotonic()
        prefix = decode_prefix(
            bytes(prefix_bytes), max_header_bytes=max_header_bytes, max_payload_bytes=max_payload_bytes
        )
        header = bytearray(prefix.header_bytes)
        if prefix.header_bytes:
            self.receive_into([memoryview(header)], limits)
        message = decode_header(prefix.kind, bytes(header))
        if isinstance(message, Error):
            raise message.to_exception()
        return Frame(prefix.kind, message, prefix.payload_bytes, arrived_s)

    def receive_into(self, views: Sequence[memoryview], limits: Limits) -> None:
        """Fill all the views from the socket, in order."""
        pending = list(views)
        progress = time.monotonic()
        while pending:
            try:
                received = self._socket.recvmsg_into(pending, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                limits.check(progress)
                continue
            except OSError as error:
                raise limits.fail_closed(f"the connection broke ({error.strerror})") from error
            if not received:
                raise limits.fail_closed("the peer closed the connection")
            self.num_received_bytes += received
            progress = time.monotonic()
            pending = _drop(pending, received)
            if pending:
                limits.check(progress)

    def is_quiet(self) -> bool:
        """Whether an idle connection is still open, with nothing unexpected in it."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close for both sides; a thread blocked in `send` or `receive` returns at once."""
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def interrupt(self) -> None:
        """Wake a thread that is blocked in here without freeing the descriptor under it."""
        with suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)


def _drop(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` after their first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
