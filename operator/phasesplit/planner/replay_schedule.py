"""When a window is worth serving again, and how long the answer may be used. Pure.

A replay answers for one set of workers, targets and settings; another set is another question.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.api.routing import LatencyClass
from phasesplit.api.v1alpha1 import Mode
from phasesplit.planner.evidence import build_hardware, is_measured
from phasesplit.planner.flips import Flip
from phasesplit.planner.links import judge_links
from phasesplit.planner.mode_types import ModeInput, ReplayEvidence
from phasesplit.planner.replay import USUAL_MAX_NUM_SEQS, ReplayInput, ReplayOutcome
from phasesplit.planner.simulation_types import ColocatedPlan, SimulatedClass
from phasesplit.planner.traffic import MIN_REQUESTS, ServedRequest, replay_window

EVERY_S = 300.0
EVERY_ADVICE_S = 1800.0  # where the user decides the mode, the answer is advice
CHANGED_EVERY_S = 60.0  # when the load is another one
MAX_AGE_S = 900.0
# Load, lengths or links beyond these factors of what was replayed ask for a new answer.
_LOAD_CHANGE = 1.4
_LINK_CHANGE = 2.0
_MORE_REQUESTS = 2.0  # a window grown so much narrows the interval


@dataclass(frozen=True, slots=True)
class ReplayTerms:
    """What must be the same for an answer to hold."""

    classes: tuple[LatencyClass, ...]
    workers: int
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True)
class ReplayMark:
    """What was asked, to tell whether it is still the question."""

    started_s: float
    terms: ReplayTerms
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    link_bytes_per_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """The last replay of an object, failed ones included."""

    mark: ReplayMark
    outcome: ReplayOutcome | None = None
    flips: tuple[Flip, ...] = ()
    error: str = ""


def terms_of(given: ModeInput) -> ReplayTerms:
    """The terms of now."""
    workers = sum(pool.ready for pool in given.pools.values())
    return ReplayTerms(given.classes, workers, given.chunk_tokens)


def may_ask(given: ModeInput, last: ReplayMark | None) -> bool:
    """Cheap, for every pass: could a replay be due at all?"""
    if last is not None and given.now_s - last.started_s < CHANGED_EVERY_S:
        return False
    return is_measured(given) and terms_of(given).workers >= 2


def build_replay(given: ModeInput, requests: Sequence[ServedRequest]) -> ReplayInput | None:
    """The window with what it is to be served on; None when there is too little to say anything."""
    hardware = build_hardware(given, judge_links(given))
    trace = replay_window(requests, given.classes, given.now_s)
    if hardware is None or len(trace) < MIN_REQUESTS:
        return None
    classes = tuple(
        SimulatedClass(item.name, item.ttft_s, item.tpot_s, item.percentile / 100, item.priority)
        for item in given.classes
    )
    terms = terms_of(given)
    limits = [worker.max_num_seqs for worker in given.workers if worker.max_num_seqs > 0]
    return ReplayInput(
        trace,
        hardware,
        classes,
        terms.workers,
        terms.chunk_tokens,
        max_num_seqs=min(limits, default=USUAL_MAX_NUM_SEQS),
    )


def mark_of(given: ModeInput, job: ReplayInput) -> ReplayMark:
    """What is asked by this job."""
    trace = job.trace
    span_s = max(trace[-1].at_s - trace[0].at_s, 1.0)
    return ReplayMark(
        started_s=given.now_s,
        terms=terms_of(given),
        rate_per_s=len(trace) / span_s,
        prompt_tokens=_mean([arrival.prompt_tokens for arrival in trace]),
        output_tokens=_mean([arrival.output_tokens for arrival in trace]),
        link_bytes_per_s=job.hardware.link_bytes_per_s,
        requests=len(trace),
    )


def is_due(wanted: Mode, now: ReplayMark, last: ReplayMark | None) -> bool:
    """Old evidence, or another question."""
    if last is None:
        return True
    waited_s = now.started_s - last.started_s
    if waited_s >= (EVERY_S if wanted is Mode.AUTO else EVERY_ADVICE_S):
        return True
    return waited_s >= CHANGED_EVERY_S and _is_other(now, last)


def usable(record: ReplayRecord | None, given: ModeInput) -> ReplayEvidence | None:
    """The last outcome while it still answers for what is served now."""
    if record is None or record.outcome is None:
        return None
    age_s = max(0.0, given.now_s - record.mark.started_s)
    if age_s > MAX_AGE_S or record.mark.terms != terms_of(given):
        return None
    return ReplayEvidence(record.outcome, age_s)


def tuned_step_s(record: ReplayRecord | None, given: ModeInput) -> float | None:
    """Longest step of colocated workers that served the last window best; None: nothing was searched.

    It holds until another replay says otherwise, so that a table does not change for want of traffic.
    """
    if record is None or record.outcome is None or record.mark.terms != terms_of(given):
        return None
    plan = record.outcome.colocated.plan
    return plan.step_budget_s if isinstance(plan, ColocatedPlan) else None


def _is_other(now: ReplayMark, last: ReplayMark) -> bool:
    return (
        now.terms != last.terms
        or now.requests >= _MORE_REQUESTS * last.requests
        or not _about(now.rate_per_s, last.rate_per_s, _LOAD_CHANGE)
        or not _about(now.prompt_tokens, last.prompt_tokens, _LOAD_CHANGE)
        or not _about(now.output_tokens, last.output_tokens, _LOAD_CHANGE)
        or not _about(now.link_bytes_per_s, last.link_bytes_per_s, _LINK_CHANGE)
    )


def _about(one: float, other: float, factor: float) -> bool:
    if math.isinf(one) or math.isinf(other):
        return one == other
    return other / factor < one < other * factor


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
