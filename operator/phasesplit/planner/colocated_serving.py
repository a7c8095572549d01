"""What a number of colocated workers would do with a chunk budget, in closed form.

Steps of two kinds, with and without a chunk of prefill, whose mix follows from the load; requests
miss their TPOT when too many prompts arrive while they decode.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.planner.demand import ClassPrediction, Demand, Hardware, Prediction
from phasesplit.planner.facts import StepProfile
from phasesplit.planner.performance import chunk_pairs, decode_step_s, num_chunks
from phasesplit.planner.queueing import compound_share, waits
from phasesplit.planner.serving import (
    MAX_BATCH,
    Decoding,
    build_stream,
    mean_service_s,
    prompt_lengths,
    ttft_share,
)

# Gauss-Laguerre points and weights: answers whose length is geometric.
_LENGTH_POINTS = ((0.415775, 0.711093), (2.294280, 0.278518), (6.289945, 0.010389))


def predict_colocated(
    demands: Sequence[Demand], hardware: Hardware, workers: int, chunk_tokens: int
) -> Prediction:
    """What that many colocated workers would do with a given chunk budget."""
    profile = hardware.decode_profile
    overloaded = _overloaded(demands, chunk_tokens)
    if workers <= 0 and demands:
        return overloaded
    works = [_works(demand, profile, chunk_tokens) for demand in demands]
    state = _mixed_state(demands, works, hardware, workers)
    if state is None:
        return overloaded
    services = [[(_work_s(profile, work, state), work.weight) for work in item] for item in works]
    streams = [build_stream(demand, found) for demand, found in zip(demands, services, strict=True)]
    queue = waits(streams, workers)
    found = []
    for demand, service, wait in zip(demands, services, queue, strict=True):
        ttft = ttft_share(demand, wait, service, fixed_s=state.step_s / 2)
        tpot = _tpot_share(demand, state)
        found.append(
            ClassPrediction(
                name=demand.name,
                ttft_s=wait.mean_s + mean_service_s(service) + state.step_s / 2,
                tpot_s=state.mean_step_s,
                attainment=ttft * tpot,
                ttft_attainment=ttft,
                tpot_attainment=tpot,
                second_token_gap_s=state.mean_step_s,
                meets=ttft * tpot >= demand.share,
            )
        )
    load = sum(stream.rate_per_s * stream.mean_s for stream in streams)
    return Prediction(
        classes=tuple(found),
        prefill_utilisation=load / workers if workers else 0.0,
        decode_utilisation=state.batch * state.context_tokens / hardware.kv_tokens_per_worker,
        batch=state.batch,
        meets=all(item.meets for item in found),
        chunk_tokens=chunk_tokens,
    )


def _overloaded(demands: Sequence[Demand], chunk_tokens: int) -> Prediction:
    classes = tuple(
        ClassPrediction(demand.name, math.inf, math.inf, 0.0, 0.0, 0.0, math.inf, meets=False)
        for demand in demands
    )
    return Prediction(classes, math.inf, math.inf, math.inf, meets=False, chunk_tokens=chunk_tokens)


@dataclass(frozen=True, slots=True)
class _Work:
    """One of the prompts that stand for a class: its steps, and its own seconds in them."""

    steps: int
    prefill_s: float  # over all steps, without base and decode
    weight: float


@dataclass(frozen=True, slots=True)
class _Mixed:
    """The steady state of one colocated worker."""

    batch: float
    context_tokens: float
    step_s: float  # a step that only decodes
    longest_step_s: float  # a step that also carries a full chunk
    mean_step_s: float
    prompts_per_s: float
    # Of the prompts that arrive: share, seconds in prefill, seconds added to the decoding of the others.
    disturbances: tuple[tuple[float, float, float], ...]
    decoding: Decoding


def _works(demand: Demand, profile: StepProfile, chunk_tokens: int) -> tuple[_Work, ...]:
    return tuple(
        _Work(
            num_chunks(new, chunk_tokens),
            new * profile.per_prefill_token_s + chunk_pairs(new, cached) * profile.per_prefill_context_s,
            weight,
        )
        for new, cached, weight in prompt_lengths(demand)
    )


def _work_s(profile: StepProfile, work: _Work, state: _Mixed) -> float:
    """Seconds until the prompt is done, the batch decoding in each of its steps."""
    decode_s = state.step_s - profile.base_s
    return work.steps * state.step_s + _extra_s(profile, work, decode_s)


def _extra_s(profile: StepProfile, work: _Work, decode_s: float) -> float:
    """What the prompt adds to steps that would decode anyway."""
    return work.prefill_s - profile.overlap * min(work.prefill_s, work.steps * decode_s)


def _mixed_state(
    demands: Sequence[Demand], works: Sequence[Sequence[_Work]], hardware: Hardware, workers: int
) -> _Mixed | None:
    """Fixed point of batch and step time; None when the workers cannot keep up."""
    profile = hardware.decode_profile
    rate = sum(demand.rate_per_s for demand in demands)
    if rate <= 0:
        alone = decode_step_s(profile, 1, 0)
        idle = Decoding(0.0, alone, 0.0, profile.base_s, 0.0, 0.0)
        return _Mixed(0.0, 0.0, alone, alone, alone, 0.0, (), idle)
    tokens_per_s = sum(d.rate_per_s * d.decode_steps for d in demands) / workers
    context = sum(d.rate_per_s * d.decode_steps * d.context_tokens for d in demands)
    context = context / (tokens_per_s * workers) if tokens_per_s > 0 else 0.0
    weighted = [
        (demand.rate_per_s / rate * work.weight, work)
        for demand, item in zip(demands, works, strict=True)
        for work in item
    ]
    steps_per_s = rate / workers * sum(share * work.steps for share, work in weighted)
    slope_s = decode_step_s(profile, 1, context) - profile.base_s
    batch, hides = 0.0, profile.overlap > 0
    extra = sum(share * work.prefill_s for share, work in weighted)
    for _ in range(60):
        step = profile.base_s + (1 + batch) * slope_s
        if hides:
            extra = sum(share * _extra_s(profile, work, step - profile.base_s) for share, work in weighted)
        busy = steps_per_s * step + rate / workers * extra
        if busy >= 1:
            return None
        mean = 1 / (steps_per_s + (1 - busy) / step)
        following = tokens_per_s * mean
        if following > MAX_BATCH:
            return None
        if abs(following - batch) < 1e-3 * (1 + batch):
            break
        batch = following
    else:
        return None
    if batch * context >= hardware.kv_tokens_per_worker:
        return None
    decode_s = step - profile.base_s
    extras = [(share, work.steps, _extra_s(profile, work, decode_s)) for share, work in weighted]
    return _Mixed(
        batch=batch,
        context_tokens=context,
        step_s=step,
        longest_step_s=step + max(extra_s / steps for _, steps, extra_s in extras),
        mean_step_s=mean,
        prompts_per_s=rate / workers,
        disturbances=tuple((share, steps * step + extra_s, extra_s) for share, steps, extra_s in extras),
        decoding=Decoding(batch, step, slope_s, profile.base_s, context, 0.0),
    )


def _tpot_share(demand: Demand, state: _Mixed) -> float:
    """Share of requests whose TPOT holds, as prompts that arrive while it decodes slow some steps."""
    if demand.decode_steps <= 0:
        return 1.0
    by_batch = state.decoding.share_within(demand.tpot_s)
    if state.longest_step_s <= demand.tpot_s:
        return by_batch
    spare_s = demand.tpot_s - state.step_s
    if spare_s < 0:
        return 0.0
    share = 0.0
    for factor, weight in _LENGTH_POINTS:
        steps = max(1.0, demand.decode_steps * factor)
        share += weight * _undisturbed_share(state, steps * state.mean_step_s, spare_s * steps)
    return by_batch * share


def _undisturbed_share(state: _Mixed, window_s: float, spare_s: float) -> float:
    """Chance that prefills overlapping a window add no more than `spare_s` to it.

    A prefill of S seconds overlaps a window of D when it begins within D + S; by then in full, or in
    part at either end.
    """
    rate = mean = second = 0.0
    for share, prefill_s, extra_s in state.disturbances:
        arriving = state.prompts_per_s * share
        short, long = min(prefill_s, window_s), max(prefill_s, window_s)
        slowing = extra_s / prefill_s
        rate += arriving * (prefill_s + window_s)
        mean += arriving * prefill_s * window_s * slowing
        second += arriving * short * short * (long - short / 3) * slowing * slowing
    return compound_share(rate, mean / rate, second / rate, spare_s) if rate > 0 else 1.0
