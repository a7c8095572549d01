"""Random scenarios for the choice of mode: hardware, load and targets near the border, and noise."""

import math
import random
from dataclasses import dataclass, replace

from helpers_traces import random_trace
from phasesplit.api.reports import StepProfile
from phasesplit.planner.capacity import colocated_goodput_factor, split_goodput_factor
from phasesplit.planner.demand import Demand, Hardware
from phasesplit.planner.simulation_types import Arrival, SimulatedClass

BORDER = 1.6  # the better way sustains less than this many times the other's load


@dataclass(frozen=True, slots=True)
class Scenario:
    """The truth, and what the decision is shown of it."""

    seed: int
    workers: int
    hardware: Hardware  # true
    seen_hardware: Hardware  # fitted with errors
    classes: tuple[SimulatedClass, ...]
    last_window: tuple[Arrival, ...]  # what the decision sees
    next_window: tuple[Arrival, ...]  # what it is judged by
    load: float  # arrival rate over the best that the closed form thinks sustainable
    near: bool  # both ways sustain about the same load
    gap_variation: float  # squared variation of the gaps between arrivals; 1: Poisson
    drift: float  # rate of the next window over that of the last
    cached_share: float  # of a prompt, found in a prefix cache


def random_profile(rng: random.Random) -> StepProfile:
    """From a core of a CPU to a large GPU: decode from 5 to 80 ms, prefill from 200 to 30,000 tokens/s."""
    token_s = 10 ** rng.uniform(-4.5, -2.3)
    base_s = token_s * 10 ** rng.uniform(1.2, 2.2)
    return StepProfile(
        base_s=base_s,
        per_prefill_token_s=token_s,
        per_prefill_context_s=token_s * 10 ** rng.uniform(-5.2, -4.0),
        per_decode_sequence_s=base_s * rng.uniform(0.002, 0.05),
        per_decode_context_s=base_s * 10 ** rng.uniform(-6.0, -4.8),
        overlap=rng.choice((0.0, 0.0, 0.5, 0.9)),
        num_samples=1000,
        residual=0.05,
    )


def disturb(rng: random.Random, profile: StepProfile, error: float) -> StepProfile:
    """The same law with each coefficient off by a normal error, the overlap by as much of its whole."""
    names = (
        "base_s",
        "per_prefill_token_s",
        "per_prefill_context_s",
        "per_decode_sequence_s",
        "per_decode_context_s",
    )
    changed = {name: getattr(profile, name) * max(0.5, rng.gauss(1, error)) for name in names}
    changed["overlap"] = min(1.0, max(0.0, profile.overlap + rng.gauss(0, error)))
    return profile.model_copy(update=changed)


def random_scenario(
    seed: int, *, requests: int = 1200, profile_error: float = 0.1, link_error: float = 0.2
) -> Scenario | None:
    """None when no plan meets the targets at any load, and for most scenarios far from the border."""
    rng = random.Random(seed)
    profile = random_profile(rng)
    workers = rng.choice((2, 2, 4, 4, 6, 8))
    prompt, output = 10 ** rng.uniform(2.2, 3.9), 10 ** rng.uniform(1.2, 2.7)
    cached = rng.choice((0.0, 0.0, 0.0, 0.3, 0.8))
    token_s = profile.per_prefill_token_s + profile.per_prefill_context_s * prompt / 2
    ttft_s = (profile.base_s + prompt * token_s) * 10 ** rng.uniform(0.6, 1.4)
    decode_s = profile.base_s + profile.per_decode_sequence_s + profile.per_decode_context_s * prompt
    tpot_s = decode_s * 10 ** rng.uniform(0.1, 0.8)
    kv_bytes = 131_072.0
    link = kv_bytes / profile.per_prefill_token_s * 10 ** rng.uniform(-0.5, 2.0)
    hardware = Hardware(profile, profile, kv_bytes, 40 * (prompt + 2 * output), link)
    demand = [Demand("default", 1.0, prompt, output, ttft_s, tpot_s, 0.9, cached_tokens=prompt * cached)]
    colocated = colocated_goodput_factor(demand, hardware, workers)
    split = split_goodput_factor(demand, hardware, workers)
    best = max(colocated, split)
    near = min(colocated, split) * BORDER >= best
    if best <= 0 or (not near and rng.random() < 0.8):
        return None
    classes = (SimulatedClass("default", ttft_s, tpot_s, 0.9),)
    load = rng.uniform(0.5, 1.15)
    rate = best * load
    gap_variation = rng.choice((1.0, 1.0, 4.0))
    drift = rng.choice((1.0, 1.0, rng.uniform(0.85, 1.15)))
    windows = [
        tuple(
            random_trace(
                seed * 2 + k,
                rate * factor,
                requests,
                prompt,
                output,
                cached_share=cached,
                gap_variation=gap_variation,
            )
        )
        for k, factor in enumerate((1.0, drift))
    ]
    seen = disturb(rng, profile, profile_error)
    seen_hardware = replace(
        hardware,
        prefill_profile=seen,
        decode_profile=seen,
        link_bytes_per_s=link * math.exp(rng.gauss(0, link_error)),
    )
    return Scenario(
        seed,
        workers,
        hardware,
        seen_hardware,
        classes,
        windows[0],
        windows[1],
        load,
        near=near,
        gap_variation=gap_variation,
        drift=drift,
        cached_share=cached,
    )
