"""Routers' own reports: `GET /v1/phasesplit/status`, with the object's admin token. Reads only."""

import asyncio
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from phasesplit.api import names
from phasesplit.api.reports import RouterReport

_TIMEOUT = aiohttp.ClientTimeout(total=3.0, connect=1.5)
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class RouterAnswer:
    """One router's report, or why there is none."""

    pod: str
    report: RouterReport | None = None
    error: str = ""


class RouterClient:
    """Asks router pods for their status."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def read_all(self, addresses: dict[str, str], token: str) -> list[RouterAnswer]:
        """Reports of all routers of one object, by pod name and IP, at the same time."""
        return list(await asyncio.gather(*(self._read(pod, ip, token) for pod, ip in addresses.items())))

    async def _read(self, pod: str, ip: str, token: str) -> RouterAnswer:
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{names.ROUTER_API_PORT}{names.PATH_ROUTER_STATUS}"
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with self._session.get(url, headers=headers, timeout=_TIMEOUT) as response:
                if response.status != 200:
                    return RouterAnswer(pod, error=f"router {pod} answered {response.status}")
                body = await _read_bounded(response)
                if body is None:
                    return RouterAnswer(pod, error=f"the report of router {pod} exceeds {_MAX_BYTES} bytes")
                return RouterAnswer(pod, RouterReport.model_validate_json(body))
        except TimeoutError:
            return RouterAnswer(pod, error=f"router {pod} did not answer in time")
        except (aiohttp.ClientError, OSError) as error:
            return RouterAnswer(pod, error=f"router {pod} cannot be reached: {error}")
        except ValidationError as error:
            count = error.error_count()
            return RouterAnswer(pod, error=f"router {pod} sent a report with {count} fields not understood")


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes | None:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _MAX_BYTES:
            return None
    return bytes(body)
