"""The step profiles that scaling predicts with, moved slowly towards what is observed.

Step 2 of the scaling; knows profiles and latencies, no counts of workers to come.
"""

import math
from dataclasses import replace

from phasesplit.api.names import Pool
from phasesplit.api.routing import ServedMode
from phasesplit.planner.capacity import tuned_colocated
from phasesplit.planner.demand import Hardware, Prediction, build_demands, is_positive, usable_profile
from phasesplit.planner.facts import StepProfile
from phasesplit.planner.scaling_types import ScalingInput, ScalingMemory
from phasesplit.planner.split_serving import predict_split

_STEP = 0.1  # share of the way that one tick corrects
_BOUNDS = (0.5, 2.0)


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
    low, high = _BOUNDS
    goal = min(high, max(low, correction * ratio))
    return correction + _STEP * (goal - correction)
