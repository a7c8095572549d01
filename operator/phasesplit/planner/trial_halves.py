"""Both modes at once, each on half of the workers, with requests drawn by the routers.

Periods take the place of windows: each gives one part of both modes under the same load. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool, Role
from phasesplit.planner.facts import WorkerFacts
from phasesplit.planner.traffic import ServedRequest
from phasesplit.planner.trial import (
    MIN_WINDOW_REQUESTS,
    PARTS,
    drops_clearly,
    gains_clearly,
    judge,
    read_trial,
)
from phasesplit.planner.trial_types import Part, Trial, TrialStep, TrialVerdict, Window

MIN_WORKERS = 4
LOOK_EVERY = 2  # periods; every look is a chance to be wrong, so there are three
_SILENT_SHARE = 0.25  # of the answers of the other mode
# So many times the usual duration of an answer after a period its requests have ended, slow ones included.
_SETTLED_AFTER = 2.0


@dataclass(frozen=True, slots=True)
class Halves:
    """Who serves what: roles of every worker, and the split's share of them."""

    id: str
    roles: tuple[tuple[str, Role], ...]
    split_share: float


def plan_halves(trial_id: str, workers: Sequence[WorkerFacts], prefill_share: float) -> Halves | None:
    """Half of the workers in two roles, in the best ratio that the pools allow; None with too few."""
    pods = {
        pool: sorted(worker.pod for worker in workers if worker.pool is pool and worker.ready)
        for pool in Pool
    }
    prefill, decode = pods[Pool.PREFILL], pods[Pool.DECODE]
    count = len(prefill) + len(decode)
    if count < MIN_WORKERS or not prefill or not decode:
        return None
    size = count // 2
    wanted = max(1, min(size - 1, round(size * prefill_share)))
    first = min(max(wanted, size - len(decode), 1), len(prefill), size - 1)
    if not 1 <= size - first <= len(decode):
        return None
    roles = dict.fromkeys((*prefill, *decode), Role.COLOCATED)
    roles |= dict.fromkeys(prefill[:first], Role.PREFILL)
    roles |= dict.fromkeys(decode[: size - first], Role.DECODE)
    return Halves(trial_id, tuple(sorted(roles.items())), size / count)


def advance_halves(trial: Trial, requests: Sequence[ServedRequest], now_s: float) -> TrialStep:
    """Where the trial stands now; it serves both modes until it ends."""
    current = _period(trial, requests, trial.window_started_s, now_s)
    before: tuple[Window, ...] = ()
    if trial.index > 0:
        started_s = trial.window_started_s - trial.window_s
        before = _period(trial, requests, started_s, trial.window_started_s)
    reading = read_trial([*trial.windows, *before, *current])
    if drops_clearly(reading) or _is_silent([*before, *current]):
        return TrialStep(TrialVerdict.STOPPED, False, reading, trial)
    if before and now_s >= trial.window_started_s + _SETTLED_AFTER * trial.skip_s:
        ended = read_trial([*trial.windows, *before])
        if gains_clearly(ended):
            return TrialStep(TrialVerdict.CONFIRMED, True, ended, trial)
    if now_s < trial.window_started_s + trial.window_s:
        return TrialStep(TrialVerdict.RUNNING, False, reading, trial)
    windows = (*trial.windows, *before)
    if any(window.total.counted < MIN_WINDOW_REQUESTS for window in before):
        return TrialStep(TrialVerdict.STARVED, False, reading, trial)
    periods = len(windows) // 2
    if periods and periods % LOOK_EVERY == 0 and before:
        reading = read_trial(windows)
        verdict = judge(reading, periods // LOOK_EVERY)
        if verdict is not TrialVerdict.RUNNING:
            return TrialStep(verdict, verdict is TrialVerdict.CONFIRMED, reading, trial)
    moved = replace(trial, index=trial.index + 1, window_started_s=now_s, windows=windows)
    return TrialStep(TrialVerdict.RUNNING, False, reading, moved)


def _is_silent(windows: Sequence[Window]) -> bool:
    """Do the split's answers fail to come while the others do?"""
    counted = {
        split: sum(window.total.counted for window in windows if window.split is split)
        for split in (True, False)
    }
    expected = counted[False]
    return expected >= 4 * MIN_WINDOW_REQUESTS and counted[True] < _SILENT_SHARE * expected


def _period(
    trial: Trial, requests: Sequence[ServedRequest], started_s: float, until_s: float
) -> tuple[Window, Window]:
    """The parts of both modes in one period, by arrival and by the draw, whoever served them."""
    # Requests from before the trial run for a while beside those of the first period.
    first_s = started_s + (trial.skip_s if started_s < trial.started_s + trial.skip_s else 0.0)
    length_s = max(1e-9, trial.window_s - (first_s - started_s))
    counted = {split: [0] * PARTS for split in (True, False)}
    attained = {split: [0] * PARTS for split in (True, False)}
    for request in requests:
        if request.drawn is None or not request.counted or not first_s <= request.at_s < until_s:
            continue
        part = min(PARTS - 1, math.floor((request.at_s - first_s) / length_s * PARTS))
        counted[request.drawn][part] += 1
        attained[request.drawn][part] += request.attained
    split, colocated = (
        Window(kind, tuple(Part(c, a) for c, a in zip(counted[kind], attained[kind], strict=True)))
        for kind in (True, False)
    )
    return split, colocated
