"""A regime served both ways: what the planner decides on it, and whether it was right. Pure.

Builds the same situation that the operator hands to the planner, from results of requests that were served.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from helpers_truth import Shape
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode
from phasesplit.planner.evidence import build_hardware
from phasesplit.planner.facts import LinkFacts, LoadFacts, WorkerFacts
from phasesplit.planner.links import judge_links
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import (
    ModeDecision,
    ModeInput,
    ModeMemory,
    PoolPresence,
    ReplayEvidence,
)
from phasesplit.planner.replay import ReplayInput, ReplayOutcome, replay
from phasesplit.planner.simulation_types import Arrival, SimulatedClass, SplitPlan
from phasesplit_bench.client import Result
from phasesplit_bench.summary import is_attained, quantile

EITHER = 0.05  # modes closer than this are equally right


@dataclass(frozen=True, slots=True)
class Regime:
    """Load, targets and link, and what the literature expects of them."""

    name: str
    shape: Shape
    ttft_s: float
    tpot_s: float
    expected: ServedMode
    link_bytes_per_s: float

    @property
    def target(self) -> LatencyClass:
        return LatencyClass(name="default", ttft_s=self.ttft_s, tpot_s=self.tpot_s)


@dataclass(frozen=True, slots=True)
class Served:
    """What one mode did with the trace."""

    attained: float  # share of requests
    ttft_p90_s: float
    tpot_p90_s: float

    @classmethod
    def of(cls, results: Sequence[Result], regime: Regime) -> "Served":
        finished = [result for result in results if result.is_finished]
        return cls(
            mean(is_attained(result, regime.ttft_s, regime.tpot_s) for result in results),
            quantile([result.ttft_s for result in finished if result.ttft_s is not None], 90) or 0.0,
            quantile([result.tpot_s for result in finished if result.tpot_s is not None], 90) or 0.0,
        )


def advantage(one: float, other: float) -> float:
    """Of one share over another, as a share of the lesser; 0 when both are nothing."""
    least = min(one, other)
    if least == 0:
        return float("inf") if one > 0 else -float(other > 0) * 1e9
    return (one - other) / least


def is_right(chose_split: bool, split: float, colocated: float) -> bool:
    """Did the chosen mode keep more in target, or do both keep about the same?"""
    gain = advantage(split, colocated)
    return abs(gain) <= EITHER or chose_split == (gain > 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One regime: decision and measurement."""

    regime: Regime
    decision: ModeDecision
    outcome: ReplayOutcome
    colocated: Served
    split: Served
    waited_share: float = 0.0  # of the time, for a processor, in the worse of the two runs

    @property
    def plan(self) -> SplitPlan:
        return split_plan(self.outcome)

    @property
    def advantage(self) -> float:
        """Of the split over colocated."""
        return advantage(self.split.attained, self.colocated.attained)

    @property
    def right(self) -> bool:
        chose_split = self.decision.mode is ServedMode.SPLIT
        return is_right(chose_split, self.split.attained, self.colocated.attained)


def split_plan(outcome: ReplayOutcome) -> SplitPlan:
    """The ratio that the replay found best."""
    if not isinstance(outcome.split.plan, SplitPlan):
        raise TypeError("the best split of a replay is a split")
    return outcome.split.plan


def load_of(results: Sequence[Result], regime: Regime) -> LoadFacts:
    """The window as the routers' reports would sum it up."""
    finished = [result for result in results if result.is_finished]
    prompts = sorted(result.prompt_tokens for result in finished)
    return LoadFacts(
        arrival_rate_per_s=len(results) / max(result.start_s for result in results),
        mean_prompt_tokens=mean(prompts),
        p95_prompt_tokens=prompts[int(0.95 * len(prompts))],
        mean_output_tokens=mean(result.output_tokens for result in finished),
        attainment=Served.of(results, regime).attained,
        finished=len(finished),
    )


def situation(
    results: Sequence[Result],
    regime: Regime,
    workers: Sequence[WorkerFacts],
    links: Sequence[LinkFacts],
) -> ModeInput:
    """An object in mode Auto that serves colocated, as the operator would hand it to the planner."""
    of_pool = {pool: [worker for worker in workers if worker.pool is pool] for pool in Pool}
    profiles = {pool: profile for pool in Pool if (profile := of_pool[pool][0].profile) is not None}
    return ModeInput(
        now_s=1000.0,
        wanted=Mode.AUTO,
        fallback=Fallback.ALWAYS,
        served=ServedMode.COLOCATED,
        pools={
            pool: PoolPresence(pool, desired=len(found), ready=len(found)) for pool, found in of_pool.items()
        },
        classes=(regime.target,),
        loads=(load_of(results, regime),),
        workers=tuple(workers),
        links=tuple(links),
        profiles=profiles,
        kv_bytes_per_token=workers[0].kv_bytes_per_token,
        dwell_s=60.0,
        memory=ModeMemory(since_s=0.0),
    )


def decide(
    given: ModeInput, window: tuple[Arrival, ...], regime: Regime
) -> tuple[ModeDecision, ReplayOutcome]:
    """Replay the window that was served, and decide."""
    hardware = build_hardware(given, judge_links(given))
    target = SimulatedClass("default", regime.ttft_s, regime.tpot_s)
    if hardware is None:
        raise RuntimeError("the workers have reported no step profile")
    outcome = replay(ReplayInput(window, hardware, (target,), len(given.workers)))
    if outcome is None:
        raise RuntimeError("nothing was served")
    given = replace(given, replay=ReplayEvidence(outcome, 1.0))
    return decide_mode(given), outcome
