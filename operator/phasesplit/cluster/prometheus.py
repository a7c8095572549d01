"""Prometheus, read for all objects at once: one query per metric, grouped by namespace and object.

Returns raw facts: values, or why there are none. Judging them is
the planner's part. prometheus-api-client is synchronous, so it runs in a thread with a timeout.
"""

import asyncio
import ssl
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests
import urllib3.exceptions
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from phasesplit.planner.metrics_types import QueryError

_DEFAULT_SCRAPE_INTERVAL_S = 15.0
_INTERVALS_KEPT_S = 300.0


@dataclass(frozen=True)
class Endpoint:
    """Where a Prometheus is and how to log in."""

    address: str
    bearer_token: str | None = field(default=None, repr=False)
    ca_pem: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Query:
    """One metric for all objects. `expression` groups by `namespace` and `model` at least."""

    id: str
    expression: str


@dataclass(frozen=True)
class Value:
    """One value of one query for one object. `labels` are the grouping labels beyond the object's."""

    query: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One round of queries. `values` by (namespace, object)."""

    values: dict[tuple[str, str], list[Value]] = field(default_factory=dict)
    scrape_interval_s: float = _DEFAULT_SCRAPE_INTERVAL_S
    error: QueryError | None = None
    error_detail: str = ""


class PrometheusReader:
    """Reads one Prometheus. Not for use by two tasks at once."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, monotonic: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prometheus")
        self._client: PrometheusConnect | None = None
        self._interval_s: float | None = None
        self._interval_at_s = 0.0
        self._ca_file: Any = None

    def close(self) -> None:
        """Forget the connection; a query under way ends by its own timeout."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._ca_file is not None:
            self._ca_file.close()

    async def read(self, queries: tuple[Query, ...]) -> Answer:
        """All queries, or the first error: a Prometheus that fails one of them is not to be trusted."""
        loop = asyncio.get_running_loop()
        whole_s = self._timeout_s * 2
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._executor, self._read, queries), whole_s)
        except TimeoutError:
            self._client = None
            detail = f"{self._endpoint.address} did not answer within {whole_s:g} s"
            return Answer(error=QueryError.TIMEOUT, error_detail=detail)

    def _read(self, queries: tuple[Query, ...]) -> Answer:
        try:
            client = self._connection()
            values: dict[tuple[str, str], list[Value]] = {}
            for query in queries:
                for result in client.custom_query(query.expression):
                    labels = dict(result["metric"])
                    owner = (labels.pop("namespace", ""), labels.pop("model", ""))
                    number = float(result["value"][1])
                    values.setdefault(owner, []).append(Value(query.id, number, labels))
            return Answer(values, self._scrape_interval_s(client))
        except (requests.RequestException, PrometheusApiClientException, OSError) as error:
            return Answer(error=classify(error), error_detail=_detail(error, self._endpoint.address))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            detail = f"{self._endpoint.address} sent an answer that is not Prometheus': {error}"
            return Answer(error=QueryError.BAD_ANSWER, error_detail=detail)

    def _scrape_interval_s(self, client: PrometheusConnect) -> float:
        now_s = self._monotonic()
        if self._interval_s is not None and now_s - self._interval_at_s < _INTERVALS_KEPT_S:
            return self._interval_s
        targets = client.get_targets(state="active").get("activeTargets", [])
        self._interval_s = slowest_interval_s(targets)
        self._interval_at_s = now_s
        return self._interval_s

    def _connection(self) -> PrometheusConnect:
        if self._client is None:
            session = requests.Session()
            session.trust_env = False
            if self._endpoint.ca_pem:
                self._ca_file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 - lives as long as we
                self._ca_file.write(self._endpoint.ca_pem)
                self._ca_file.flush()
                session.verify = self._ca_file.name
            token = self._endpoint.bearer_token
            self._client = PrometheusConnect(
                url=self._endpoint.address.rstrip("/"),
                headers={"Authorization": f"Bearer {token}"} if token else None,
                session=session,
                retry=Retry(total=0),
                timeout=self._timeout_s,
            )
        return self._client


def slowest_interval_s(targets: list[dict[str, Any]]) -> float:
    """Scrape interval of our targets, the longest if they differ; of all targets if none is ours."""
    ours = [target for target in targets if "phasesplit" in str(target.get("labels", {}))]
    found = [parse_duration_s(target.get("scrapeInterval", "")) for target in ours or targets]
    known = [interval for interval in found if interval is not None]
    return max(known, default=_DEFAULT_SCRAPE_INTERVAL_S)


def parse_duration_s(text: str) -> float | None:
    """`15s`, `1m30s`, `500ms` as seconds; None for anything else."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    total, number, unit = 0.0, "", ""
    if not text:
        return None
    for char in [*text, ""]:
        if char and (char.isdigit() or char == ".") and not unit:
            number += char
        elif char and char.isalpha():
            unit += char
        else:
            if not number or unit not in units:
                return None
            total += float(number) * units[unit]
            number, unit = char, ""
    return total


def classify(error: Exception) -> QueryError:
    """Which kind of outage an exception of requests or of prometheus-api-client is."""
    text = str(error)
    if "HTTP Status Code" in text:
        return next(
            (kind for code, kind in _BY_STATUS if f"HTTP Status Code {code}" in text), QueryError.BAD_ANSWER
        )
    if isinstance(_reason_given_up(error), urllib3.exceptions.ReadTimeoutError):
        return QueryError.TIMEOUT
    for types, kind in _BY_TYPE:
        if isinstance(error, types):
            refused = kind is QueryError.UNREACHABLE and "refused" in text.lower()
            return QueryError.REFUSED if refused else kind
    return QueryError.UNREACHABLE


def _reason_given_up(error: Exception) -> object:
    """What urllib3 gave up for: requests calls even a read that timed out a failed connection then."""
    first = error.args[0] if error.args else None
    return first.reason if isinstance(first, urllib3.exceptions.MaxRetryError) else None


_BY_STATUS = (
    ("401", QueryError.UNAUTHORIZED),
    ("403", QueryError.UNAUTHORIZED),
    ("5", QueryError.SERVER_ERROR),
)
_BY_TYPE: tuple[tuple[tuple[type[Exception], ...], QueryError], ...] = (
    ((requests.exceptions.SSLError, ssl.SSLError), QueryError.TLS),
    ((requests.exceptions.Timeout,), QueryError.TIMEOUT),
    ((requests.exceptions.InvalidJSONError,), QueryError.BAD_ANSWER),
    ((requests.exceptions.ConnectionError,), QueryError.UNREACHABLE),
)


def _detail(error: Exception, address: str) -> str:
    text = str(error)
    if "HTTP Status Code" in text:
        return f"{address} answered {text[:200]}"
    return f"{address}: {type(error).__name__}"
