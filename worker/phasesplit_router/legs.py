"""One leg: a POST to a worker and the events it streams back.

Knows the leg protocol (`phasesplit.api.legs`) and HTTP; does not know what a request is made of
nor what happens after a failure. Failures are `LegError`s that name the worker.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from phasesplit.api import legs as protocol
from phasesplit.api import names
from phasesplit_router import sse
from phasesplit_router.errors import LegBusyError, LegLostError, LegRejectedError
from phasesplit_router.workers import Worker

_MAX_ERROR_BYTES = 1 << 20
_BUSY = frozenset({429, 503})
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a leg may stay silent. Generous: a slow CPU must not look like a dead worker."""

    first_token_s: float = 600.0
    between_tokens_s: float = 30.0


class Leg:
    """A leg in flight. Close it in every case; closing is immediate and drops the connection."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        worker: Worker,
        path: str,
        body: bytes,
        headers: dict[str, str],
    ) -> None:
        self.worker = worker
        self.request_id = headers[names.HEADER_REQUEST_ID]
        self.report: protocol.LegReport | None = None
        self.usage: dict[str, Any] | None = None
        self.is_done = False  # [DONE] was read
        self.is_open = False  # the worker has taken it
        self.had_token = False
        self.last_byte_s = time.monotonic()
        self._session = session
        self._url = worker.address.url + path
        self._body = body
        self._headers = headers
        self._parser = sse.SseParser()
        self._response: aiohttp.ClientResponse | None = None
        self._opening: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._aborted: str | None = None
        worker.legs.add(self)

    async def open(self) -> None:
        """Send the request and read the status."""
        self._opening = asyncio.ensure_future(self._post())
        try:
            response = await self._opening
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._aborted is None or (task is not None and task.cancelling()):
                raise
            raise self._lost(self._aborted) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"it cannot be reached ({_text(error)})") from error
        finally:
            self._opening = None
        self._response = response
        self.last_byte_s = time.monotonic()
        if response.status != 200:
            await self._refused(response)
        self.is_open = True

    async def _post(self) -> aiohttp.ClientResponse:
        return await self._session.post(self._url, data=self._body, headers=self._headers)

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(5):
                body = await response.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""
        status = response.status
        if status in _BUSY:
            raise LegBusyError(self.worker.pod, f"it refused with status {status}: {_message(body)}")
        # 401 and 403 mean that router and worker disagree on the token, which no client can repair.
        if 400 <= status < 500 and status not in {401, 403, 408}:
            raise LegRejectedError(self.worker.pod, status, body)
        raise self._lost(f"it answered with status {status}: {_message(body)}")

    async def read(self) -> list[Event]:
        """The next events, at least one. An empty list means that the leg ended well."""
        response = self._response
        while not self.is_done:
            if response is None or self._aborted is not None:
                raise self._lost(self._aborted or "it was closed")
            try:
                data = await response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise self._lost(self._aborted or f"the connection broke ({_text(error)})") from error
            if not data:
                raise self._lost(self._aborted or "the answer ended before [DONE]")
            self.last_byte_s = time.monotonic()
            events = self._parse(data)
            if events:
                return events
        await self._read_to_end()
        return []

    async def _read_to_end(self) -> None:
        """Wait a moment for the end of the body, without which the connection cannot be kept."""
        if self._response is None or self._response.content.at_eof():
            return
        try:
            async with asyncio.timeout(0.1):
                await self._response.content.readany()
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError: the connection is dropped
            self._response.close()

    def _parse(self, data: bytes) -> list[Event]:
        """Events for the caller; reports, usage and [DONE] are kept here."""
        try:
            payloads = self._parser.feed(data)
            events: list[Event] = []
            for payload in payloads:
                if payload == sse.DONE:
                    self.is_done = True
                    break
                event = json.loads(payload.decode())
                kind = event.get("object")
                if kind == protocol.LEG_DONE:
                    self.report = protocol.LegReport.model_validate(event)
                elif "error" in event:
                    self._raise_error(event["error"])
                else:
                    if event.get("usage"):
                        self.usage = event["usage"]
                    events.append(event)
        except (ValueError, AttributeError) as error:  # not JSON, not an object, or not the protocol
            raise self._lost(f"it sent something that is no leg event ({_text(error)})") from error
        return events

    def _raise_error(self, error: Any) -> None:
        fields = error if isinstance(error, dict) else {"message": str(error)}
        if fields.get("type") == "invalid_request_error":
            raise LegRejectedError(self.worker.pod, 400, json.dumps({"error": fields}).encode())
        raise self._lost(f"it reported an error: {fields.get('message', '')}")

    def abort(self, message: str) -> None:
        """Break the leg off from outside: its reader gets `LegLostError`."""
        if self._aborted is None:
            self._aborted = message
            if self._opening is not None:
                self._opening.cancel()
            if self._response is not None:
                self._response.close()

    def close(self) -> None:
        """Let go. After a whole answer the connection is kept for the next leg."""
        self.worker.legs.discard(self)
        if self._opening is not None:
            self._opening.cancel()
            self._opening.add_done_callback(_close_late)
        if self._response is not None:
            if self.is_done:
                self._response.release()
            else:
                self._response.close()
            self._response = None

    def _lost(self, message: str) -> LegLostError:
        return LegLostError(self.worker.pod, message)


def _close_late(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    """An answer that arrives in spite of the cancellation must not keep its connection."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _message(body: bytes) -> str:
    """The sentence of an OpenAI error body, or the start of whatever came."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
    return str(message)[:500]
