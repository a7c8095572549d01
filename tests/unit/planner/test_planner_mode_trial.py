"""Auto with trials: whole histories of an object whose split is tried on real requests."""

import random
from dataclasses import replace

import pytest

from helpers_planner import auto_object, pools, workers
from helpers_traffic import served
from phasesplit.api.conditions import Reason
from phasesplit.api.routing import ServedMode
from phasesplit.api.v1alpha1 import Mode, TrialPolicy
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ModeDecision, ModeInput
from phasesplit.planner.traffic import ServedRequest

TICK_S = 5.0
IN_TURN = workers(prefill=1, decode=2)  # too few for both modes at once


class History:
    """An object under steady requests, of which a share meets its targets in each mode."""

    def __init__(self, split_share: float, colocated_share: float, **changes: object) -> None:
        self.given: ModeInput = auto_object(trial=TrialPolicy.ALWAYS, workers=IN_TURN, **changes)
        self.shares = {ServedMode.SPLIT: split_share, ServedMode.COLOCATED: colocated_share}
        self.requests: list[ServedRequest] = []
        self.decisions: list[ModeDecision] = []
        self._rng = random.Random(1)

    def tick(self, **changes: object) -> ModeDecision:
        """One pass; then the requests of the time until the next."""
        given = replace(self.given, requests=tuple(self.requests[-600:]), **changes)
        decision = decide_mode(given)
        share = self.shares[decision.mode]
        self.requests += [
            served(given.now_s + k * TICK_S / 7, attained=self._rng.random() < share) for k in range(7)
        ]
        self.given = replace(given, now_s=given.now_s + TICK_S, served=decision.mode, memory=decision.memory)
        self.decisions.append(decision)
        return decision

    def until(self, reason: Reason, most_s: float = 2000.0) -> ModeDecision:
        """Passes until one gives this reason."""
        for _ in range(round(most_s / TICK_S)):
            if self.tick().reason is reason:
                return self.decisions[-1]
        raise AssertionError(self.decisions[-1])


def test_a_split_that_pays_is_tried_confirmed_and_kept() -> None:
    history = History(0.95, 0.4)
    first = history.tick()
    assert (first.mode, first.reason) == (ServedMode.COLOCATED, Reason.TRIAL)
    assert (first.beneficial, first.beneficial_reason) == ("Unknown", Reason.TRIAL)
    kept = history.until(Reason.SPLIT_PAYS)
    assert kept.mode is ServedMode.SPLIT
    assert "confirmed" in kept.message
    tried = [decision.mode for decision in history.decisions if decision.reason is Reason.TRIAL]
    assert {ServedMode.SPLIT, ServedMode.COLOCATED} == set(tried)
    assert history.tick().mode is ServedMode.SPLIT
    assert kept.memory.fallbacks_at_s == ()  # windows are no oscillation


def test_a_split_that_does_not_pay_is_left_and_tried_again_ever_more_rarely() -> None:
    history = History(0.2, 0.9)
    waits = []
    for _ in range(3):
        history.until(Reason.TRIAL_FAILED, 4000)
        failed = history.decisions[-1]
        assert failed.mode is ServedMode.COLOCATED
        assert "stopped" in failed.message
        assert (failed.beneficial, failed.beneficial_reason) == ("False", Reason.TRIAL_FAILED)
        at_s = history.given.now_s
        history.until(Reason.TRIAL, 4000)
        waits.append(history.given.now_s - at_s)
    assert waits == pytest.approx([120.0, 240.0, 480.0], abs=15.0)


def test_what_ends_a_split_ends_a_trial() -> None:
    history = History(0.9, 0.9)
    history.tick()
    while history.tick().mode is not ServedMode.SPLIT:
        pass
    broken = history.tick(pools=pools(2, 0))
    assert (broken.mode, broken.reason) == (ServedMode.COLOCATED, Reason.POOL_UNAVAILABLE)
    assert broken.memory.trial is None
    assert broken.memory.trial_failures == 0
    assert history.tick(pools=pools(2, 2)).reason is Reason.DWELL


def test_a_user_who_decides_ends_the_trial() -> None:
    history = History(0.9, 0.9)
    history.tick()
    for wanted in (Mode.SPLIT, Mode.COLOCATED):
        found = decide_mode(replace(history.given, wanted=wanted))
        assert (found.mode.value, found.memory.trial) == (wanted.value, None)


def test_never_adopts_on_prediction() -> None:
    history = History(0.9, 0.9)
    history.given = replace(history.given, trial=TrialPolicy.NEVER)
    assert history.tick().reason is Reason.SPLIT_PAYS


def test_too_few_requests_are_no_failure() -> None:
    history = History(0.9, 0.9)
    history.tick()
    history.requests.clear()
    given = history.given
    while given.memory.trial is not None:
        given = replace(given, now_s=given.now_s + TICK_S)
        decision = decide_mode(given)
        given = replace(given, served=decision.mode, memory=decision.memory)
    assert decision.reason is Reason.TRIAL_FAILED
    assert "too few" in decision.message
    assert decision.memory.trial_failures == 0


def test_a_trial_that_a_restart_interrupted_is_begun_again() -> None:
    memory = replace(auto_object().memory, trial_interrupted=True)
    history = History(0.9, 0.9, served=ServedMode.SPLIT, memory=memory)
    back = history.tick()
    assert (back.mode, back.reason) == (ServedMode.COLOCATED, Reason.TRIAL_FAILED)
    assert history.until(Reason.TRIAL).memory.trial is not None
