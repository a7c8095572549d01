"""The table of bad metrics, one row each, and what stays true for any samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_planner import PATIENT
from phasesplit.api import metric_names as names
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.planner.metrics_health import counter_rate_per_s, judge_metrics, known_names
from phasesplit.planner.metrics_types import MetricSample, MetricsInput, Permission, Quantity, QueryError

FREE = Permission()
HOLD = Permission(may_grow=False, may_shrink=False)
UP_ONLY = Permission(may_grow=True, may_shrink=False)


def ttft(value: float | None, age_s: float = 5.0, **more: object) -> MetricSample:
    return MetricSample(names.TIME_TO_FIRST_TOKEN_SECONDS, Quantity.SECONDS, value, age_s, **more)


def usage(value: float | None, pool: Pool, age_s: float = 5.0) -> MetricSample:
    return MetricSample(names.KV_CACHE_USAGE_PERC, Quantity.SHARE, value, age_s, pool=pool)


def found(*samples: MetricSample, flowing: bool | None = True, **more: object) -> MetricsInput:
    return MetricsInput(configured=True, samples=samples, router_flowing=flowing, **more)


TABLE = {
    "all well": (found(ttft(0.3), usage(0.5, Pool.DECODE)), "True", Reason.METRICS_OK, FREE, FREE),
    "NaN, requests flow": (found(ttft(math.nan)), "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "nothing, requests flow": (found(ttft(None)), "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "NaN, nobody knows of flow": (
        found(ttft(math.nan), flowing=None),
        "Unknown",
        Reason.METRICS_MISSING,
        HOLD,
        HOLD,
    ),
    "NaN, nothing flows": (found(ttft(math.nan), flowing=False), "True", Reason.METRICS_OK, FREE, FREE),
    "no series at all, requests flow": (found(), "Unknown", Reason.METRICS_MISSING, HOLD, HOLD),
    "no series at all, nothing flows": (found(flowing=False), "True", Reason.METRICS_OK, FREE, FREE),
    "older than three scrapes": (found(ttft(0.3, age_s=46)), "Unknown", Reason.METRICS_STALE, HOLD, HOLD),
    "old but within three scrapes": (found(ttft(0.3, age_s=44)), "True", Reason.METRICS_OK, FREE, FREE),
    "stale while nothing flows": (
        found(ttft(0.3, age_s=46), flowing=False),
        "Unknown",
        Reason.METRICS_STALE,
        HOLD,
        HOLD,
    ),
    "refused": (
        found(error=QueryError.REFUSED, failing_s=30),
        "False",
        Reason.METRICS_OUTAGE,
        HOLD,
        HOLD,
    ),
    "bad token, nothing flows": (
        found(error=QueryError.UNAUTHORIZED, flowing=False),
        "False",
        Reason.METRICS_OUTAGE,
        HOLD,
        HOLD,
    ),
    "refused for eleven minutes": (
        found(error=QueryError.REFUSED, failing_s=660),
        "False",
        Reason.METRICS_OUTAGE,
        UP_ONLY,
        UP_ONLY,
    ),
    "one pool missing": (
        found(ttft(0.3), usage(None, Pool.DECODE), usage(0.4, Pool.PREFILL)),
        "Unknown",
        Reason.METRICS_MISSING,
        UP_ONLY,
        HOLD,
    ),
    "negative latency": (found(ttft(-1.0)), "Unknown", Reason.METRICS_GARBAGE, HOLD, HOLD),
    "share above one": (
        found(usage(40.0, Pool.DECODE)),
        "Unknown",
        Reason.METRICS_GARBAGE,
        UP_ONLY,
        HOLD,
    ),
    "infinite latency": (found(ttft(math.inf)), "Unknown", Reason.METRICS_GARBAGE, HOLD, HOLD),
    "a class to which nothing arrives": (
        found(
            MetricSample("rate", Quantity.RATE_PER_S, 0.0, 5.0, class_name="background"),
            ttft(math.nan, class_name="background"),
            ttft(0.2, class_name="default"),
        ),
        "True",
        Reason.METRICS_OK,
        FREE,
        FREE,
    ),
    "no Prometheus": (MetricsInput(configured=False), "False", Reason.NOT_CONFIGURED, FREE, FREE),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_metrics_table(name: str) -> None:
    given_input, status, reason, prefill, decode = TABLE[name]
    verdict = judge_metrics(given_input)
    assert (verdict.status, verdict.reason) == (status, reason), verdict.message
    assert verdict.permission(Pool.PREFILL) == prefill
    assert verdict.permission(Pool.DECODE) == decode
    assert verdict.message


def test_garbage_value_stands_in_the_message() -> None:
    assert "-3.5" in judge_metrics(found(ttft(-3.5))).message


def test_outage_names_its_cause_and_later_turns_to_the_routers() -> None:
    early = judge_metrics(found(error=QueryError.TLS, error_detail="unknown authority", failing_s=10))
    late = judge_metrics(found(error=QueryError.TLS, failing_s=601))
    assert "TLS verification failed (unknown authority)" in early.message
    assert not early.use_router_reports
    assert late.use_router_reports


def test_alias_is_accepted_and_named() -> None:
    old = MetricSample("vllm:gpu_cache_usage_perc", Quantity.SHARE, 0.4, 1.0, pool=Pool.DECODE)
    missing = usage(None, Pool.DECODE)
    verdict = judge_metrics(found(missing, old))
    assert verdict.status == "True"
    assert verdict.value(names.KV_CACHE_USAGE_PERC, pool=Pool.DECODE) == 0.4
    assert "vllm:gpu_cache_usage_perc" in verdict.message
    assert "vllm:gpu_cache_usage_perc" in known_names(names.KV_CACHE_USAGE_PERC)


def test_own_name_wins_over_an_alias() -> None:
    old = MetricSample("vllm:kv_cache_usage_perc", Quantity.SHARE, 0.4, 1.0, pool=Pool.DECODE)
    verdict = judge_metrics(found(old, usage(0.6, Pool.DECODE)))
    assert verdict.value(names.KV_CACHE_USAGE_PERC, pool=Pool.DECODE) == 0.6


@pytest.mark.parametrize(
    ("value", "previous", "interval_s", "rate"),
    [(150.0, 100.0, 10.0, 5.0), (30.0, 100.0, 10.0, 3.0), (100.0, None, 10.0, None), (0.0, 100.0, 10.0, 0.0)],
)
def test_counter_reset_is_never_negative(
    value: float, previous: float | None, interval_s: float, rate: float | None
) -> None:
    assert counter_rate_per_s(value, previous, interval_s) == rate


samples = st.builds(
    MetricSample,
    name=st.sampled_from(["a", "vllm:num_requests_waiting", names.NUM_REQUESTS_WAITING]),
    quantity=st.sampled_from(Quantity),
    value=st.none() | st.floats(),
    age_s=st.none() | st.floats(0, 1000),
    class_name=st.sampled_from([None, "default"]),
    pool=st.sampled_from([None, *Pool]),
    previous=st.none() | st.floats(0, 1e9),
    interval_s=st.none() | st.floats(0.1, 100),
)
inputs = st.builds(
    MetricsInput,
    configured=st.booleans(),
    samples=st.lists(samples, max_size=6).map(tuple),
    error=st.none() | st.sampled_from(QueryError),
    failing_s=st.floats(0, 2000),
    router_flowing=st.sampled_from([None, True, False]),
)


@PATIENT
@given(inputs)
def test_what_is_usable_is_sensible_and_doubt_never_shrinks(metrics: MetricsInput) -> None:
    verdict = judge_metrics(metrics)
    assert all(math.isfinite(item.value) and item.value >= 0 for item in verdict.usable)
    if verdict.status != "True" and verdict.reason is not Reason.NOT_CONFIGURED:
        assert not any(verdict.permission(pool).may_shrink for pool in Pool)
    if verdict.idle:
        assert metrics.router_flowing is False


@PATIENT
@given(inputs)
def test_order_of_samples_changes_nothing(metrics: MetricsInput) -> None:
    reverse = MetricsInput(
        configured=metrics.configured,
        samples=tuple(reversed(metrics.samples)),
        error=metrics.error,
        failing_s=metrics.failing_s,
        router_flowing=metrics.router_flowing,
    )
    one, other = judge_metrics(metrics), judge_metrics(reverse)
    assert (one.status, one.reason, one.permissions) == (other.status, other.reason, other.permissions)
