"""Trials of both modes at once: who serves what, what is counted, how they end."""

import random
from dataclasses import replace

import pytest

from helpers_planner import auto_object, workers
from helpers_traffic import served
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Role
from phasesplit.api.routing import ServedMode
from phasesplit.api.v1alpha1 import TrialPolicy
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.traffic import ServedRequest
from phasesplit.planner.trial import start_trial
from phasesplit.planner.trial_halves import Halves, advance_halves, plan_halves
from phasesplit.planner.trial_types import TrialStep, TrialVerdict


def counts(halves: Halves | None) -> tuple[int, int, int]:
    """Workers by role: prefill, decode, colocated."""
    assert halves is not None
    roles = [role for _, role in halves.roles]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.COLOCATED)


CELLS = {
    "two and two": ((2, 2), 0.5, (1, 1, 2)),
    "eight, mostly decode": ((4, 4), 0.25, (1, 3, 4)),
    "eight, mostly prefill": ((4, 4), 0.75, (3, 1, 4)),
    "few prefill workers": ((1, 7), 0.75, (1, 3, 4)),
    "few decode workers": ((7, 1), 0.2, (3, 1, 4)),
    "an odd number": ((3, 2), 0.5, (1, 1, 3)),
}


@pytest.mark.parametrize("name", CELLS)
def test_half_of_the_workers_are_split(name: str) -> None:
    (prefill, decode), share, expected = CELLS[name]
    halves = plan_halves("t", workers(prefill=prefill, decode=decode), share)
    assert counts(halves) == expected
    assert halves is not None
    assert halves.split_share == pytest.approx(sum(expected[:2]) / sum(expected))
    for pod, role in halves.roles:
        assert role is not Role.PREFILL or "prefill" in pod
        assert role is not Role.DECODE or "decode" in pod


def test_too_few_workers_are_not_divided() -> None:
    assert plan_halves("t", workers(prefill=1, decode=2), 0.5) is None
    assert plan_halves("t", workers(prefill=4, decode=0), 0.5) is None


def run(
    split_share: float, colocated_share: float, seed: int, *, silent: bool = False
) -> tuple[TrialStep, float]:
    """A whole trial at one request per second."""
    rng = random.Random(seed)
    trial = replace(start_trial(0.0, 1.0, [served(0.0)]), prefill_share=0.5)
    known: list[ServedRequest] = []
    now_s = 0.0
    while now_s < 5000:
        step = advance_halves(trial, known, now_s)
        trial = step.trial
        if step.verdict is not TrialVerdict.RUNNING:
            return step, now_s
        now_s += 2.0
        for _ in range(2):
            drawn = rng.random() < 0.5
            attained = rng.random() < (split_share if drawn else colocated_share)
            if not (silent and drawn):
                known.append(served(now_s - 1.0, drawn=drawn, attained=attained))
    raise AssertionError("the trial does not end")


OUTCOMES = {
    "better": (0.95, 0.5, False, TrialVerdict.CONFIRMED),
    "worse": (0.3, 0.9, False, TrialVerdict.STOPPED),
    "equal": (0.9, 0.9, False, TrialVerdict.REFUTED),
    "silent": (1.0, 0.9, True, TrialVerdict.STOPPED),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_trial_of_halves_tells_the_better_mode(name: str) -> None:
    split, colocated, silent, verdict = OUTCOMES[name]
    for seed in range(4):
        step, took_s = run(split, colocated, seed, silent=silent)
        assert step.verdict is verdict, (seed, step.reading)
        assert took_s < 8 * step.trial.window_s


def test_a_clear_gain_ends_the_trial_once_each_mode_has_thirty_answers() -> None:
    took = [run(1.0, 0.4, seed) for seed in range(6)]
    assert all(step.verdict is TrialVerdict.CONFIRMED for step, _ in took)
    assert all(took_s < 2.5 * step.trial.window_s for step, took_s in took)  # of some twenty answers each
    assert all(step.reading.split.counted >= 30 for step, _ in took)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_equal_modes_are_hardly_ever_confirmed(share: float) -> None:
    verdicts = [run(share, share, seed)[0].verdict for seed in range(40)]
    assert verdicts.count(TrialVerdict.CONFIRMED) <= 4  # three looks at 2.5 % each, and the early ones


def test_requests_that_were_not_drawn_do_not_count() -> None:
    trial = replace(start_trial(0.0, 1.0, []), prefill_share=0.5)
    known = [served(trial.skip_s + 1.0), served(trial.skip_s + 1.0, drawn=True)]
    reading = advance_halves(trial, known, trial.skip_s + 5.0).reading
    assert (reading.split.counted, reading.colocated.counted) == (1, 0)


def test_auto_with_four_workers_serves_both_modes_until_one_is_better() -> None:
    rng = random.Random(2)
    given = auto_object(trial=TrialPolicy.ALWAYS)
    known: list[ServedRequest] = []
    reasons = []
    for _ in range(200):
        decision = decide_mode(replace(given, requests=tuple(known)))
        reasons.append(decision.reason)
        if decision.reason is Reason.TRIAL:
            assert decision.mode is ServedMode.COLOCATED
            assert counts(decision.halves) == (1, 1, 2)
        if decision.reason is Reason.SPLIT_PAYS:
            break
        given = replace(given, now_s=given.now_s + 5.0, served=decision.mode, memory=decision.memory)
        for _ in range(6):
            drawn = rng.random() < 0.5
            known.append(served(given.now_s - 2.0, drawn=drawn, attained=rng.random() < 0.4 + 0.5 * drawn))
    assert reasons[0] is Reason.TRIAL
    assert reasons[-1] is Reason.SPLIT_PAYS
    assert decision.mode is ServedMode.SPLIT
    assert decision.halves is None


def test_a_trial_of_halves_ends_when_workers_go() -> None:
    given = auto_object(trial=TrialPolicy.ALWAYS)
    first = decide_mode(given)
    fewer = replace(given, memory=first.memory, workers=workers(prefill=2, decode=1), now_s=given.now_s + 5.0)
    ended = decide_mode(fewer)
    assert (ended.reason, ended.halves) == (Reason.TRIAL_FAILED, None)
    assert ended.memory.trial_failures == 0
