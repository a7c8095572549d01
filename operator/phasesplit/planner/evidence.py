"""Both ways of serving predicted for the load at hand, on equal workers. No decision is taken here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from phasesplit.api.names import Pool
from phasesplit.planner.capacity import (
    best_split,
    colocated_goodput_factor,
    split_goodput_factor,
    tuned_colocated,
)
from phasesplit.planner.colocated_serving import predict_colocated
from phasesplit.planner.demand import (
    Demand,
    Hardware,
    Prediction,
    build_demands,
    is_positive,
    usable_profile,
)
from phasesplit.planner.links import MAX_AGE_S
from phasesplit.planner.mode_types import LinkVerdict, ModeInput, ReplayEvidence
from phasesplit.planner.performance import decode_step_s, prefill_s

MIN_SAMPLES = 20  # steps behind a profile
MIN_REQUESTS = 20  # finished requests behind a load
_USEFUL_LOAD = 2.0  # capacity beyond this many times the present load counts for nothing
_THROTTLED = 0.9  # a colocated prefill slower than this share of a free one is held up by its budget


@dataclass(frozen=True, slots=True)
class Evidence:
    """Predicted serving of the same load by the same number of workers, both ways."""

    workers: int
    prefill_workers: int  # of the best split
    rate_per_s: float
    colocated: Prediction
    split: Prediction
    # Largest rate, in this mix, that meets every target; with a replay the rate in target of its window.
    colocated_goodput_per_s: float
    split_goodput_per_s: float
    uncertainty: float  # relative, of either figure
    interference: float  # share of decode tokens late because their step carried prefill
    throttled: bool  # the colocated budget holds prefill back
    replay: ReplayEvidence | None = None  # where there is one, it decides instead of the closed form
    free_split_goodput_per_s: float | None = None  # were transfers free; asked where the link is slow

    @property
    def gain_percent(self) -> float:
        """What a replay lets believe; else the lower bound of the split over the upper bound of colocated."""
        if self.replay is not None:
            return self.replay.outcome.believed_gain_percent
        if not self.feasible:
            return self._advantage_percent(self.split.attainment, self.colocated.attainment)
        return self._advantage_percent(self.split_goodput_per_s, self.colocated_goodput_per_s)

    @property
    def gain_without_transfer_percent(self) -> float:
        """The gain on an ideal link: tells a slow link from a split that does not pay."""
        if self.free_split_goodput_per_s is None:
            return self.gain_percent
        return self._advantage_percent(self.free_split_goodput_per_s, self.colocated_goodput_per_s)

    @property
    def loss_percent(self) -> float:
        """Lower bound of colocated over the upper bound of the split."""
        if self.replay is not None:
            return -self.replay.outcome.gain_high_percent
        if not self.feasible:
            return self._advantage_percent(self.colocated.attainment, self.split.attainment)
        return self._advantage_percent(self.colocated_goodput_per_s, self.split_goodput_per_s)

    def _advantage_percent(self, of_per_s: float, over_per_s: float) -> float:
        """Lower over upper bound; what lies far beyond the present load is of no use to anybody."""
        useful = _USEFUL_LOAD * self.rate_per_s if self.feasible else math.inf
        low = min(of_per_s * (1 - self.uncertainty), useful)
        high = min(over_per_s * (1 + self.uncertainty), useful)
        if high <= 0:
            return 0.0 if low <= 0 else math.inf
        return (low / high - 1) * 100

    @property
    def colocated_meets(self) -> bool:
        """Does colocated meet every target at the present load?"""
        return self.replay.outcome.colocated.meets if self.replay is not None else self.colocated.meets

    @property
    def feasible(self) -> bool:
        """Does either way meet the targets at any rate at all?"""
        return self.split_goodput_per_s > 0 or self.colocated_goodput_per_s > 0

    def numbers(self) -> Mapping[str, float]:
        """For `status.evidence`."""
        found = {
            "colocatedGoodputPerSecond": self.colocated_goodput_per_s,
            "splitGoodputPerSecond": self.split_goodput_per_s,
            "colocatedAttainmentPercent": self.colocated.attainment * 100,
            "splitAttainmentPercent": self.split.attainment * 100,
            "gainPercent": self.gain_percent,
            "interferencePercent": self.interference * 100,
        }
        if self.replay is not None:
            outcome = self.replay.outcome
            found |= {
                "colocatedGoodputPerSecond": outcome.colocated.attained_per_s,
                "splitGoodputPerSecond": outcome.split.attained_per_s,
                "colocatedAttainmentPercent": outcome.colocated.attainment * 100,
                "splitAttainmentPercent": outcome.split.attainment * 100,
                "gainPercent": outcome.gain_percent,
                "gainLowPercent": outcome.gain_low_percent,
                "gainHighPercent": outcome.gain_high_percent,
                "requests": float(outcome.requests),
            }
        return {name: value for name, value in found.items() if math.isfinite(value)}


def has_traffic(given: ModeInput) -> bool:
    """Enough finished requests to know what arrives."""
    return sum(load.finished for load in given.loads) >= MIN_REQUESTS


def is_measured(given: ModeInput) -> bool:
    """Do both pools have a step profile fitted from real steps, and is the KV size known?"""
    profiles = [usable_profile(given.profiles.get(pool)) for pool in (Pool.PREFILL, Pool.DECODE)]
    fitted = all(
        item is not None and not item.guessed and item.num_samples >= MIN_SAMPLES for item in profiles
    )
    return fitted and bool(given.kv_bytes_per_token)


def build_hardware(given: ModeInput, link: LinkVerdict) -> Hardware | None:
    """What the predictions run on; None while profiles or model are unknown."""
    prefill, decode = (usable_profile(given.profiles.get(pool)) for pool in (Pool.PREFILL, Pool.DECODE))
    if prefill is None or decode is None or not given.kv_bytes_per_token:
        return None
    rooms = [worker.kv_total_tokens for worker in given.workers if worker.kv_total_tokens > 0]
    fresh = [
        item.bytes_per_s for item in given.links if item.age_s <= MAX_AGE_S and is_positive(item.bytes_per_s)
    ]
    have = median(fresh) if fresh else link.have_bytes_per_s
    return Hardware(
        prefill_profile=prefill,
        decode_profile=decode,
        kv_bytes_per_token=float(given.kv_bytes_per_token),
        kv_tokens_per_worker=float(min(rooms)) if rooms else math.inf,
        link_bytes_per_s=have or math.inf,
    )


def gather_evidence(given: ModeInput, link: LinkVerdict) -> Evidence | None:
    """Predict both ways; None when there is nothing to predict from or fewer than two workers."""
    demands = build_demands(given.loads, given.classes)
    hardware = build_hardware(given, link)
    workers = sum(pool.ready for pool in given.pools.values())
    if not demands or hardware is None or workers < 2:
        return None
    return compare(
        demands,
        hardware,
        workers,
        given.chunk_tokens,
        given.interference,
        link_is_slow=link.status == "False",
        replayed=given.replay,
    )


def compare(
    demands: Sequence[Demand],
    hardware: Hardware,
    workers: int,
    chunk_tokens: int | None = None,
    measured_interference: float | None = None,
    *,
    link_is_slow: bool = False,
    replayed: ReplayEvidence | None = None,
) -> Evidence:
    """Both ways on equal workers, each at its own best setting."""
    free = replace(hardware, link_bytes_per_s=math.inf) if link_is_slow else None
    colocated = tuned_colocated(demands, hardware, workers, chunk_tokens)
    prefill_workers, split = best_split(demands, hardware, workers)
    rate = sum(demand.rate_per_s for demand in demands)

    if replayed is not None:  # it decides; the search for the largest load is most of a tick's cost
        outcome = replayed.outcome
        goodputs = outcome.colocated.attained_per_s, outcome.split.attained_per_s
    else:
        goodputs = (
            rate * colocated_goodput_factor(demands, hardware, workers, chunk_tokens),
            rate * split_goodput_factor(demands, hardware, workers),
        )

    residual = max(hardware.prefill_profile.residual, hardware.decode_profile.residual)
    interference = measured_interference
    if interference is None:
        interference = _predicted_interference(demands, hardware, workers, colocated)
    return Evidence(
        workers=workers,
        prefill_workers=prefill_workers,
        rate_per_s=rate,
        colocated=colocated,
        split=split,
        colocated_goodput_per_s=goodputs[0],
        split_goodput_per_s=goodputs[1],
        free_split_goodput_per_s=rate * split_goodput_factor(demands, free, workers) if free else None,
        # Both figures come from one profile, so most of its error cancels.
        uncertainty=min(0.1, residual / 4),
        interference=interference,
        throttled=_is_throttled(demands, hardware, colocated),
        replay=replayed,
    )


def _predicted_interference(
    demands: Sequence[Demand], hardware: Hardware, workers: int, colocated: Prediction
) -> float:
    """Share of decode tokens whose class misses its TPOT colocated but would keep it without prefill."""
    tokens = sum(demand.rate_per_s * demand.decode_steps for demand in demands)
    if tokens <= 0 or colocated.chunk_tokens is None:
        return 0.0
    quiet = [replace(demand, prompt_tokens=1.0, cached_tokens=0.0) for demand in demands]
    alone = predict_colocated(quiet, hardware, workers, colocated.chunk_tokens)
    lost = sum(
        demand.rate_per_s * demand.decode_steps * max(0.0, free.tpot_attainment - found.tpot_attainment)
        for demand, found, free in zip(demands, colocated.classes, alone.classes, strict=True)
    )
    return lost / tokens


def _is_throttled(demands: Sequence[Demand], hardware: Hardware, colocated: Prediction) -> bool:
    """Does the chunk budget, small for the sake of TPOT, slow prefill noticeably?"""
    if colocated.chunk_tokens is None or math.isinf(colocated.batch):
        return True
    heaviest = max(demands, key=lambda demand: demand.rate_per_s * demand.new_tokens)
    free = prefill_s(hardware.prefill_profile, heaviest.new_tokens, heaviest.new_tokens)
    context = heaviest.context_tokens
    decode_s = decode_step_s(hardware.decode_profile, colocated.batch, context)
    chunked = prefill_s(
        hardware.decode_profile,
        heaviest.new_tokens,
        colocated.chunk_tokens,
        batch=colocated.batch,
        context_tokens=context,
    )
    return free / max(chunked, 1e-12) < _THROTTLED and decode_s > 0
