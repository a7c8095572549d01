"""Reads routers' reports and traces with the object's admin token. Reads only."""

import asyncio
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from phasesplit.api import names
from phasesplit.api.reports import RouterReport
from phasesplit.api.traces import TraceBatch

_TIMEOUT = aiohttp.ClientTimeout(total=3.0, connect=1.5)
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class RouterAnswer:
    """One router's report, or why there is none."""

    pod: str
    report: RouterReport | None = None
    error: str = ""


@dataclass(frozen=True)
class TraceCursor:
    """Up to where a router's trace is known."""

    epoch: str = ""
    after: int = 0


class _NoAnswerError(Exception):
    """One sentence about a router."""


class RouterClient:
    """Asks router pods for their status and their traces."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def read_all(self, addresses: dict[str, str], token: str) -> list[RouterAnswer]:
        """Reports of all routers of one object, by pod name and IP, at the same time."""
        return list(await asyncio.gather(*(self._read(pod, ip, token) for pod, ip in addresses.items())))

    async def read_trace(self, pod: str, ip: str, token: str, cursor: TraceCursor) -> TraceBatch | None:
        """The rows of one router after the cursor; None when it does not answer, or is an older one."""
        try:
            path = f"{names.PATH_ROUTER_TRACE}?epoch={cursor.epoch}&after={cursor.after}"
            return TraceBatch.model_validate_json(await self._get(pod, ip, path, token))
        except (_NoAnswerError, ValidationError):
            return None

    async def _read(self, pod: str, ip: str, token: str) -> RouterAnswer:
        try:
            body = await self._get(pod, ip, names.PATH_ROUTER_STATUS, token)
            return RouterAnswer(pod, RouterReport.model_validate_json(body))
        except _NoAnswerError as error:
            return RouterAnswer(pod, error=str(error))
        except ValidationError as error:
            count = error.error_count()
            return RouterAnswer(pod, error=f"router {pod} sent a report with {count} fields not understood")

    async def _get(self, pod: str, ip: str, path: str, token: str) -> bytes:
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{names.ROUTER_API_PORT}{path}"
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.get(url, headers=headers, timeout=_TIMEOUT) as response:
                if response.status != 200:
                    raise _NoAnswerError(f"router {pod} answered {response.status}")
                body = await _read_bounded(response)
        except TimeoutError as error:
            raise _NoAnswerError(f"router {pod} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _NoAnswerError(f"router {pod} cannot be reached: {error}") from error
        if body is None:
            raise _NoAnswerError(f"the report of router {pod} exceeds {_MAX_BYTES} bytes")
        return body


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes | None:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _MAX_BYTES:
            return None
    return bytes(body)
