"""The questions to Prometheus, and its answers as the planner's samples and loads. Pure.

Windows are long enough for four scrapes. A value that should be there and is not becomes a sample
without a value, so that the planner sees it missing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace

from phasesplit.api import metric_names as m
from phasesplit.api.names import Pool
from phasesplit.api.reports import RouterReport
from phasesplit.api.routing import LatencyClass
from phasesplit.cluster.prometheus import Query, Value
from phasesplit.planner.facts import LoadFacts
from phasesplit.planner.metrics_health import known_names
from phasesplit.planner.metrics_types import MetricSample, MetricsVerdict, Quantity

_BY_CLASS = f"{m.LABEL_NAMESPACE}, {m.LABEL_MODEL}, {m.LABEL_SLO}"
_BY_POOL = f"{m.LABEL_NAMESPACE}, {m.LABEL_MODEL}, {m.LABEL_POOL}"
_MIN_WINDOW_S = 60.0
_SCRAPES_PER_WINDOW = 4

AGE_ROUTER = "age:router"
AGE_WORKER = "age:worker"
WORKER_GAUGES = "worker gauges"

# Sample names of the planner: a series' name, with the statistic where there are several of one series.
ARRIVALS = m.SLO_REQUESTS_TOTAL
ATTAINED = m.SLO_ATTAINED_REQUESTS_TOTAL
TTFT_P50, TTFT_P95 = f"{m.TIME_TO_FIRST_TOKEN_SECONDS}:p50", f"{m.TIME_TO_FIRST_TOKEN_SECONDS}:p95"
TPOT_P50 = f"{m.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS}:p50"
TPOT_P95 = f"{m.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS}:p95"
GAP_P99 = f"{m.SECOND_TOKEN_GAP_SECONDS}:p99"
PROMPT_TOKENS, OUTPUT_TOKENS = m.PROMPT_TOKENS, m.OUTPUT_TOKENS

_QUANTITIES: Mapping[str, Quantity] = {
    ARRIVALS: Quantity.RATE_PER_S,
    ATTAINED: Quantity.RATE_PER_S,
    TTFT_P50: Quantity.SECONDS,
    TTFT_P95: Quantity.SECONDS,
    TPOT_P50: Quantity.SECONDS,
    TPOT_P95: Quantity.SECONDS,
    GAP_P99: Quantity.SECONDS,
    PROMPT_TOKENS: Quantity.TOKENS,
    OUTPUT_TOKENS: Quantity.TOKENS,
    m.NUM_REQUESTS_RUNNING: Quantity.COUNT,
    m.NUM_REQUESTS_WAITING: Quantity.COUNT,
    m.KV_CACHE_USAGE_PERC: Quantity.SHARE,
}
# Without these nothing can be said about a class that has requests.
_EXPECTED_OF_CLASS = (ARRIVALS, TTFT_P95)


def window_s(scrape_interval_s: float) -> float:
    """Window of rates."""
    return max(_MIN_WINDOW_S, _SCRAPES_PER_WINDOW * scrape_interval_s)


def build_queries(scrape_interval_s: float) -> tuple[Query, ...]:
    """One query per metric, for all objects."""
    window = f"[{round(window_s(scrape_interval_s))}s]"
    gauges = "|".join(
        name
        for gauge in (m.NUM_REQUESTS_RUNNING, m.NUM_REQUESTS_WAITING, m.KV_CACHE_USAGE_PERC)
        for name in known_names(gauge)
    )
    tpot = m.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS
    return (
        Query(ARRIVALS, _rate(m.SLO_REQUESTS_TOTAL, window)),
        Query(ATTAINED, _rate(m.SLO_ATTAINED_REQUESTS_TOTAL, window)),
        Query(TTFT_P50, _quantile(0.5, m.TIME_TO_FIRST_TOKEN_SECONDS, window)),
        Query(TTFT_P95, _quantile(0.95, m.TIME_TO_FIRST_TOKEN_SECONDS, window)),
        Query(TPOT_P50, _quantile(0.5, tpot, window)),
        Query(TPOT_P95, _quantile(0.95, tpot, window)),
        Query(GAP_P99, _quantile(0.99, m.SECOND_TOKEN_GAP_SECONDS, window)),
        Query(PROMPT_TOKENS, _mean(m.PROMPT_TOKENS, window)),
        Query(OUTPUT_TOKENS, _mean(m.OUTPUT_TOKENS, window)),
        Query(WORKER_GAUGES, f'avg by ({_BY_POOL}, __name__) ({{__name__=~"{gauges}"}})'),
        Query(AGE_ROUTER, _age(f"{m.LABEL_NAMESPACE}, {m.LABEL_MODEL}", m.REQUESTS_IN_FLIGHT)),
        Query(AGE_WORKER, _age(_BY_POOL, m.NUM_REQUESTS_RUNNING)),
    )


def to_samples(
    values: Sequence[Value], classes: Sequence[LatencyClass], pools: Collection[Pool]
) -> tuple[MetricSample, ...]:
    """Values of one object as samples, and samples without a value for what is expected and absent.

    `pools` are those with ready workers. Nothing at all gives no samples: the object is not scraped.
    """
    if not values:
        return ()
    ages = _ages(values)
    samples = [sample for value in values if (sample := _to_sample(value, ages)) is not None]
    present = {(sample.name, sample.class_name) for sample in samples}
    gauged = {sample.pool for sample in samples if sample.pool is not None}
    samples += [
        MetricSample(name, _QUANTITIES[name], None, class_name=item.name)
        for item in classes
        for name in _EXPECTED_OF_CLASS
        if (name, item.name) not in present
    ]
    samples += [
        MetricSample(m.NUM_REQUESTS_RUNNING, Quantity.COUNT, None, pool=pool)
        for pool in sorted(pools)
        if pool not in gauged
    ]
    return tuple(samples)


def to_loads(
    reports: Iterable[RouterReport], verdict: MetricsVerdict, window: float
) -> tuple[LoadFacts, ...]:
    """Load per class: the routers' own reports, with what Prometheus knows better put over them."""
    loads = {load.class_name: load for load in loads_of_reports(reports)}
    if verdict.use_router_reports:
        return tuple(loads.values())
    seen = {metric.class_name for metric in verdict.usable if metric.class_name is not None}
    for name in sorted(seen | loads.keys()):
        loads[name] = _overlay(loads.get(name, LoadFacts(class_name=name)), verdict, window)
    return tuple(loads.values())


def loads_of_reports(reports: Iterable[RouterReport]) -> list[LoadFacts]:
    """Load per class, summed over routers; latencies are those of the router with most requests."""
    found: dict[str, LoadFacts] = {}
    for report in reports:
        for item in report.classes:
            counted = item.finished + item.rejected
            load = LoadFacts(
                class_name=item.name,
                arrival_rate_per_s=item.arrival_rate_per_s,
                mean_prompt_tokens=item.mean_prompt_tokens or 0.0,
                mean_output_tokens=item.mean_output_tokens or 0.0,
                ttft_p50_s=item.ttft_p50_s,
                ttft_p95_s=item.ttft_p95_s,
                tpot_p50_s=item.tpot_p50_s,
                tpot_p95_s=item.tpot_p95_s,
                second_token_gap_p99_s=item.second_token_gap_p99_s,
                queue_s=item.queue_s,
                attainment=item.attained / counted if counted else None,
                finished=counted,
            )
            known = found.get(item.name)
            found[item.name] = load if known is None else _sum(known, load)
    return list(found.values())


def _sum(one: LoadFacts, other: LoadFacts) -> LoadFacts:
    busier = one if one.finished >= other.finished else other
    finished = one.finished + other.finished
    attained = sum((item.attainment or 0.0) * item.finished for item in (one, other))
    return replace(
        busier,
        arrival_rate_per_s=one.arrival_rate_per_s + other.arrival_rate_per_s,
        queue_s=max(one.queue_s or 0.0, other.queue_s or 0.0),
        attainment=attained / finished if finished else None,
        finished=finished,
    )


def _overlay(load: LoadFacts, verdict: MetricsVerdict, window: float) -> LoadFacts:
    def value(name: str) -> float | None:
        return verdict.value(name, load.class_name)

    arrivals, attained = value(ARRIVALS), value(ATTAINED)
    changes: dict[str, float | int | None] = {
        "arrival_rate_per_s": arrivals,
        "ttft_p50_s": value(TTFT_P50),
        "ttft_p95_s": value(TTFT_P95),
        "tpot_p50_s": value(TPOT_P50),
        "tpot_p95_s": value(TPOT_P95),
        "second_token_gap_p99_s": value(GAP_P99),
        "mean_prompt_tokens": value(PROMPT_TOKENS),
        "mean_output_tokens": value(OUTPUT_TOKENS),
    }
    if arrivals and attained is not None:
        changes["attainment"] = min(1.0, attained / arrivals)
        changes["finished"] = round(arrivals * window)
    known = {name: number for name, number in changes.items() if number is not None}
    fields = {field.name: getattr(load, field.name) for field in dataclass_fields(load)}
    return LoadFacts(**{**fields, **known})


def _to_sample(value: Value, ages: Mapping[Pool | None, float]) -> MetricSample | None:
    name = value.labels.get("__name__", value.query)
    pool = _pool(value.labels.get(m.LABEL_POOL))
    if value.query == WORKER_GAUGES:
        quantity = Quantity.SHARE if "usage" in name else Quantity.COUNT
        return MetricSample(name, quantity, value.value, ages.get(pool), pool=pool)
    if value.query not in _QUANTITIES:
        return None
    class_name = value.labels.get(m.LABEL_SLO)
    return MetricSample(value.query, _QUANTITIES[value.query], value.value, ages.get(None), class_name)


def _ages(values: Iterable[Value]) -> dict[Pool | None, float]:
    """Age of the newest sample of the routers (None) and of each pool."""
    ages: dict[Pool | None, float] = {}
    for value in values:
        if value.query == AGE_ROUTER:
            ages[None] = value.value
        elif value.query == AGE_WORKER:
            ages[_pool(value.labels.get(m.LABEL_POOL))] = value.value
    return ages


def _pool(label: str | None) -> Pool | None:
    return Pool(label) if label in set(Pool) else None


def _rate(counter: str, window: str) -> str:
    return f"sum by ({_BY_CLASS}) (rate({counter}{window}))"


def _quantile(share: float, histogram: str, window: str) -> str:
    return f"histogram_quantile({share}, sum by ({_BY_CLASS}, le) (rate({histogram}_bucket{window})))"


def _mean(histogram: str, window: str) -> str:
    return f"{_rate(f'{histogram}_sum', window)} / {_rate(f'{histogram}_count', window)}"


def _age(by: str, series: str) -> str:
    return f"min by ({by}) (time() - timestamp({series}))"
