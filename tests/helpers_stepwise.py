"""One colocated worker's own scheduler under a virtual clock: what the simulator stands for, step by step."""

from collections.abc import Sequence as Values
from dataclasses import dataclass, field

from phasesplit.api.reports import StepProfile
from phasesplit.planner.simulation_types import Arrival
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.scheduling.scheduler import Scheduler, StepLimits, StepPlan
from phasesplit_worker.sequence import SamplingParams, Sequence, SequenceStatus

_BLOCK_SIZE = 16


@dataclass
class Latencies:
    """Per request of the trace, in its order."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


def serve_stepwise(trace: Values[Arrival], profile: StepProfile, limits: StepLimits) -> Latencies:
    """Every step takes exactly what the profile says; requests join between two steps."""
    tokens = sum(item.prompt_tokens + item.output_tokens for item in trace)
    scheduler = Scheduler(
        BlockManager(tokens // _BLOCK_SIZE + 4 * len(trace), _BLOCK_SIZE, b""), limits, profile
    )
    sequences: list[Sequence] = []
    now_s, finished = 0.0, 0
    while finished < len(trace):
        if not scheduler.has_work():
            now_s = max(now_s, trace[len(sequences)].at_s)
        while len(sequences) < len(trace) and trace[len(sequences)].at_s <= now_s:
            sequences.append(_sequence(len(sequences), trace[len(sequences)]))
            scheduler.add(sequences[-1])
        plan = scheduler.schedule()
        now_s += plan.predicted_s
        finished += _compute(scheduler, plan, now_s)
    return _latencies(trace, sequences)


def _sequence(index: int, arrival: Arrival) -> Sequence:
    start = index * 1_000_000  # no shared prefixes
    return Sequence(
        request_id=f"{index:06}",
        prompt_token_ids=tuple(range(start, start + arrival.prompt_tokens)),
        sampling=SamplingParams(max_tokens=arrival.output_tokens),
        seed=0,
        arrival_s=arrival.at_s,
    )


def _compute(scheduler: Scheduler, plan: StepPlan, now_s: float) -> int:
    """What the engine does after a step; gives how many sequences have ended."""
    ended = 0
    for sequence, count in plan.scheduled:
        sequence.num_computed_tokens += count
        if sequence.num_pending_tokens:
            continue
        sequence.output_token_ids.append(0)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        if len(sequence.output_token_ids) >= sequence.sampling.max_tokens:
            sequence.finished_s = now_s
            scheduler.remove(sequence, SequenceStatus.FINISHED)
            ended += 1
    return ended


def _latencies(trace: Values[Arrival], sequences: Values[Sequence]) -> Latencies:
    found = Latencies()
    for arrival, sequence in zip(trace, sequences, strict=True):
        first_s, last_s = sequence.first_token_s or 0.0, sequence.finished_s or 0.0
        found.ttft_s.append(first_s - arrival.at_s)
        found.tpot_s.append((last_s - first_s) / max(1, arrival.output_tokens - 1))
    return found
