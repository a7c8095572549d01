"""What arrives, what it runs on and what is predicted of it: values, and how loads become demands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.facts import LoadFacts, StepProfile
from phasesplit.planner.queueing import squared_variation

# Squared variation of prompt lengths when only their mean is known.
_DEFAULT_VARIATION = 0.5


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
    output_variation: float = 1.0  # as of a geometric distribution

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
        """Mean context over the time spent decoding, in which long answers weigh more."""
        return self.prompt_tokens + self.output_tokens * (1 + self.output_variation) / 2


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
        if not (is_positive(load.arrival_rate_per_s) and is_positive(load.mean_prompt_tokens)):
            continue
        prompt = max(1.0, load.mean_prompt_tokens)
        output = load.mean_output_tokens if is_positive(load.mean_output_tokens) else 1.0
        cached = load.mean_cached_tokens if is_positive(load.mean_cached_tokens) else 0.0
        p95 = load.p95_prompt_tokens if is_positive(load.p95_prompt_tokens) else None
        found.append(
            Demand(
                name=target.name,
                rate_per_s=load.arrival_rate_per_s,
                prompt_tokens=prompt,
                output_tokens=max(1.0, output),
                ttft_s=target.ttft_s,
                tpot_s=target.tpot_s,
                share=target.percentile / 100,
                priority=target.priority,
                cached_tokens=min(cached, prompt - 1),
                prompt_variation=squared_variation(prompt, p95, _DEFAULT_VARIATION),
            )
        )
    return tuple(found)


def is_positive(value: float | None) -> TypeGuard[float]:
    """A number above zero that may be reckoned with; what comes from queries may be NaN or infinite."""
    return value is not None and math.isfinite(value) and value > 0


def usable_profile(profile: StepProfile | None) -> StepProfile | None:
    """A profile under which every step takes time; one that says otherwise says nothing."""
    if profile is None or not is_positive(profile.per_prefill_token_s):
        return None
    if not is_positive(profile.base_s + profile.per_decode_sequence_s):
        return None
    return profile


def scale_demands(demands: Sequence[Demand], factor: float) -> tuple[Demand, ...]:
    """The same mix at another rate."""
    return tuple(replace(demand, rate_per_s=demand.rate_per_s * factor) for demand in demands)
