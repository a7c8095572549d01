"""How many workers the load needs: forecast, correction by observation, queues already too long.

Steps 1 to 3 of the scaling; knows no bounds, GPUs or replicas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.api.routing import ServedMode
from phasesplit.planner.capacity import Need, needed_colocated, needed_split, tuned_colocated
from phasesplit.planner.demand import (
    Demand,
    Hardware,
    Prediction,
    build_demands,
    is_positive,
    scale_demands,
    usable_profile,
)
from phasesplit.planner.facts import LoadFacts, StepProfile
from phasesplit.planner.performance import prefill_chunk_tokens, prefill_s
from phasesplit.planner.scaling_arrivals import SHORT_WINDOW_S, lasting_need, needed_for_arrivals
from phasesplit.planner.scaling_forecast import forecast_rate
from phasesplit.planner.scaling_types import ScalingInput, ScalingMemory, ScalingPoint
from phasesplit.planner.split_serving import predict_split

PLANNED_LOAD = 0.9  # of what meets the targets: predictions are a few percent off, queues steep there
SURVIVOR_LOAD = 0.8  # survivors of a shrink must carry the load at this share of what they can
FORECAST_MEMORY_S = 900.0
_TREND_WINDOW_S = 300.0
_TREND_POINTS = 5
_TREND_ERRORS = 3.0  # a slope within this many standard errors is noise
_MAX_FORECAST = 2.0  # times the present rate
_CORRECTION_STEP = 0.1  # share of the way that one tick corrects
_CORRECTION_BOUNDS = (0.5, 2.0)
_FULL_KV = 0.95


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """Workers by phase; colocated needs are in `decode` with `prefill` 0."""

    now: Need
    keep: Need  # what survivors of a shrink would have to be
    urgent: bool  # a queue is already too long
    known: bool  # False: no profile or no load, nothing may be concluded
    detail: str = ""


def build_hardware(given: ScalingInput, memory: ScalingMemory) -> Hardware | None:
    """What predictions run on, corrected by what was observed; None without a profile."""
    prefill, decode = (usable_profile(given.profiles.get(pool)) for pool in (Pool.PREFILL, Pool.DECODE))
    prefill, decode = prefill or decode, decode or prefill
    if prefill is None or decode is None:
        return None
    return Hardware(
        prefill_profile=_slowed(prefill, memory.ttft_correction),
        decode_profile=_slowed(decode, memory.tpot_correction),
        kv_bytes_per_token=given.kv_bytes_per_token,
        kv_tokens_per_worker=float(given.kv_tokens_per_worker or math.inf),
        link_bytes_per_s=given.link_bytes_per_s or math.inf,
    )


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
    now = _need(given, demands, hardware, factor)
    keep = _at_least(_need(given, demands, hardware, 1 / SURVIVOR_LOAD), now)
    now = _raised_by_growth(given, hardware, now)
    detail = "" if now.feasible else describe_infeasible(demands, hardware)
    lasting = _lasting(given, hardware, factor)
    now = _at_most(now, lasting)
    raised = _at_most(_raised_by_queues(given, demands, hardware, now), lasting)
    if raised != now:
        return WorkerNeed(raised, _at_least(keep, raised), urgent=True, known=True, detail=detail)
    return WorkerNeed(now, _at_least(keep, now), urgent=False, known=True, detail=detail)


def correct(given: ScalingInput) -> ScalingMemory:
    """Step 2: move the corrections a little towards observed over predicted latency."""
    memory = given.memory
    demands = build_demands(given.loads, given.classes)
    hardware = build_hardware(given, memory)
    ready = {pool: bounds.ready for pool, bounds in given.pools.items()}
    if not demands or hardware is None or not all(ready.get(pool, 0) > 0 for pool in Pool):
        return memory
    if given.mode is ServedMode.SPLIT:
        predicted = predict_split(demands, hardware, ready[Pool.PREFILL], ready[Pool.DECODE])
    else:
        predicted = tuned_colocated(demands, hardware, sum(ready.values()), given.chunk_tokens)
    ttft = _mean_ratio(given, predicted, "ttft")
    tpot = _mean_ratio(given, predicted, "tpot")
    return replace(
        memory,
        ttft_correction=_moved(memory.ttft_correction, ttft),
        tpot_correction=_moved(memory.tpot_correction, tpot),
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


def _need(given: ScalingInput, demands: Sequence[Demand], hardware: Hardware, factor: float) -> Need:
    """Workers for so many times the present load: by the requests themselves where they are known."""
    scaled = scale_demands(demands, factor)
    if given.mode is ServedMode.SPLIT:
        seen = needed_for_arrivals(
            given.arrivals, given.classes, hardware, now_s=given.now_s, speed_up=factor
        )
        return seen or needed_split(scaled, hardware)
    workers, feasible = needed_colocated(scaled, hardware, given.chunk_tokens)
    return Need(0, workers, feasible=feasible)


def _raised_by_growth(given: ScalingInput, hardware: Hardware, now: Need) -> Need:
    """What has begun to grow in the last moments counts at once."""
    if given.mode is not ServedMode.SPLIT:
        return now
    growing = needed_for_arrivals(
        given.arrivals,
        given.classes,
        hardware,
        now_s=given.now_s,
        speed_up=1 / PLANNED_LOAD,
        window_s=SHORT_WINDOW_S,
    )
    return now if growing is None else _at_least(now, growing)


def _lasting(given: ScalingInput, hardware: Hardware, factor: float) -> Need | None:
    """What lasts long enough for a new worker to help; None where the requests are not known."""
    if given.mode is not ServedMode.SPLIT:
        return None
    return lasting_need(given.arrivals, given.classes, hardware, now_s=given.now_s, speed_up=factor)


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


def _slowed(profile: StepProfile, factor: float) -> StepProfile:
    if factor == 1.0:
        return profile
    return profile.model_copy(
        update={
            name: getattr(profile, name) * factor
            for name in (
                "base_s",
                "per_prefill_token_s",
                "per_prefill_context_s",
                "per_decode_sequence_s",
                "per_decode_context_s",
            )
        }
    )


def _mean_ratio(given: ScalingInput, predicted: Prediction, what: str) -> float | None:
    """Observed median over predicted mean, weighted by load; None where nothing was observed."""
    by_name = {item.name: item for item in predicted.classes}
    total = weight = 0.0
    for load in given.loads:
        found = by_name.get(load.class_name)
        seen = load.ttft_p50_s if what == "ttft" else load.tpot_p50_s
        expected = None if found is None else found.ttft_s if what == "ttft" else found.tpot_s
        if not is_positive(seen) or not is_positive(expected):
            continue
        rate = load.arrival_rate_per_s if is_positive(load.arrival_rate_per_s) else 0.0
        total += rate * seen / expected
        weight += rate
    return total / weight if weight > 0 else None


def _moved(correction: float, ratio: float | None) -> float:
    """The prediction already carries the correction, so the ratio applies on top of it."""
    if ratio is None:
        return correction
    low, high = _CORRECTION_BOUNDS
    goal = min(high, max(low, correction * ratio))
    return correction + _CORRECTION_STEP * (goal - correction)
