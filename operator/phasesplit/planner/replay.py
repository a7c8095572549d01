"""The last window served again, both ways: which would have kept more requests in target?

Real arrivals (times and lengths, no text) through the simulator with fitted profile and measured
links, under many plans of each architecture on equal workers. Takes seconds: callers run it beside
their loop, not in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.planner.demand import Hardware
from phasesplit.planner.performance import prefill_s
from phasesplit.planner.simulation import simulate
from phasesplit.planner.simulation_types import (
    Arrival,
    ColocatedPlan,
    Plan,
    SimulatedClass,
    Simulation,
    SimulationResult,
    SplitPlan,
)

# Chunk budgets tried, as multiples of the tightest TPOT target in predicted step seconds.
BUDGET_FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
USUAL_MAX_NUM_SEQS = 64  # of a worker that was not told otherwise
_FEW_WORKERS = 8  # up to here every ratio is tried
_BATCHES = 20  # means of this many consecutive parts of the window give the interval
_STUDENT_95 = 2.093  # two-sided 95 % at 19 degrees of freedom


@dataclass(frozen=True, slots=True)
class ReplayInput:
    """What is served again, on what."""

    trace: tuple[Arrival, ...]
    hardware: Hardware
    classes: tuple[SimulatedClass, ...]
    workers: int
    chunk_tokens: int | None = None  # the user's own budget; absent: searched
    max_num_seqs: int = USUAL_MAX_NUM_SEQS
    admission: bool = True


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """The best plan of one architecture and what it reached."""

    plan: Plan
    attainment: float  # of the worst class
    attained_per_s: float
    meets: bool
    second_token_gap_p99_s: float
    transfer_p99_s: float  # from the first token until the KV has arrived; 0 where nothing was transferred


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Both architectures on the same requests; the gain is of requests in target, paired by request."""

    colocated: PlanOutcome
    split: PlanOutcome
    requests: int
    window_s: float
    gain_percent: float  # of the split over colocated, as seen
    gain_low_percent: float  # 95 % interval
    gain_high_percent: float

    @property
    def believed_gain_percent(self) -> float:
        """What counts against the minimum gain: the gain seen, once its interval is wholly above zero.

        The arrivals of one window are the same for both, so its noise is in the interval twice; to ask the
        lower end for the minimum as well keeps too many splits that pay (docs/decisions/0004).
        """
        return self.gain_percent if self.gain_low_percent > 0 else min(self.gain_low_percent, 0.0)


def replay(given: ReplayInput) -> ReplayOutcome | None:
    """Search both architectures; None without requests or with fewer than two workers."""
    if not given.trace or given.workers < 2:
        return None
    return compare_plans(given, colocated_plans(given), split_plans(given))


def compare_plans(
    given: ReplayInput, colocated_choices: Sequence[Plan], split_choices: Sequence[Plan]
) -> ReplayOutcome:
    """The best of some plans of each architecture, on the same requests."""
    colocated_plan, colocated = best_plan(given, colocated_choices)
    split_plan, split = best_plan(given, split_choices)
    window_s = max(given.trace[-1].at_s - given.trace[0].at_s, 1e-9)
    mean, half = paired_difference(colocated, split)
    base = sum(colocated.attained(index) for index in range(len(given.trace))) / len(given.trace)
    return ReplayOutcome(
        colocated=_outcome(colocated_plan, colocated, window_s),
        split=_outcome(split_plan, split, window_s),
        requests=len(given.trace),
        window_s=window_s,
        gain_percent=_percent(mean, base),
        gain_low_percent=_percent(mean - half, base),
        gain_high_percent=_percent(mean + half, base),
    )


def best_plan(given: ReplayInput, plans: Sequence[Plan]) -> tuple[Plan, SimulationResult]:
    """The plan with the most requests in target; of equals the most usual one."""
    best: tuple[float, Plan, SimulationResult] | None = None
    # The share is a sum over the whole window: taken once, and only where it is asked for.
    share = _prefill_share(given) if any(isinstance(plan, SplitPlan) for plan in plans) else 0.0
    for plan in sorted(plans, key=lambda plan: _unusual(given, plan, share)):
        found = simulate(
            Simulation(
                given.trace,
                plan,
                given.hardware,
                given.classes,
                max_num_seqs=given.max_num_seqs,
                admission=given.admission,
            )
        )
        reached = found.attainment()
        if best is None or reached > best[0] + 1e-12:
            best = reached, plan, found
    if best is None:
        raise ValueError("no plan to try")
    return best[1], best[2]


def colocated_plans(given: ReplayInput) -> list[Plan]:
    """Chunk budgets in predicted step seconds, from small ones to one that takes prompts whole."""
    if given.chunk_tokens is not None:
        return [ColocatedPlan(given.workers, given.chunk_tokens)]
    tightest_s = _tightest_s(given)
    profile = given.hardware.decode_profile
    longest = max(arrival.prompt_tokens for arrival in given.trace)
    whole_s = prefill_s(profile, longest, longest)
    budgets = [tightest_s * factor for factor in BUDGET_FACTORS]
    if whole_s > budgets[-1]:
        budgets.append(whole_s)
    return [ColocatedPlan(given.workers, step_budget_s=budget_s) for budget_s in budgets]


def split_plans(given: ReplayInput) -> list[Plan]:
    """Ratios worth trying: all with few workers, else those around the balance of work."""
    workers = given.workers
    if workers <= _FEW_WORKERS:
        return [SplitPlan(count, workers - count) for count in range(1, workers)]
    share = _prefill_share(given)
    middle = min(workers - 1, max(1, round(workers * share)))
    step = max(1, workers // 16)
    counts = {middle + step * offset for offset in range(-3, 4)}
    return [SplitPlan(count, workers - count) for count in sorted(counts) if 1 <= count < workers]


def _unusual(given: ReplayInput, plan: Plan, prefill_share: float) -> float:
    """How far a plan is from what would be served without a search."""
    if isinstance(plan, SplitPlan):
        return abs(plan.prefill - given.workers * prefill_share)
    if plan.step_budget_s is None:
        return 0.0
    return abs(math.log(plan.step_budget_s / _tightest_s(given)))


def _tightest_s(given: ReplayInput) -> float:
    return min(item.tpot_s for item in given.classes)


def _prefill_share(given: ReplayInput) -> float:
    """Prefill's part of the seconds that the window needs, decode at a batch that keeps its target."""
    prefill, decode = given.hardware.prefill_profile, given.hardware.decode_profile
    tightest_s = _tightest_s(given)
    mean_context = sum(a.prompt_tokens + a.output_tokens / 2 for a in given.trace) / len(given.trace)
    slope_s = decode.per_decode_sequence_s + decode.per_decode_context_s * mean_context
    batch = max(1.0, min(given.max_num_seqs, (0.8 * tightest_s - decode.base_s) / max(slope_s, 1e-12)))
    prefill_s = sum(
        prefill.per_prefill_token_s * (a.prompt_tokens - a.cached_tokens)
        + prefill.per_prefill_context_s * (a.prompt_tokens**2 - a.cached_tokens**2) / 2
        for a in given.trace
    )
    decode_s = sum(a.output_tokens for a in given.trace) * (decode.base_s / batch + slope_s)
    return prefill_s / max(prefill_s + decode_s, 1e-12)


def paired_difference(colocated: SimulationResult, split: SimulationResult) -> tuple[float, float]:
    """Mean of (split in target - colocated in target) over requests, and half its 95 % interval.

    Requests near in time share their queues, so the interval is taken from means of consecutive parts.
    """
    values = [float(split.attained(i)) - float(colocated.attained(i)) for i in range(len(split.outcomes))]
    mean = sum(values) / len(values)
    if len(values) < 2 * _BATCHES:
        return mean, 1.0
    size = len(values) / _BATCHES
    parts = [values[round(i * size) : round((i + 1) * size)] for i in range(_BATCHES)]
    means = [sum(part) / len(part) for part in parts]
    centre = sum(means) / _BATCHES
    variance = sum((item - centre) ** 2 for item in means) / (_BATCHES - 1)
    return mean, _STUDENT_95 * math.sqrt(variance / _BATCHES)


def _outcome(plan: Plan, found: SimulationResult, window_s: float) -> PlanOutcome:
    shares = [found.attainment(index) for index in range(len(found.classes))]
    return PlanOutcome(
        plan=plan,
        attainment=min(shares),
        attained_per_s=found.attainment() * len(found.outcomes) / window_s,
        meets=found.meets(),
        second_token_gap_p99_s=found.quantile("second_token_gap_s", 0.99),
        transfer_p99_s=found.quantile("transfer_s", 0.99) if isinstance(plan, SplitPlan) else 0.0,
    )


def _percent(difference: float, base: float) -> float:
    if base <= 0:
        return 0.0 if difference <= 0 else math.inf
    return 100 * difference / base
