"""One streamed request to an OpenAI endpoint, timed at the client.

TTFT: sent to first token received. TPOT = (E2E - TTFT) / (n - 1). The second-token gap is where an
exposed KV transfer shows. Failures are results too, never exceptions.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from phasesplit.api import names
from phasesplit_bench.arrivals import Arrival

_MAX_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which endpoint, and how it is asked."""

    url: str  # base address, without /v1
    model: str
    slo_class: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True  # answers have the length asked for; not part of OpenAI's API
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        headers = {"Content-Type": "application/json"}
        if self.slo_class:
            headers[names.HEADER_SLO_CLASS] = self.slo_class
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


@dataclass(slots=True, kw_only=True)
class Result:
    """One request as the client saw it; one line of the JSON lines file."""

    index: int
    slo_class: str
    start_s: float  # since the start of the run
    late_s: float = 0.0  # behind its planned start: the client itself was too slow
    status: int = 0  # 0: no answer
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    second_token_gap_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    mode: str = ""
    pair: str = ""
    request_id: str = ""

    @property
    def is_finished(self) -> bool:
        """Answered to its end."""
        return self.status == 200 and not self.error

    @property
    def is_rejected(self) -> bool:
        """Refused for load."""
        return self.status == 429

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))


async def send(
    session: aiohttp.ClientSession, target: Target, arrival: Arrival, *, start_s: float, late_s: float
) -> Result:
    """Send one request and read its stream to the end."""
    result = Result(
        index=arrival.index,
        slo_class=target.slo_class or "",
        start_s=round(start_s, 6),
        late_s=round(late_s, 6),
    )
    body: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": arrival.prompt}],
        "max_tokens": arrival.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=10)
    sent_s = time.monotonic()
    try:
        async with session.post(
            target.url + "/v1/chat/completions",
            data=json.dumps(body),
            headers=target.headers,
            timeout=timeout,
        ) as response:
            result.status = response.status
            result.mode = response.headers.get(names.HEADER_MODE, "")
            result.pair = response.headers.get(names.HEADER_PAIR, "")
            result.request_id = response.headers.get(names.HEADER_REQUEST_ID, "")
            if response.status != 200:
                result.error = _error_of(await response.read())
            else:
                await _read_stream(response, result, sent_s)
    except TimeoutError:
        result.error = f"no answer within {target.timeout_s:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        result.error = str(error) or type(error).__name__
    return result


async def _read_stream(response: aiohttp.ClientResponse, result: Result, sent_s: float) -> None:
    times_s: list[float] = []
    is_done = False
    async for line in response.content:
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            is_done = True
            break
        if data and _take_event(json.loads(data), result):
            times_s.append(time.monotonic())
        if result.error:
            return
    if not is_done:
        result.error = "the stream ended without [DONE]"
    result.output_tokens = result.output_tokens or len(times_s)
    if not times_s:
        return
    result.ttft_s = times_s[0] - sent_s
    result.e2e_s = times_s[-1] - sent_s
    if len(times_s) > 1:
        result.second_token_gap_s = times_s[1] - times_s[0]
    if result.output_tokens > 1:
        result.tpot_s = (times_s[-1] - times_s[0]) / (result.output_tokens - 1)


def _take_event(event: dict[str, Any], result: Result) -> bool:
    """Take usage and errors; whether the event carries text."""
    if "error" in event:
        result.error = str(event["error"].get("message", ""))[:_MAX_ERROR] or "an error event"
    if usage := event.get("usage"):
        result.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        result.output_tokens = int(usage.get("completion_tokens") or 0)
    return any(_has_token(choice) for choice in event.get("choices") or ())


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice carries text."""
    delta = choice.get("delta") or {}
    return bool(delta.get("content")) or bool(choice.get("text"))


def _error_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:_MAX_ERROR]
    except (ValueError, KeyError, TypeError):
        return body[:_MAX_ERROR].decode("utf-8", "replace")
