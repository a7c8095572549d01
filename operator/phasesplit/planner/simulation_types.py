"""What the simulator is given and what it returns. Values only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from phasesplit.planner.demand import Hardware


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: lengths and time only, no text."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    class_index: int = 0
    cached_tokens: int = 0  # of the prompt, found in a prefix cache


@dataclass(frozen=True, slots=True)
class SimulatedClass:
    """Targets of one class."""

    name: str
    ttft_s: float
    tpot_s: float
    share: float = 0.95
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """So many workers of each phase."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        """Workers in all."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class ColocatedPlan:
    """So many workers that do both, with a budget of prompt tokens or of seconds per step."""

    workers: int
    chunk_tokens: int | None = None
    step_budget_s: float | None = None  # used when chunk_tokens is absent


Plan = SplitPlan | ColocatedPlan


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that loses everything it holds and is away for a while."""

    at_s: float
    worker: int  # index in the plan: prefill workers first
    down_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run: a trace on a plan."""

    trace: Sequence[Arrival]
    plan: Plan
    hardware: Hardware
    classes: tuple[SimulatedClass, ...]
    max_num_seqs: int = 64
    admission: bool = False  # refuse a request whose queueing alone would miss its TTFT target
    failures: tuple[Failure, ...] = ()
    transfer_latency_s: float = 0.002


class Outcome(IntEnum):
    """How a request ended."""

    UNFINISHED = 0
    FINISHED = 1
    REJECTED = 2


@dataclass(slots=True)
class SimulationResult:
    """Per request, in the order of the trace; NaN where it did not happen."""

    classes: tuple[SimulatedClass, ...]
    class_indexes: list[int]
    ttft_s: list[float]
    tpot_s: list[float]  # 0 for an answer of one token
    second_token_gap_s: list[float]
    transfer_s: list[float]  # from the first token until the KV has arrived
    outcomes: list[int]
    workers: int
    num_replays: int = 0
    num_events: int = 0
    end_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)

    def attained(self, index: int) -> bool:
        """Did the request meet both targets? Rejected and unfinished ones did not."""
        target = self.classes[self.class_indexes[index]]
        return (
            self.outcomes[index] == Outcome.FINISHED
            and self.ttft_s[index] <= target.ttft_s
            and self.tpot_s[index] <= target.tpot_s
        )

    def attainment(self, class_index: int | None = None, start_s: float = 0.0) -> float:
        """Share of requests that met both targets, of one class or all; 1 without requests."""
        counted = [
            index
            for index, kind in enumerate(self.class_indexes)
            if (class_index is None or kind == class_index) and self.arrivals_s[index] >= start_s
        ]
        if not counted:
            return 1.0
        return sum(self.attained(index) for index in counted) / len(counted)

    def meets(self, start_s: float = 0.0) -> bool:
        """Does every class reach its share?"""
        return all(
            self.attainment(index, start_s) >= target.share for index, target in enumerate(self.classes)
        )

    def quantile(self, what: str, share: float) -> float:
        """A quantile of `ttft_s`, `tpot_s`, `second_token_gap_s` or `transfer_s` over finished requests."""
        values: list[float] = sorted(value for value in getattr(self, what) if not math.isnan(value))
        if not values:
            return math.nan
        return values[min(len(values) - 1, int(share * len(values)))]
