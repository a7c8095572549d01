"""What is made of Prometheus' errors, durations and targets."""

import pytest
import requests
from prometheus_api_client import PrometheusApiClientException

from phasesplit.cluster.prometheus import classify, parse_duration_s, slowest_interval_s
from phasesplit.planner.metrics_types import QueryError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (requests.exceptions.SSLError("certificate verify failed"), QueryError.TLS),
        (requests.exceptions.ReadTimeout("slow"), QueryError.TIMEOUT),
        (requests.exceptions.ConnectTimeout("slow"), QueryError.TIMEOUT),
        (requests.exceptions.ConnectionError("[Errno 111] Connection refused"), QueryError.REFUSED),
        (requests.exceptions.ConnectionError("No route to host"), QueryError.UNREACHABLE),
        (PrometheusApiClientException("HTTP Status Code 401 (b'')"), QueryError.UNAUTHORIZED),
        (PrometheusApiClientException("HTTP Status Code 403 (b'')"), QueryError.UNAUTHORIZED),
        (PrometheusApiClientException("HTTP Status Code 503 (b'')"), QueryError.SERVER_ERROR),
        (PrometheusApiClientException("HTTP Status Code 400 (b'bad')"), QueryError.BAD_ANSWER),
        (requests.exceptions.JSONDecodeError("no", "", 0), QueryError.BAD_ANSWER),
        (OSError("no such file"), QueryError.UNREACHABLE),
    ],
)
def test_each_outage_has_its_name(error: Exception, expected: QueryError) -> None:
    assert classify(error) is expected


DURATIONS = [("15s", 15), ("1m", 60), ("1m30s", 90), ("500ms", 0.5), ("1h", 3600)]


@pytest.mark.parametrize(("text", "expected"), [*DURATIONS, ("", None), ("fast", None), ("5", None)])
def test_durations(text: str, expected: float | None) -> None:
    assert parse_duration_s(text) == expected


def test_the_interval_is_that_of_our_targets_the_slowest_one() -> None:
    targets = [
        {"scrapeInterval": "5m", "labels": {"job": "node"}},
        {"scrapeInterval": "10s", "labels": {"job": "phasesplit"}},
        {"scrapeInterval": "30s", "labels": {"job": "phasesplit"}},
    ]
    assert slowest_interval_s(targets) == 30
    assert slowest_interval_s(targets[:1]) == 300
    assert slowest_interval_s([]) == 15
