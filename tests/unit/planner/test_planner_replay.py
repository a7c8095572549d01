"""Replay: the regimes it must tell apart, and the honesty of its interval."""

from dataclasses import replace

import pytest

from helpers_planner import GPU, auto_object
from helpers_traces import random_trace
from phasesplit.api.conditions import Reason
from phasesplit.api.routing import ServedMode
from phasesplit.planner.demand import Hardware
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ReplayEvidence
from phasesplit.planner.replay import ReplayInput, replay
from phasesplit.planner.simulation_types import ColocatedPlan, SimulatedClass, SplitPlan

HARDWARE = Hardware(GPU, GPU, 131_072, 300_000, 25e9)


def window(
    rate: float, prompt: float, output: float, ttft_s: float, tpot_s: float, **more: object
) -> ReplayInput:
    trace = tuple(random_trace(11, rate, 500, prompt, output))
    classes = (SimulatedClass("default", ttft_s, tpot_s, 0.9),)
    return replace(ReplayInput(trace, HARDWARE, classes, workers=4), **more)


REGIMES = {
    "tight TPOT, relaxed TTFT, long prompts": (window(2.6, 4000, 200, 16.0, 0.032), True),
    "relaxed TPOT, tight TTFT": (window(3.4, 4000, 200, 2.5, 0.25), False),
    "short prompts, decode-heavy": (window(8.0, 100, 400, 2.0, 0.032), False),
    "slow link": (
        window(2.6, 4000, 200, 16.0, 0.032, hardware=replace(HARDWARE, link_bytes_per_s=1.25e8)),
        False,
    ),
    "two workers": (window(1.2, 2000, 200, 4.0, 0.06, workers=2), False),
}


@pytest.mark.parametrize("name", REGIMES)
def test_regime_is_told(name: str) -> None:
    given, split_pays = REGIMES[name]
    found = replay(given)
    assert found is not None
    assert (found.gain_low_percent > 5.0) == split_pays, found
    assert found.gain_low_percent <= found.gain_percent <= found.gain_high_percent
    assert isinstance(found.colocated.plan, ColocatedPlan)
    assert isinstance(found.split.plan, SplitPlan)


@pytest.mark.parametrize(("link_bytes_per_s", "is_late"), [(25e9, False), (2.5e9, True)])
def test_a_busy_decode_batch_is_not_held_against_the_link(link_bytes_per_s: float, is_late: bool) -> None:
    tpot_s = 0.04
    given = window(3.5, 4000, 200, 8.0, tpot_s, hardware=replace(HARDWARE, link_bytes_per_s=link_bytes_per_s))
    found = replay(given)
    assert found is not None
    assert found.split.second_token_gap_p99_s > tpot_s
    assert (found.split.transfer_p99_s > tpot_s) == is_late


def test_same_window_same_outcome_and_too_little_to_compare() -> None:
    given = window(2.0, 1000, 50, 4.0, 0.05)
    assert replay(given) == replay(given)
    assert replay(replace(given, trace=())) is None
    assert replay(replace(given, workers=1)) is None
    few = replay(replace(given, trace=given.trace[:10]))
    assert few is not None
    assert few.gain_low_percent < -90


def test_of_equal_plans_the_most_usual_one_is_named() -> None:
    found = replay(window(0.2, 1000, 50, 30.0, 1.0))  # anything will do
    assert found is not None
    assert found.colocated.attainment == found.split.attainment == 1.0
    assert found.colocated.plan == ColocatedPlan(4, step_budget_s=1.0)
    assert found.split.plan == SplitPlan(3, 1)  # prompts are most of the work
    decoding = replay(window(0.2, 100, 400, 30.0, 1.0))
    assert decoding is not None
    assert decoding.split.attainment == 1.0
    assert decoding.split.plan == SplitPlan(1, 3)


def test_mode_follows_the_replay_where_there_is_one() -> None:
    pays, does_not = (replay(REGIMES[name][0]) for name in list(REGIMES)[:2])
    assert pays is not None
    assert does_not is not None
    split = decide_mode(auto_object(replay=ReplayEvidence(pays, 40.0)))
    assert split.mode is ServedMode.SPLIT
    assert "replayed 40 s ago" in split.message
    assert split.replay is not None
    assert decide_mode(auto_object(replay=ReplayEvidence(does_not))).reason is Reason.GAIN_TOO_SMALL


@pytest.mark.parametrize(
    ("low", "seen", "believed"),
    [(4.0, 7.0, 7.0), (0.5, 5.0, 5.0), (0.0, 9.0, 0.0), (-3.0, 9.0, -3.0), (-9.0, -4.0, -9.0)],
)
def test_a_gain_is_believed_once_its_interval_is_above_zero(low: float, seen: float, believed: float) -> None:
    found = replay(window(2.0, 1000, 50, 4.0, 0.05))
    assert found is not None
    assert replace(found, gain_low_percent=low, gain_percent=seen).believed_gain_percent == believed
