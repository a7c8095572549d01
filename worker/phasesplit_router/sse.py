"""Server-sent events: an incremental parser of byte chunks and the bytes of one event.

Knows the framing (`\n` and `\r\n` line ends, comments, data of several lines), not what is sent.
"""

MAX_EVENT_BYTES = 8 << 20
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class SseError(ValueError):
    """An event is larger than `MAX_EVENT_BYTES`."""


class SseParser:
    """Turns chunks, cut anywhere, into the data of whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of every event that `chunk` completes, in order."""
        lines = (self._rest + chunk if self._rest else chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise SseError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if text.startswith(b"data:"):
                self._data.append(text[6:] if text.startswith(b"data: ") else text[5:])
            elif not text and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        return events


def encode_event(data: bytes) -> bytes:
    """One event. `data` holds no line ends (JSON never does)."""
    return b"data: " + data + b"\n\n"
