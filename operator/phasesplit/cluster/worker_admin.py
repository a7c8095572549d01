"""The workers' admin API, used for link probes only: routers aggregate everything else."""

import aiohttp
from pydantic import ValidationError

from phasesplit.api import names
from phasesplit.api.reports import ProbeRequest, ProbeResult

_SLACK_S = 2.0


class WorkerAdmin:
    """Calls the admin API of worker pods."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def probe(self, ip: str, token: str, request: ProbeRequest) -> ProbeResult:
        """Let the worker at `ip` pull from the peer named in the request. Errors come back as text."""
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{names.WORKER_API_PORT}{names.PATH_ADMIN_PROBE}"
        timeout = aiohttp.ClientTimeout(total=request.deadline_s + _SLACK_S)
        headers = {"Authorization": f"Bearer {token}"}
        try:
            body = request.model_dump()
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
                if response.status != 200:
                    return ProbeResult(error=f"the worker answered {response.status}")
                return ProbeResult.model_validate_json(await response.read())
        except TimeoutError:
            return ProbeResult(error="the worker did not answer in time")
        except (aiohttp.ClientError, OSError) as error:
            return ProbeResult(error=f"the worker cannot be reached: {error}")
        except ValidationError as error:
            return ProbeResult(error=f"the worker's answer is not understood: {error.error_count()} errors")
