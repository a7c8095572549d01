"""The table of bad metrics, row by row, with a real Prometheus between what is said and what is decided."""

import asyncio
import http.server
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_ports import free_port
from helpers_prometheus import NAMESPACE, SCRAPE_INTERVAL_S, Exporter, RealPrometheus, Said, real_prometheus
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass
from phasesplit.cluster.prometheus import Answer, Endpoint, PrometheusReader
from phasesplit.operator.metrics import ARRIVALS, TTFT_P95, build_queries, to_samples
from phasesplit.planner.metrics_health import OUTAGE_GRACE_S, judge_metrics
from phasesplit.planner.metrics_types import MetricsInput, MetricsVerdict, Permission, QueryError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

FREE = Permission()
HOLD = Permission(may_grow=False, may_shrink=False)
UP_ONLY = Permission(may_grow=True, may_shrink=False)
CLASSES = [LatencyClass(name="default", ttft_s=1.0, tpot_s=0.1)]
IDLE = Said(rate=0.0, answered_rate=0.0, running={"prefill": 0.0, "decode": 0.0})

# What is said, whether the router says that requests flow; status, reason, what prefill and decode may do.
ROWS: dict[str, tuple[Said, bool, str, Reason, Permission, Permission]] = {
    "healthy": (Said(), True, "True", Reason.METRICS_OK, FREE, FREE),
    "quantile-nan": (Said(answered_rate=0.0), True, "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "gauge-nan": (Said(usage=math.nan), True, "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "series-gone": (Said(answered_rate=None), True, "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "idle": (IDLE, False, "True", Reason.METRICS_OK, FREE, FREE),
    "stale": (Said(late_s=20.0), True, "Unknown", Reason.METRICS_STALE, HOLD, HOLD),
    "renamed": (Said(prefix="vllm:"), True, "True", Reason.METRICS_OK, FREE, FREE),
    "one-pool": (Said(running={"prefill": 1.0}), True, "Unknown", Reason.METRICS_MISSING, UP_ONLY, HOLD),
    "restarts": (Said(restart_every_s=7.0), True, "True", Reason.METRICS_OK, FREE, FREE),
    "garbage-large": (Said(usage=1e9), True, "Unknown", Reason.METRICS_GARBAGE, HOLD, HOLD),
    "garbage-negative": (Said(usage=-3.0), True, "Unknown", Reason.METRICS_GARBAGE, HOLD, HOLD),
    "garbage-infinite": (Said(usage=math.inf), True, "Unknown", Reason.METRICS_GARBAGE, HOLD, HOLD),
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPrometheus]:
    exporter = Exporter({name: row[0] for name, row in ROWS.items()})
    try:
        with real_prometheus(tmp_path_factory.mktemp("prometheus"), exporter.port) as found:
            yield found
    finally:
        exporter.close()


async def read(endpoint: Endpoint, timeout_s: float = 5.0) -> Answer:
    reader = PrometheusReader(endpoint, timeout_s, time.monotonic)
    try:
        return await reader.read(build_queries(SCRAPE_INTERVAL_S))
    finally:
        reader.close()


def judge(answer: Answer, name: str, *, flowing: bool, failing_s: float = 0.0) -> MetricsVerdict:
    """As the operator's pass does it."""
    values = answer.values.get((NAMESPACE, name), [])
    return judge_metrics(
        MetricsInput(
            configured=True,
            samples=to_samples(values, CLASSES, set(Pool)),
            error=answer.error,
            error_detail=answer.error_detail,
            failing_s=failing_s,
            scrape_interval_s=answer.scrape_interval_s,
            router_flowing=flowing,
        )
    )


@pytest.fixture(scope="module")
def answer(prometheus: RealPrometheus) -> Answer:
    """Read once rates are known, which takes two scrapes, and one restart has passed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(10)
        found = asyncio.run(read(Endpoint(prometheus.address)))
        if judge(found, "healthy", flowing=True).value(TTFT_P95, "default") is not None:
            return found
    raise AssertionError(f"nothing was scraped: {found}")


@pytest.mark.parametrize("name", ROWS)
def test_what_arrives_decides_what_scaling_may_do(answer: Answer, name: str) -> None:
    _, flowing, status, reason, prefill, decode = ROWS[name]
    assert answer.error is None
    assert answer.scrape_interval_s == SCRAPE_INTERVAL_S
    verdict = judge(answer, name, flowing=flowing)
    assert (verdict.status, verdict.reason) == (status, reason), verdict.message
    assert (verdict.permission(Pool.PREFILL), verdict.permission(Pool.DECODE)) == (prefill, decode)
    assert verdict.message


def test_an_alias_is_accepted_and_named(answer: Answer) -> None:
    verdict = judge(answer, "renamed", flowing=True)
    assert "vllm:num_requests_running" in verdict.message


def test_a_counter_that_begins_again_is_no_negative_rate(answer: Answer) -> None:
    rate = judge(answer, "restarts", flowing=True).value(ARRIVALS, "default")
    assert rate is not None
    assert 0 < rate < 10


def test_a_value_out_of_range_is_named_with_its_value(answer: Answer) -> None:
    assert "1e+09" in judge(answer, "garbage-large", flowing=True).message


def test_an_object_that_is_not_scraped_holds_while_requests_flow(answer: Answer) -> None:
    assert judge(answer, "unknown", flowing=True).permission(Pool.DECODE) == HOLD
    assert judge(answer, "unknown", flowing=False).reason is Reason.METRICS_OK


def held(answer: Answer, error: QueryError) -> None:
    """Every outage holds at once, names its cause, and never lets a pool shrink."""
    assert answer.error is error, answer.error_detail
    now = judge(answer, "healthy", flowing=True)
    assert (now.status, now.reason, now.permission(Pool.PREFILL)) == ("False", Reason.METRICS_OUTAGE, HOLD)
    assert error.value in now.message
    later = judge(answer, "healthy", flowing=True, failing_s=OUTAGE_GRACE_S)
    assert later.use_router_reports
    assert later.permission(Pool.DECODE) == UP_ONLY


async def test_refused() -> None:
    held(await read(Endpoint(f"http://127.0.0.1:{free_port()}")), QueryError.REFUSED)


async def test_a_server_that_hangs_and_comes_back(prometheus: RealPrometheus) -> None:
    with prometheus.frozen():
        started_s = time.monotonic()
        held(await read(Endpoint(prometheus.address), timeout_s=1.0), QueryError.TIMEOUT)
        assert time.monotonic() - started_s < 20
    assert (await read(Endpoint(prometheus.address))).error is None


async def test_bad_tls_and_good(tmp_path: Path) -> None:
    with real_prometheus(tmp_path, None, tls=True) as server:
        held(await read(Endpoint(server.address)), QueryError.TLS)
        assert (await read(Endpoint(server.address, ca_pem=server.ca_pem))).error is None


async def test_a_token_that_is_refused(tmp_path: Path) -> None:
    with real_prometheus(tmp_path, None, users=True) as server:
        held(await read(Endpoint(server.address, bearer_token="wrong")), QueryError.UNAUTHORIZED)


async def test_a_proxy_that_answers_503_for_it() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503, "no upstream")

        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        held(await read(Endpoint(f"http://127.0.0.1:{server.server_address[1]}")), QueryError.SERVER_ERROR)
    finally:
        server.shutdown()
        server.server_close()


async def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with real_prometheus(tmp_path, None) as server:
        assert (await read(Endpoint(server.address))).error is None
        server.kill()
        held(await read(Endpoint(server.address)), QueryError.REFUSED)
