"""Prometheus' answers as the planner's samples, and loads from both sources."""

import math

from phasesplit.api import metric_names as m
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.reports import ClassReport, RouterReport
from phasesplit.api.routing import LatencyClass
from phasesplit.cluster.prometheus import Value
from phasesplit.operator.metrics import (
    AGE_ROUTER,
    AGE_WORKER,
    ARRIVALS,
    ATTAINED,
    TTFT_P95,
    WORKER_GAUGES,
    build_queries,
    loads_of_reports,
    to_loads,
    to_samples,
    window_s,
)
from phasesplit.planner.metrics_health import judge_metrics
from phasesplit.planner.metrics_types import MetricsInput, MetricsVerdict, Quantity, UsableMetric

CLASSES = (LatencyClass(name="fast", ttft_s=0.5, tpot_s=0.1),)
SLO = {m.LABEL_SLO: "fast"}


def gauge(pool: Pool, value: float = 1, name: str = m.NUM_REQUESTS_RUNNING) -> Value:
    return Value(WORKER_GAUGES, value, {m.LABEL_POOL: str(pool), "__name__": name})


COMPLETE = [
    Value(ARRIVALS, 2.0, SLO),
    Value(ATTAINED, 1.5, SLO),
    Value(TTFT_P95, 0.4, SLO),
    gauge(Pool.PREFILL),
    gauge(Pool.DECODE),
    Value(AGE_ROUTER, 4.0),
    Value(AGE_WORKER, 5.0, {m.LABEL_POOL: "prefill"}),
    Value(AGE_WORKER, 500.0, {m.LABEL_POOL: "decode"}),
]


def verdict_of(values: list[Value], pools: list[Pool]) -> MetricsVerdict:
    samples = to_samples(values, CLASSES, pools)
    return judge_metrics(MetricsInput(configured=True, samples=samples, router_flowing=True))


def test_one_query_per_metric_for_all_objects() -> None:
    queries = build_queries(15)
    assert len({query.id for query in queries}) == len(queries)
    assert all(m.LABEL_MODEL in query.expression for query in queries)
    assert all("[60s]" in query.expression for query in queries if "rate(" in query.expression)
    assert window_s(60) == 240


def test_samples_carry_class_pool_and_age() -> None:
    samples = {(s.name, s.class_name, s.pool): s for s in to_samples(COMPLETE, CLASSES, list(Pool))}
    arrivals = samples[ARRIVALS, "fast", None]
    assert (arrivals.value, arrivals.quantity, arrivals.age_s) == (2.0, Quantity.RATE_PER_S, 4.0)
    assert samples[m.NUM_REQUESTS_RUNNING, None, Pool.DECODE].age_s == 500.0


def test_what_is_expected_and_absent_is_a_sample_without_a_value() -> None:
    samples = to_samples([gauge(Pool.PREFILL)], CLASSES, list(Pool))
    missing = {(s.name, s.class_name, s.pool) for s in samples if s.value is None}
    assert missing == {
        (ARRIVALS, "fast", None),
        (TTFT_P95, "fast", None),
        (m.NUM_REQUESTS_RUNNING, None, Pool.DECODE),
    }


def test_an_object_that_is_not_scraped_has_no_samples() -> None:
    assert to_samples([], CLASSES, list(Pool)) == ()


def test_a_stale_pool_holds_and_the_other_may_grow() -> None:
    verdict = verdict_of(COMPLETE, list(Pool))
    assert verdict.reason is Reason.METRICS_STALE
    assert verdict.permission(Pool.DECODE).holds
    assert verdict.permission(Pool.PREFILL).may_grow


def test_nan_of_one_class_is_missing_while_requests_flow() -> None:
    values = [v for v in COMPLETE if v.query not in (TTFT_P95, AGE_WORKER)] + [Value(TTFT_P95, math.nan, SLO)]
    assert verdict_of(values, list(Pool)).reason is Reason.METRICS_MISSING


def test_a_renamed_gauge_is_accepted_and_named() -> None:
    values = [v for v in COMPLETE if v.query != AGE_WORKER]
    values.append(gauge(Pool.DECODE, 0.5, "vllm:gpu_cache_usage_perc"))
    verdict = verdict_of(values, list(Pool))
    assert verdict.value(m.KV_CACHE_USAGE_PERC, pool=Pool.DECODE) == 0.5
    assert "vllm:gpu_cache_usage_perc" in verdict.message


def report(arrival: float, finished: int, attained: int, rejected: int = 0) -> RouterReport:
    item = ClassReport(
        name="fast",
        arrival_rate_per_s=arrival,
        finished=finished,
        attained=attained,
        rejected=rejected,
        ttft_p95_s=0.3,
        mean_prompt_tokens=100,
        queue_s=0.1,
    )
    return RouterReport(classes=[item])


def test_routers_are_summed_and_rejections_are_misses() -> None:
    (load,) = loads_of_reports([report(1, 8, 8, rejected=2), report(2, 10, 5)])
    assert load.arrival_rate_per_s == 3
    assert load.finished == 20
    assert load.attainment == 13 / 20


def test_prometheus_goes_over_the_routers_own_report_where_it_may_be_believed() -> None:
    usable = (
        UsableMetric(ARRIVALS, 2.0, "fast"),
        UsableMetric(ATTAINED, 1.0, "fast"),
        UsableMetric(TTFT_P95, 0.9, "fast"),
    )
    verdict = MetricsVerdict("True", Reason.METRICS_OK, "", usable)
    (load,) = to_loads([report(1, 10, 10)], verdict, 60)
    assert (load.arrival_rate_per_s, load.ttft_p95_s, load.attainment, load.finished) == (2.0, 0.9, 0.5, 120)
    assert load.queue_s == 0.1, "only the router knows the wait of a request that arrives now"


def test_in_an_outage_the_routers_reports_stand_alone() -> None:
    verdict = MetricsVerdict("False", Reason.METRICS_OUTAGE, "", use_router_reports=True)
    (load,) = to_loads([report(1, 10, 9)], verdict, 60)
    assert (load.arrival_rate_per_s, load.attainment) == (1, 0.9)
