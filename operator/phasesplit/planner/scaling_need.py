"""How many workers the load needs: by rates or by the requests that came, forecast, queues already too long.

Steps 1 and 3 of the scaling; knows no bounds, GPUs or replicas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.api.routing import ServedMode
from phasesplit.planner.capacity import Need, needed_colocated, needed_split
from phasesplit.planner.demand import (
    Demand,
    Hardware,
    build_demands,
    is_positive,
    scale_demands,
)
from phasesplit.planner.facts import LoadFacts
from phasesplit.planner.performance import prefill_chunk_tokens, prefill_s
from phasesplit.planner.scaling_arrivals import SHORT_WINDOW_S, SeenRequests, see_requests
from phasesplit.planner.scaling_correction import build_hardware
from phasesplit.planner.scaling_forecast import forecast_rate
from phasesplit.planner.scaling_types import ScalingInput, ScalingMemory, ScalingPoint

PLANNED_LOAD = 0.9  # of what meets the targets: predictions are a few percent off, queues steep there
SURVIVOR_LOAD = 0.8  # survivors of a shrink must carry the load at this share of what they can
FORECAST_MEMORY_S = 900.0
_TREND_WINDOW_S = 300.0
_TREND_POINTS = 5
_TREND_ERRORS = 3.0  # a slope within this many standard errors is noise
_MAX_FORECAST = 2.0  # times the present rate
_FULL_KV = 0.95


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """Workers by phase; colocated needs are in `decode` with `prefill` 0."""

    now: Need
    keep: Need  # what survivors of a shrink would have to be
    urgent: bool  # a queue is already too long
    known: bool  # False: no profile or no load, nothing may be concluded
    detail: str = ""
    counted: Need | None = None  # `now` by the requests that came, before it is raised or held down


def total_rate_per_s(loads: Sequence[LoadFacts]) -> float:
    """Arrivals of all classes whose rate is known."""
    return sum(load.arrival_rate_per_s for load in loads if is_positive(load.arrival_rate_per_s))


def forecast_factor(given: ScalingInput) -> float:
    """Load expected when a worker started now would serve, over the load now; at least 1.

    The larger of the weighted forecast and of the trend: too few workers cost more than one too many.
    """
    rate = total_rate_per_s(given.loads)
    points = [
        (point.at_s, point.rate_per_s)
        for point in given.memory.points
        if 0 < given.now_s - point.at_s <= FORECAST_MEMORY_S
    ]
    if rate <= 0 or len(points) < _TREND_POINTS:
        return 1.0
    expected = forecast_rate([*points, (given.now_s, rate)], given.worker_start_s) or rate
    recent = [point for point in points if given.now_s - point[0] <= _TREND_WINDOW_S]
    trend = _trend_rate(recent, given.now_s + given.worker_start_s) or rate
    return min(_MAX_FORECAST, max(1.0, expected / rate, trend / rate))


def _trend_rate(points: Sequence[tuple[float, float]], at_s: float) -> float | None:
    """A straight line through the rates carried forward; None unless it rises out of the noise."""
    if len(points) < _TREND_POINTS:
        return None
    mean_at = sum(when for when, _ in points) / len(points)
    mean_rate = sum(rate for _, rate in points) / len(points)
    spread = sum((when - mean_at) ** 2 for when, _ in points)
    if spread <= 0:
        return None
    slope = sum((when - mean_at) * (rate - mean_rate) for when, rate in points) / spread
    left = [rate - mean_rate - slope * (when - mean_at) for when, rate in points]
    error = math.sqrt(sum(value * value for value in left) / (len(points) - 2) / spread)
    return mean_rate + slope * (at_s - mean_at) if slope > _TREND_ERRORS * error else None


def find_need(given: ScalingInput, memory: ScalingMemory) -> WorkerNeed:
    """Feed-forward need at the forecast load, raised where queues are already too long."""
    demands = build_demands(given.loads, given.classes)
    idle = given.metrics is not None and given.metrics.idle
    if not demands:
        nothing = Need(1, 1, feasible=True) if given.mode is ServedMode.SPLIT else Need(0, 1, feasible=True)
        return WorkerNeed(nothing, nothing, urgent=False, known=idle or _knows_of_no_load(given))
    hardware = build_hardware(given, memory)
    if hardware is None:
        unknown = Need(0, 0, feasible=True)
        return WorkerNeed(unknown, unknown, urgent=False, known=False, detail="no worker has a step profile")
    factor = forecast_factor(given) / PLANNED_LOAD
    split = given.mode is ServedMode.SPLIT
    seen = see_requests(given.arrivals, given.classes, hardware, now_s=given.now_s) if split else None
    now = counted = _need(given, demands, hardware, seen, factor, like=memory.counted)
    keep = _at_least(_need(given, demands, hardware, seen, 1 / SURVIVOR_LOAD, like=now), now)
    detail = "" if now.feasible else describe_infeasible(demands, hardware)
    lasting = None
    if seen is not None:
        newest = seen.last(SHORT_WINDOW_S)
        now = now if newest.is_nearly(seen) else _raised_by_growth(newest, now)
        lasting = newest.lasting(speed_up=factor)
    now = _at_most(now, lasting)
    raised = _at_most(_raised_by_queues(given, demands, hardware, now), lasting)
    return WorkerNeed(
        raised,
        _at_least(keep, raised),
        urgent=raised != now,
        known=True,
        detail=detail,
        counted=counted if seen is not None else None,
    )


def remember(given: ScalingInput, memory: ScalingMemory, keep: Mapping[Pool, int]) -> ScalingMemory:
    """Add this tick; points older than the down window and the forecast's memory are dropped.

    The newest of those stays: it proves that the down window is covered by observation.
    """
    rate = total_rate_per_s(given.loads)
    horizon_s = given.now_s - max(given.down_stabilization_s, FORECAST_MEMORY_S)
    old = [point for point in memory.points if point.at_s < horizon_s]
    recent = [point for point in memory.points if point.at_s >= horizon_s]
    return replace(memory, points=(*old[-1:], *recent, ScalingPoint(given.now_s, dict(keep), rate)))


def describe_infeasible(demands: Sequence[Demand], hardware: Hardware) -> str:
    """Which target a request alone on idle workers already misses."""
    for demand in demands:
        chunk = prefill_chunk_tokens(hardware.prefill_profile, demand.prompt_tokens)
        alone_s = prefill_s(
            hardware.prefill_profile, demand.prompt_tokens, chunk, cached_tokens=demand.cached_tokens
        )
        if alone_s > demand.ttft_s:
            return (
                f"class {demand.name} cannot be met by any number of workers: a prompt of "
                f"{demand.prompt_tokens:.0f} tokens alone takes {alone_s:.2g} s, the target is "
                f"{demand.ttft_s:.2g} s"
            )
    return "the targets cannot be met by any number of workers; enough are planned to carry the load"


def _need(
    given: ScalingInput,
    demands: Sequence[Demand],
    hardware: Hardware,
    seen: SeenRequests | None,
    factor: float,
    *,
    like: Need | None = None,
) -> Need:
    """Workers for so many times the present load: by the requests themselves where they are known."""
    scaled = scale_demands(demands, factor)
    if given.mode is ServedMode.SPLIT:
        counted = seen.need(speed_up=factor, like=like) if seen is not None else None
        return counted or needed_split(scaled, hardware)
    workers, feasible = needed_colocated(scaled, hardware, given.chunk_tokens)
    return Need(0, workers, feasible=feasible)


def _raised_by_growth(newest: SeenRequests, now: Need) -> Need:
    """What has begun to grow in the last moments counts at once."""
    growing = newest.need(speed_up=1 / PLANNED_LOAD, like=now)
    return now if growing is None else _at_least(now, growing)


def _at_most(need: Need, ceiling: Need | None) -> Need:
    if ceiling is None:
        return need
    return replace(need, prefill=min(need.prefill, ceiling.prefill), decode=min(need.decode, ceiling.decode))


def _at_least(need: Need, floor: Need) -> Need:
    return Need(max(need.prefill, floor.prefill), max(need.decode, floor.decode), feasible=need.feasible)


def _raised_by_queues(given: ScalingInput, demands: Sequence[Demand], hardware: Hardware, need: Need) -> Need:
    """Step 3: more of the phase whose queue already eats up the budget."""
    by_name = {demand.name: demand for demand in demands}
    late = False
    for load in given.loads:
        demand = by_name.get(load.class_name)
        if demand is None or load.queue_s is None:
            continue
        chunk = prefill_chunk_tokens(hardware.prefill_profile, demand.prompt_tokens)
        service_s = prefill_s(hardware.prefill_profile, demand.prompt_tokens, chunk)
        late = late or load.queue_s > max(0.0, demand.ttft_s - service_s)
    prefill, decode = need.prefill, need.decode
    if late and given.mode is ServedMode.SPLIT:
        prefill = max(prefill, _half_more(_ready(given, Pool.PREFILL)))
    elif late:
        decode = max(decode, _half_more(sum(bounds.ready for bounds in given.pools.values())))
    full = [
        worker.kv_used_tokens > _FULL_KV * worker.kv_total_tokens and worker.num_waiting > 0
        for worker in given.workers
        if worker.pool is Pool.DECODE and worker.ready and worker.kv_total_tokens > 0
    ]
    if full and all(full) and given.mode is ServedMode.SPLIT:
        decode = max(decode, _half_more(_ready(given, Pool.DECODE)))
    return replace(need, prefill=prefill, decode=decode)


def _half_more(count: int) -> int:
    return count + max(1, count // 2)


def _ready(given: ScalingInput, pool: Pool) -> int:
    bounds = given.pools.get(pool)
    return bounds.ready if bounds else 0


def _knows_of_no_load(given: ScalingInput) -> bool:
    """Loads were read and say that nothing arrives; an empty list says nothing at all."""
    return bool(given.loads) and all(load.arrival_rate_per_s <= 0 for load in given.loads)
