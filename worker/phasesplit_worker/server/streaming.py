"""Server-sent events on one response. Knows SSE framing; knows nothing of what is sent."""

import asyncio
import json
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"
STALL_TIMEOUT_S = 60.0  # a reader that takes nothing for so long is given up

# Made once: json.dumps with arguments of its own builds an encoder for every call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def encode_event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(value).encode() + b"\n\n"


class EventStream:
    """A streamed answer; headers go out with the first event, so that earlier failures keep their status."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
            | headers
        )

    @property
    def is_started(self) -> bool:
        """Have headers been sent? Then failures can only be error events."""
        return self._response.prepared

    async def send(self, *events: dict[str, Any]) -> None:
        """Send events in one write; raises ConnectionResetError when the peer is gone."""
        await self.send_raw(b"".join(map(encode_event, events)))

    async def send_raw(self, data: bytes) -> None:
        """Send encoded events."""
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await self._response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from error

    async def finish(self, *, done: bool) -> web.StreamResponse:
        """End the response, with `[DONE]` only after success."""
        if done:
            await self.send_raw(DONE)
        await self._response.write_eof()
        return self._response
