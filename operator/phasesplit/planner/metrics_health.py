"""Which metrics may be believed, and what scaling may do while some may not.

One rule for each way in which a Prometheus disappoints. Knows nothing of how it was queried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from phasesplit.api import metric_names
from phasesplit.api.conditions import ConditionStatus, Reason
from phasesplit.api.names import Pool
from phasesplit.planner.metrics_types import (
    MetricSample,
    MetricsInput,
    MetricsVerdict,
    Permission,
    Quantity,
    UsableMetric,
)
from phasesplit.planner.text import count_of, format_seconds

STALE_SCRAPES = 3
OUTAGE_GRACE_S = 600.0

# Names that other engines or versions give the same series.
ALIASES: dict[str, tuple[str, ...]] = {
    metric_names.KV_CACHE_USAGE_PERC: ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    metric_names.NUM_REQUESTS_RUNNING: ("vllm:num_requests_running",),
    metric_names.NUM_REQUESTS_WAITING: ("vllm:num_requests_waiting",),
    metric_names.NUM_PREEMPTIONS_TOTAL: ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    metric_names.TIME_TO_FIRST_TOKEN_SECONDS: ("vllm:time_to_first_token_seconds",),
    metric_names.INTER_TOKEN_LATENCY_SECONDS: ("vllm:inter_token_latency_seconds",),
    metric_names.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS: (
        "vllm:request_time_per_output_token_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    metric_names.E2E_REQUEST_LATENCY_SECONDS: ("vllm:e2e_request_latency_seconds",),
    metric_names.REQUEST_QUEUE_TIME_SECONDS: ("vllm:request_queue_time_seconds",),
}
_CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in aliases}

# Largest sensible value; below zero nothing is.
_LARGEST: dict[Quantity, float] = {
    Quantity.RATE_PER_S: 1e6,
    Quantity.SECONDS: 86_400.0,
    Quantity.TOKENS: 1e8,
    Quantity.SHARE: 1.0 + 1e-6,
    Quantity.COUNT: 1e9,
    Quantity.COUNTER: math.inf,
}


class _Fault(IntEnum):
    """What is wrong with a sample, least telling first."""

    MISSING = 1
    STALE = 2
    GARBAGE = 3


_REASONS = {
    _Fault.MISSING: Reason.METRICS_MISSING,
    _Fault.STALE: Reason.METRICS_STALE,
    _Fault.GARBAGE: Reason.METRICS_GARBAGE,
}


@dataclass(frozen=True, slots=True)
class _Judged:
    sample: MetricSample
    name: str  # canonical
    value: float | None
    fault: _Fault | None = None
    detail: str = ""


def known_names(name: str) -> tuple[str, ...]:
    """A series' own name and the aliases to query beside it."""
    return (name, *ALIASES.get(name, ()))


def canonical_name(name: str) -> str:
    """The name that decisions use for a series, whatever it is called."""
    return _CANONICAL.get(name, name)


def judge_metrics(given: MetricsInput) -> MetricsVerdict:
    """The condition `MetricsAvailable`, the usable values, and what each pool may do."""
    if not given.configured:
        message = "no Prometheus is configured; the routers' own reports are used"
        return MetricsVerdict(
            "False", Reason.NOT_CONFIGURED, message, use_router_reports=True, idle=_is_idle(given)
        )
    if given.error is not None:
        return _judge_outage(given)
    judged = _best_of_aliases([_judge_sample(sample, given.scrape_interval_s) for sample in given.samples])
    faults = _without_idle_classes(judged)
    usable = tuple(
        UsableMetric(item.name, item.value, item.sample.class_name, item.sample.pool)
        for item in judged
        if item.fault is None and item.value is not None
    )
    aliases = tuple(
        sorted({f"{item.sample.name} -> {item.name}" for item in judged if item.sample.name != item.name})
    )
    if not given.samples:
        return _without_series(given)
    if not faults:
        message = f"{count_of(len(usable), 'value')} read"
        if aliases:
            message += f"; accepted under other names: {', '.join(aliases)}"
        return MetricsVerdict(
            "True", Reason.METRICS_OK, message, usable, idle=_is_idle(given), aliases=aliases
        )
    if _is_idle(given) and all(item.fault is _Fault.MISSING for item in faults):
        message = "series are empty because no request flows"
        return MetricsVerdict("True", Reason.METRICS_OK, message, usable, idle=True, aliases=aliases)
    return _judge_faults(faults, usable, aliases)


def _is_idle(given: MetricsInput) -> bool:
    """Only a router that answers may say that nothing flows."""
    return given.router_flowing is False


def _judge_outage(given: MetricsInput) -> MetricsVerdict:
    detail = f" ({given.error_detail})" if given.error_detail else ""
    since = f" for {format_seconds(given.failing_s)}" if given.failing_s > 0 else ""
    cause = f"Prometheus: {given.error}{detail}{since}"
    late = given.failing_s >= OUTAGE_GRACE_S
    permission = Permission(may_grow=late, may_shrink=False)
    action = "the routers' own reports are used, no pool shrinks" if late else "pools hold"
    return MetricsVerdict(
        "False",
        Reason.METRICS_OUTAGE,
        f"{cause}; {action}",
        permissions=dict.fromkeys(Pool, permission),
        use_router_reports=late,
    )


def _without_series(given: MetricsInput) -> MetricsVerdict:
    """Prometheus answers but has none of our series."""
    if _is_idle(given):
        return MetricsVerdict("True", Reason.METRICS_OK, "no series yet and no request flows", idle=True)
    hold = Permission(may_grow=False, may_shrink=False)
    message = "Prometheus has none of this object's series; is it scraping routers and workers?"
    return MetricsVerdict("Unknown", Reason.METRICS_MISSING, message, permissions=dict.fromkeys(Pool, hold))


def _judge_sample(sample: MetricSample, scrape_interval_s: float) -> _Judged:
    name = canonical_name(sample.name)
    if sample.value is None or math.isnan(sample.value):
        return _Judged(sample, name, None, _Fault.MISSING, f"{sample.name} has no value")
    if sample.age_s is not None and sample.age_s > STALE_SCRAPES * scrape_interval_s:
        detail = (
            f"{sample.name} is {format_seconds(sample.age_s)} old, the scrape interval is "
            f"{format_seconds(scrape_interval_s)}"
        )
        return _Judged(sample, name, None, _Fault.STALE, detail)
    if math.isinf(sample.value) or not 0 <= sample.value <= _LARGEST[sample.quantity]:
        return _Judged(sample, name, None, _Fault.GARBAGE, f"{sample.name} is {sample.value:g}")
    if sample.quantity is Quantity.COUNTER:
        return _Judged(sample, name, counter_rate_per_s(sample.value, sample.previous, sample.interval_s))
    return _Judged(
        sample, name, min(sample.value, 1.0) if sample.quantity is Quantity.SHARE else sample.value
    )


def counter_rate_per_s(value: float, previous: float | None, interval_s: float | None) -> float | None:
    """Growth per second; a counter below its former value has restarted from zero. None: first sight."""
    if previous is None or interval_s is None or interval_s <= 0:
        return None
    increase = value - previous if value >= previous else value
    return increase / interval_s


def _best_of_aliases(judged: Sequence[_Judged]) -> list[_Judged]:
    """One entry per series: a usable one before a faulty one, our own name before an alias."""

    def rank(item: _Judged) -> tuple[bool, bool, int, str]:
        renamed = item.sample.name != item.name
        return item.fault is not None, renamed, -(item.fault or 0), item.sample.name + item.detail

    best: dict[tuple[str, str | None, Pool | None], _Judged] = {}
    for item in judged:
        key = (item.name, item.sample.class_name, item.sample.pool)
        if key not in best or rank(item) < rank(best[key]):
            best[key] = item
    return list(best.values())


def _without_idle_classes(judged: Sequence[_Judged]) -> list[_Judged]:
    """Faults, but for the empty latencies of a class to which nothing arrives."""
    idle = {
        item.sample.class_name
        for item in judged
        if item.sample.class_name is not None
        and item.sample.quantity in (Quantity.RATE_PER_S, Quantity.COUNTER)
        and item.value == 0
    }
    return [
        item
        for item in judged
        if item.fault is not None and not (item.fault is _Fault.MISSING and item.sample.class_name in idle)
    ]


def _judge_faults(
    faults: Sequence[_Judged], usable: tuple[UsableMetric, ...], aliases: tuple[str, ...]
) -> MetricsVerdict:
    worst = max(faults, key=lambda item: (item.fault or 0, item.detail))
    fault = worst.fault or _Fault.MISSING
    blind: set[Pool] = set()
    for item in faults:
        blind |= set(Pool) if item.sample.pool is None else {item.sample.pool}
    hold = Permission(may_grow=False, may_shrink=False)
    permissions = {
        pool: hold if pool in blind else Permission(may_grow=True, may_shrink=False) for pool in Pool
    }
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    who = "both pools hold" if len(blind) == len(Pool) else f"the {min(blind)} pool holds"
    status: ConditionStatus = "Unknown"
    return MetricsVerdict(
        status,
        _REASONS[fault],
        f"{worst.detail}{more}; {who}",
        usable,
        permissions,
        aliases=aliases,
    )
