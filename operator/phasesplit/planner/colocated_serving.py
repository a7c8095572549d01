"""What a number of colocated workers would do with a chunk budget, in closed form.

Steps of two kinds, with and without a chunk of prefill, whose mix follows from the load; requests
miss their TPOT when too many prompts arrive while they decode.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.planner.demand import ClassPrediction, Demand, Hardware, Prediction
from phasesplit.planner.facts import StepProfile
from phasesplit.planner.performance import chunk_pairs, decode_step_s, num_chunks, step_s
from phasesplit.planner.queueing import poisson_share, waits
from phasesplit.planner.serving import MAX_BATCH, Decoding, build_stream, ttft_share


def predict_colocated(
    demands: Sequence[Demand], hardware: Hardware, workers: int, chunk_tokens: int
) -> Prediction:
    """What that many colocated workers would do with a given chunk budget."""
    profile = hardware.decode_profile
    overloaded = _overloaded(demands, chunk_tokens)
    if workers <= 0 and demands:
        return overloaded
    state = _mixed_state(demands, profile, workers, chunk_tokens, hardware.kv_tokens_per_worker)
    if state is None:
        return overloaded
    services = [
        num_chunks(demand.new_tokens, chunk_tokens) * _mixed_s(demand, profile, chunk_tokens, state)
        for demand in demands
    ]
    streams = [build_stream(demand, service) for demand, service in zip(demands, services, strict=True)]
    queue = waits(streams, workers)
    found = []
    for demand, service, wait in zip(demands, services, queue, strict=True):
        ttft = ttft_share(demand, wait, service, fixed_s=state.step_s / 2)
        tpot_share = _mixed_tpot_share(demand, state)
        found.append(
            ClassPrediction(
                name=demand.name,
                ttft_s=wait.mean_s + service + state.step_s / 2,
                tpot_s=state.mean_step_s,
                attainment=ttft * tpot_share,
                ttft_attainment=ttft,
                tpot_attainment=tpot_share,
                second_token_gap_s=state.mean_step_s,
                meets=ttft * tpot_share >= demand.share,
            )
        )
    load = sum(stream.rate_per_s * stream.mean_s for stream in streams)
    room = state.batch * state.context_tokens / hardware.kv_tokens_per_worker
    return Prediction(
        classes=tuple(found),
        prefill_utilisation=load / workers if workers else 0.0,
        decode_utilisation=room,
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
class _Mixed:
    """The steady state of one colocated worker."""

    batch: float
    context_tokens: float
    step_s: float  # a step that only decodes
    mixed_s: float  # a step that also carries a chunk
    mean_step_s: float
    prompts_per_s: float
    chunks_per_prompt: float
    decoding: Decoding


def _mixed_s(demand: Demand, profile: StepProfile, chunk_tokens: int, state: _Mixed) -> float:
    return _mixed_step(demand, profile, chunk_tokens, state.batch, state.context_tokens)


def _mixed_step(
    demand: Demand, profile: StepProfile, chunk_tokens: int, batch: float, context_tokens: float
) -> float:
    steps = num_chunks(demand.new_tokens, chunk_tokens)
    return step_s(
        profile,
        prefill_tokens=demand.new_tokens / steps,
        prefill_pairs=chunk_pairs(demand.new_tokens, demand.cached_tokens) / steps,
        decode_sequences=batch,
        decode_context_tokens=batch * context_tokens,
    )


def _mixed_state(
    demands: Sequence[Demand], profile: StepProfile, workers: int, chunk_tokens: int, kv_tokens: float
) -> _Mixed | None:
    """Fixed point of batch and step time; None when the workers cannot keep up."""
    rate = sum(demand.rate_per_s for demand in demands)
    if rate <= 0:
        alone = decode_step_s(profile, 1, 0)
        idle = Decoding(0.0, alone, 0.0, profile.base_s, 0.0, 0.0)
        return _Mixed(0.0, 0.0, alone, alone, alone, 0.0, 1.0, idle)
    tokens_per_s = sum(d.rate_per_s * d.decode_steps for d in demands) / workers
    context = sum(d.rate_per_s * d.context_tokens for d in demands) / rate
    chunks = sum(d.rate_per_s * num_chunks(d.new_tokens, chunk_tokens) for d in demands) / rate
    slope_s = decode_step_s(profile, 1, context) - profile.base_s
    batch = 0.0
    step = mixed = mean = decode_step_s(profile, 1, context)
    for _ in range(60):
        step = decode_step_s(profile, 1 + batch, context)
        weighted = [
            d.rate_per_s
            * num_chunks(d.new_tokens, chunk_tokens)
            * _mixed_step(d, profile, chunk_tokens, batch + 1, context)
            for d in demands
        ]
        mixed = sum(weighted) / (rate * chunks)
        mixed_steps_per_s = rate * chunks / workers
        busy = mixed_steps_per_s * mixed
        if busy >= 1:
            return None
        mean = 1 / (mixed_steps_per_s + (1 - busy) / step)
        following = tokens_per_s * mean
        if following > MAX_BATCH:
            return None
        if abs(following - batch) < 1e-3 * (1 + batch):
            break
        batch = following
    else:
        return None
    if batch * context >= kv_tokens:
        return None
    decoding = Decoding(batch, step, slope_s, profile.base_s, context, 0.0)
    return _Mixed(batch, context, step, mixed, mean, rate / workers, chunks, decoding)


def _mixed_tpot_share(demand: Demand, state: _Mixed) -> float:
    """Share of requests whose TPOT holds, as prompts that arrive while it decodes slow some steps."""
    if demand.decode_steps <= 0:
        return 1.0
    by_batch = state.decoding.share_within(demand.tpot_s)
    extra_s = state.mixed_s - state.step_s
    if extra_s <= 0 or state.mixed_s <= demand.tpot_s:
        return by_batch
    if state.step_s > demand.tpot_s:
        return 0.0
    slow_steps = (demand.tpot_s - state.step_s) / extra_s * demand.decode_steps
    prompts = slow_steps / state.chunks_per_prompt
    arriving = state.prompts_per_s * demand.decode_steps * state.mean_step_s
    return by_batch * poisson_share(arriving, prompts)
