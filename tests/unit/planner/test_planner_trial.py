"""Trials: alternating windows, confirmed at 95 %, ended by a clear drop, repeated ever more rarely."""

import random

import pytest

from helpers_traffic import served
from phasesplit.planner.traffic import ServedRequest
from phasesplit.planner.trial import (
    LONGEST_BACKOFF_S,
    LONGEST_S,
    SHORTEST_S,
    advance_trial,
    backoff_s,
    is_split,
    read_trial,
    start_trial,
)
from phasesplit.planner.trial_types import Part, Trial, TrialStep, TrialVerdict, Window

RATE_PER_S = 1.0
TICK_S = 2.0


def run(
    split_share: float,
    colocated_share: float,
    *,
    seed: int = 1,
    rate_per_s: float = RATE_PER_S,
    duration_s: float = 2.0,
    drift_per_s: float = 0.0,
) -> tuple[TrialStep, list[bool], float]:
    """A whole trial: the last step, the mode of every tick, and how long it took."""
    rng = random.Random(seed)
    trial: Trial = start_trial(0.0, rate_per_s, [served(0.0, e2e_s=duration_s)])
    known: list[ServedRequest] = []
    coming: list[ServedRequest] = []
    now_s, modes = 0.0, []
    while now_s < 20_000:
        step = advance_trial(trial, known, now_s)
        trial = step.trial
        modes.append(step.split)
        if step.verdict is not TrialVerdict.RUNNING:
            return step, modes, now_s
        share = (split_share if step.split else colocated_share) + drift_per_s * now_s
        arrivals = sum(rng.random() < rate_per_s * TICK_S / 8 for _ in range(8))
        coming += [
            served(now_s + rng.random() * TICK_S, split=step.split, attained=rng.random() < share)
            for _ in range(arrivals)
        ]
        now_s += TICK_S
        known += [request for request in coming if request.at_s + duration_s <= now_s]
        coming = [request for request in coming if request.at_s + duration_s > now_s]
    raise AssertionError("the trial does not end")


def test_windows_alternate_so_that_drift_cancels() -> None:
    assert [is_split(index) for index in range(9)] == [
        False, True, True, False, False, True, True, False, False,
    ]  # fmt: skip


OUTCOMES = {
    "clearly better": (0.95, 0.6, {}, TrialVerdict.CONFIRMED),
    "clearly worse": (0.3, 0.9, {}, TrialVerdict.STOPPED),
    "equal": (0.9, 0.9, {}, TrialVerdict.REFUTED),
    "both perfect": (1.0, 1.0, {}, TrialVerdict.REFUTED),
    "better while everything gets worse": (0.98, 0.75, {"drift_per_s": -3e-4}, TrialVerdict.CONFIRMED),
    "nothing comes": (1.0, 1.0, {"rate_per_s": 0.01}, TrialVerdict.STARVED),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_trial_tells_the_better_mode(name: str) -> None:
    split, colocated, more, verdict = OUTCOMES[name]
    for seed in range(3):
        step, modes, _ = run(split, colocated, seed=seed, **more)
        assert step.verdict is verdict, (seed, step.reading)
        assert step.split is (verdict is TrialVerdict.CONFIRMED)
        assert modes[0] is False


def test_a_drop_ends_the_first_split_window_early() -> None:
    step, modes, took_s = run(0.05, 0.95)
    assert step.verdict is TrialVerdict.STOPPED
    assert sum(modes) * TICK_S < 45
    assert took_s < 120


def test_a_split_that_swallows_requests_is_stopped() -> None:
    trial = start_trial(0.0, RATE_PER_S, [served(0.0)])
    known = [served(float(second)) for second in range(int(trial.window_s))]
    now_s = 0.0
    while now_s < 300:
        step = advance_trial(trial, known, now_s)
        trial = step.trial
        if step.verdict is not TrialVerdict.RUNNING:
            break
        now_s += TICK_S
    assert step.verdict is TrialVerdict.STOPPED
    assert now_s < 2.2 * trial.window_s


def test_equal_modes_are_rarely_confirmed() -> None:
    confirmed = sum(run(0.8, 0.8, seed=seed)[0].verdict is TrialVerdict.CONFIRMED for seed in range(60))
    assert confirmed <= 6


def test_a_much_better_split_is_found_every_time_in_one_block() -> None:
    for seed in range(10):
        step, _, took_s = run(0.95, 0.5, seed=seed)
        assert step.verdict is TrialVerdict.CONFIRMED
        assert took_s < 5.5 * (start_trial(0.0, RATE_PER_S, []).window_s)


def test_windows_are_long_enough_for_requests_to_come_and_to_end() -> None:
    assert start_trial(0.0, 100.0, []).window_s - start_trial(0.0, 100.0, []).skip_s == SHORTEST_S
    rare = start_trial(0.0, 0.01, [])
    assert rare.window_s - rare.skip_s == LONGEST_S
    slow = start_trial(0.0, 100.0, [served(0.0, e2e_s=20.0)])
    assert (slow.window_s - slow.skip_s, slow.skip_s) == (80.0, 20.0)


def test_abandoned_requests_do_not_count() -> None:
    trial = start_trial(0.0, 1.0, [])
    known = [served(trial.skip_s + 1.0, counted=False), served(trial.skip_s + 2.0)]
    assert advance_trial(trial, known, trial.window_s - 1).reading.colocated == Part(1, 1)


def test_bursts_widen_the_interval() -> None:
    even = [Window(split, (Part(20, 10),) * 5) for split in (True, False)]
    bursts = [
        Window(split, (Part(20, 20), Part(20, 0), Part(20, 20), Part(20, 0), Part(20, 10)))
        for split in (True, False)
    ]
    assert read_trial(bursts).high > 1.5 * read_trial(even).high


def test_waits_double_up_to_a_day() -> None:
    waits = [backoff_s(failures, 600.0) for failures in range(1, 12)]
    assert waits[:3] == [1200.0, 2400.0, 4800.0]
    assert waits[-1] == LONGEST_BACKOFF_S
