"""What a number of workers can serve: predicted latencies and attainment, split and colocated.

Closed form: prefill is a station of several servers, decode a batch whose size follows from Little's
law. Knows nothing of clusters or time; `simulation` is the slower and finer instrument.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.facts import LoadFacts, StepProfile
from phasesplit.planner.performance import (
    MIN_CHUNK_TOKENS,
    chunk_pairs,
    decode_step_s,
    exposed_transfer_s,
    largest_chunk_tokens,
    num_chunks,
    prefill_chunk_tokens,
    prefill_s,
    step_s,
)
from phasesplit.planner.queueing import Stream, Wait, normal_share, poisson_share, squared_variation, waits

# Squared variation of prompt lengths when only their mean is known.
_DEFAULT_VARIATION = 0.5
# Midpoints of five equal shares of a standard normal.
_NORMAL_POINTS = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)
# A batch seen over a request's life varies less than at one instant.
_BATCH_AVERAGING = 2.0 / 3.0
_MAX_BATCH = 4096.0
# Chunk budgets tried, as multiples of the tightest TPOT target in predicted step seconds.
CHUNK_BUDGET_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """One class: what arrives and what it is promised."""

    name: str
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    share: float  # of requests that must meet both targets, 0 to 1
    priority: int = 0
    cached_tokens: float = 0.0
    prompt_variation: float = _DEFAULT_VARIATION

    @property
    def new_tokens(self) -> float:
        """Prompt tokens to compute."""
        return max(1.0, self.prompt_tokens - self.cached_tokens)

    @property
    def decode_steps(self) -> float:
        """Tokens after the first."""
        return max(0.0, self.output_tokens - 1)

    @property
    def context_tokens(self) -> float:
        """Mean context while decoding."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of worker and the link between two of them."""

    prefill_profile: StepProfile
    decode_profile: StepProfile
    kv_bytes_per_token: float = 0.0
    kv_tokens_per_worker: float = math.inf
    link_bytes_per_s: float = math.inf  # of one decode worker's link


@dataclass(frozen=True, slots=True)
class ClassPrediction:
    """What one class would see."""

    name: str
    ttft_s: float  # mean wait plus mean service
    tpot_s: float
    attainment: float  # share meeting both targets
    ttft_attainment: float
    tpot_attainment: float
    second_token_gap_s: float
    meets: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan would do."""

    classes: tuple[ClassPrediction, ...]
    prefill_utilisation: float
    decode_utilisation: float  # of KV room or of the largest stable batch, the worse
    batch: float
    meets: bool
    chunk_tokens: int | None = None  # colocated only

    @property
    def attainment(self) -> float:
        """The worst class's attainment; 1 without classes."""
        return min((item.attainment for item in self.classes), default=1.0)


def build_demands(loads: Sequence[LoadFacts], classes: Sequence[LatencyClass]) -> tuple[Demand, ...]:
    """Join measured load with its targets; a class without a load has none, a load without a class is
    held to the first class's targets, as the router does.
    """
    by_name = {item.name: item for item in classes}
    found = []
    for load in loads:
        target = by_name.get(load.class_name, classes[0])
        if load.arrival_rate_per_s <= 0 or load.mean_prompt_tokens <= 0:
            continue
        found.append(
            Demand(
                name=target.name,
                rate_per_s=load.arrival_rate_per_s,
                prompt_tokens=load.mean_prompt_tokens,
                output_tokens=max(1.0, load.mean_output_tokens),
                ttft_s=target.ttft_s,
                tpot_s=target.tpot_s,
                share=target.percentile / 100,
                priority=target.priority,
                cached_tokens=min(load.mean_cached_tokens, load.mean_prompt_tokens - 1),
                prompt_variation=squared_variation(
                    load.mean_prompt_tokens, load.p95_prompt_tokens, _DEFAULT_VARIATION
                ),
            )
        )
    return tuple(found)


def scale_demands(demands: Sequence[Demand], factor: float) -> tuple[Demand, ...]:
    """The same mix at another rate."""
    return tuple(replace(demand, rate_per_s=demand.rate_per_s * factor) for demand in demands)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The batch of one decode worker."""

    batch: float  # mean
    step_s: float  # as a request sees it: the others plus itself
    slope_s: float  # per sequence
    base_s: float
    context_tokens: float
    utilisation: float

    def share_within(self, tpot_s: float) -> float:
        """Share of requests whose mean step stays within that, as the batch varies."""
        if math.isinf(self.step_s):
            return 0.0
        if self.slope_s <= 0:
            return 1.0 if self.base_s <= tpot_s else 0.0
        others = (tpot_s - self.base_s) / self.slope_s - 1
        if others < 0:
            return 0.0
        deviation = math.sqrt(max(1e-9, _BATCH_AVERAGING * self.batch))
        return normal_share((others + 0.5 - self.batch) / deviation)


def _decoding(demands: Sequence[Demand], profile: StepProfile, workers: int, kv_tokens: float) -> _Decoding:
    tokens_per_s = sum(demand.rate_per_s * demand.decode_steps for demand in demands)
    if tokens_per_s <= 0:
        context = max((demand.context_tokens for demand in demands), default=0.0)
        return _Decoding(0.0, decode_step_s(profile, 1, context), 0.0, profile.base_s, context, 0.0)
    if workers <= 0:
        return _Decoding(math.inf, math.inf, 0.0, profile.base_s, 0.0, math.inf)
    context = sum(d.rate_per_s * d.decode_steps * d.context_tokens for d in demands) / tokens_per_s
    slope_s = decode_step_s(profile, 1, context) - profile.base_s
    per_worker = tokens_per_s / workers
    busy = per_worker * slope_s  # at 1 the batch grows without end
    if busy >= 1:
        return _Decoding(math.inf, math.inf, slope_s, profile.base_s, context, busy)
    seen_s = (profile.base_s + slope_s) / (1 - busy)
    batch = per_worker * seen_s
    room = batch * context / kv_tokens
    if batch > _MAX_BATCH or room >= 1:
        return _Decoding(math.inf, math.inf, slope_s, profile.base_s, context, max(busy, room))
    return _Decoding(batch, seen_s, slope_s, profile.base_s, context, max(busy, room))


def _ttft_share(demand: Demand, wait: Wait, mean_service_s: float, fixed_s: float = 0.0) -> float:
    """Share within the TTFT target, over the spread of prompt lengths and of waits."""
    sigma = math.sqrt(math.log(1 + demand.prompt_variation))
    shares = [
        wait.share_within(
            demand.ttft_s - fixed_s - mean_service_s * math.exp(sigma * point - sigma * sigma / 2)
        )
        for point in _NORMAL_POINTS
    ]
    return sum(shares) / len(shares)


def _stream(demand: Demand, mean_s: float) -> Stream:
    return Stream(demand.rate_per_s, mean_s, mean_s * mean_s * (1 + demand.prompt_variation), demand.priority)


def predict_split(
    demands: Sequence[Demand], hardware: Hardware, prefill_workers: int, decode_workers: int
) -> Prediction:
    """What that many prefill and decode workers would do."""
    profile = hardware.prefill_profile
    chunks = [prefill_chunk_tokens(profile, demand.prompt_tokens) for demand in demands]
    services = [
        prefill_s(profile, demand.prompt_tokens, chunk, cached_tokens=demand.cached_tokens)
        for demand, chunk in zip(demands, chunks, strict=True)
    ]
    streams = [_stream(demand, service) for demand, service in zip(demands, services, strict=True)]
    queue = waits(streams, prefill_workers)
    decoding = _decoding(demands, hardware.decode_profile, decode_workers, hardware.kv_tokens_per_worker)
    free_link = _free_link_bytes_per_s(demands, hardware, decode_workers)
    found = []
    for demand, chunk, service, wait in zip(demands, chunks, services, queue, strict=True):
        exposed_s = exposed_transfer_s(
            demand.prompt_tokens * hardware.kv_bytes_per_token,
            free_link,
            prefill_seconds=service,
            chunks=num_chunks(demand.new_tokens, chunk),
        )
        # The first token is out before the transfer ends: what is exposed lies in the second gap.
        per_token_s = exposed_s / demand.decode_steps if demand.decode_steps else 0.0
        ttft_share = _ttft_share(demand, wait, service)
        tpot_share = decoding.share_within(demand.tpot_s - per_token_s) if demand.decode_steps else 1.0
        found.append(
            ClassPrediction(
                name=demand.name,
                ttft_s=wait.mean_s + service,
                tpot_s=decoding.step_s + per_token_s,
                attainment=ttft_share * tpot_share,
                ttft_attainment=ttft_share,
                tpot_attainment=tpot_share,
                second_token_gap_s=exposed_s + decoding.step_s,
                meets=ttft_share * tpot_share >= demand.share,
            )
        )
    load = sum(stream.rate_per_s * stream.mean_s for stream in streams)
    return Prediction(
        classes=tuple(found),
        prefill_utilisation=load / prefill_workers if prefill_workers else (math.inf if load else 0.0),
        decode_utilisation=decoding.utilisation,
        batch=decoding.batch,
        meets=all(item.meets for item in found),
    )


def _free_link_bytes_per_s(demands: Sequence[Demand], hardware: Hardware, decode_workers: int) -> float:
    """Bandwidth a transfer finds on a decode worker's link that the others use too."""
    if math.isinf(hardware.link_bytes_per_s):
        return math.inf
    offered = sum(demand.rate_per_s * demand.prompt_tokens for demand in demands)
    used = offered * hardware.kv_bytes_per_token / max(1, decode_workers) / hardware.link_bytes_per_s
    return hardware.link_bytes_per_s * max(0.0, 1 - used)


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
    streams = [_stream(demand, service) for demand, service in zip(demands, services, strict=True)]
    queue = waits(streams, workers)
    found = []
    for demand, service, wait in zip(demands, services, queue, strict=True):
        ttft_share = _ttft_share(demand, wait, service, fixed_s=state.step_s / 2)
        tpot_share = _mixed_tpot_share(demand, state)
        found.append(
            ClassPrediction(
                name=demand.name,
                ttft_s=wait.mean_s + service + state.step_s / 2,
                tpot_s=state.mean_step_s,
                attainment=ttft_share * tpot_share,
                ttft_attainment=ttft_share,
                tpot_attainment=tpot_share,
                second_token_gap_s=state.mean_step_s,
                meets=ttft_share * tpot_share >= demand.share,
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
    decoding: _Decoding


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
        idle = _Decoding(0.0, alone, 0.0, profile.base_s, 0.0, 0.0)
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
        if following > _MAX_BATCH:
            return None
        if abs(following - batch) < 1e-3 * (1 + batch):
            break
        batch = following
    else:
        return None
    if batch * context >= kv_tokens:
        return None
    decoding = _Decoding(batch, step, slope_s, profile.base_s, context, 0.0)
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


def tuned_colocated(
    demands: Sequence[Demand], hardware: Hardware, workers: int, chunk_tokens: int | None = None
) -> Prediction:
    """The best colocated plan over chunk budgets in predicted step seconds, or at the user's budget."""
    if chunk_tokens is not None:
        return predict_colocated(demands, hardware, workers, chunk_tokens)
    budgets = sorted(chunk_budgets(demands, hardware))
    predictions = [predict_colocated(demands, hardware, workers, budget) for budget in budgets]
    return max(predictions, key=lambda item: (item.meets, round(item.attainment, 6), item.chunk_tokens))


def chunk_budgets(demands: Sequence[Demand], hardware: Hardware) -> set[int]:
    """Token budgets worth trying, from the targets."""
    if not demands:
        return {MIN_CHUNK_TOKENS}
    tightest_s = min(demand.tpot_s for demand in demands)
    context = max(demand.prompt_tokens for demand in demands) / 2
    return {
        largest_chunk_tokens(
            hardware.decode_profile,
            tightest_s * factor,
            chunk_context_tokens=context,
            batch=4,
            context_tokens=2 * context,
        )
        for factor in CHUNK_BUDGET_FACTORS
    }


def best_split(demands: Sequence[Demand], hardware: Hardware, workers: int) -> tuple[int, Prediction]:
    """The best number of prefill workers among `workers`, at least one of each."""
    options = [
        (prefill, predict_split(demands, hardware, prefill, workers - prefill))
        for prefill in range(1, workers)
    ]
    return max(options, key=lambda item: (item[1].meets, round(item[1].attainment, 6), -item[0]))


def sustainable_factor(meets: Callable[[float], bool], *, highest: float = 1024.0) -> float:
    """Largest multiple of the load that still meets every target; 0 when none does."""
    low, high = 0.0, 1.0
    while high < highest and meets(high):
        low, high = high, high * 2
    if low == 0.0 and not meets(1e-3):
        return 0.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
