"""`status.evidence`: which evidence, how sure, what is in the way, what would turn the answer."""

from dataclasses import replace

from helpers_planner import auto_object, link, split_object
from helpers_traces import random_trace
from helpers_traffic import served_trace
from phasesplit.api.status import EvidenceSource
from phasesplit.operator.evidence_status import ReplayNews, build_evidence
from phasesplit.planner.flips import Flip
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ModeMemory, ReplayEvidence
from phasesplit.planner.replay import replay
from phasesplit.planner.replay_schedule import build_replay
from phasesplit.planner.trial_types import Part, TrialReading

TRACE = random_trace(3, 1.3, 100, 4000, 200)
GIVEN = auto_object(now_s=1000.0 + TRACE[-1].at_s + 10)
FLIP = Flip("load", 0.5, "Colocated with 1 requests/s instead of 2")


def replayed() -> ReplayEvidence:
    job = build_replay(GIVEN, served_trace(TRACE, 1000.0))
    assert job is not None
    outcome = replay(job)
    assert outcome is not None
    return ReplayEvidence(outcome, 40.0)


def test_a_replay_is_shown_with_its_interval_and_time() -> None:
    decision = decide_mode(replace(GIVEN, replay=replayed()))
    shown = build_evidence(decision, ReplayNews((FLIP,)), GIVEN.now_s)
    assert shown is not None
    assert (shown.source, shown.requests, shown.replayed_at) == (
        EvidenceSource.REPLAY,
        100,
        "1970-01-01T00:17:27Z",
    )
    assert shown.gain_low_percent is not None
    assert shown.gain_high_percent is not None
    assert shown.gain_low_percent < shown.gain_high_percent
    assert [flip.what for flip in shown.flips] == ["load"]
    assert len(shown.checks) == 11


def test_before_anything_is_known_the_list_is_shown() -> None:
    shown = build_evidence(decide_mode(auto_object(loads=(), profiles={}, links=())), ReplayNews(), 0.0)
    assert shown is not None
    assert (shown.source, shown.split) == (None, None)
    assert not all(check.passed for check in shown.checks)


def test_a_closed_form_is_shown_as_such_and_without_a_replays_flips() -> None:
    shown = build_evidence(decide_mode(GIVEN), ReplayNews((FLIP,), "a replay took over 30 s"), 0.0)
    assert shown is not None
    assert (shown.source, shown.gain_low_percent, shown.flips) == (EvidenceSource.CLOSED_FORM, None, [])
    assert shown.problem == "a replay took over 30 s"


def test_a_link_below_need_says_what_would_do() -> None:
    shown = build_evidence(decide_mode(split_object(links=link(47))), ReplayNews(), 0.0)
    assert shown is not None
    (flip,) = shown.flips
    assert flip.what == "link"
    assert flip.factor > 1
    assert "instead of 47 Mbit/s" in flip.message
    assert any(not check.passed and "47 Mbit/s" in check.message for check in shown.checks)


def test_a_trial_is_shown_while_it_runs_and_after_it_failed() -> None:
    reading = TrialReading(Part(40, 10), Part(50, 45), -0.65, -0.8, -0.5)
    memory = ModeMemory(
        trial_reading=reading, trial_failures=2, trial_not_before_s=0.0, trial_message="stopped"
    )
    decision = replace(decide_mode(split_object()), memory=memory)
    shown = build_evidence(decision, ReplayNews(), 0.0)
    assert shown is not None
    assert shown.trial is not None
    assert (shown.trial.running, shown.trial.failures, shown.trial.message) == (False, 2, "stopped")
    assert shown.trial.split is not None
    assert (shown.trial.split.requests, shown.trial.split.attained) == (40, 10)
    assert shown.trial.difference_percent_points == -65
