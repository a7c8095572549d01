"""When a window is replayed, what goes into it, and for how long the answer holds."""

from dataclasses import replace

import pytest

from helpers_planner import GPU, auto_object, pools
from helpers_traces import random_trace
from helpers_traffic import served, served_trace
from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import Mode
from phasesplit.planner.mode_types import ModeInput
from phasesplit.planner.replay import replay
from phasesplit.planner.replay_schedule import (
    CHANGED_EVERY_S,
    EVERY_S,
    MAX_AGE_S,
    ReplayMark,
    ReplayRecord,
    build_replay,
    is_due,
    mark_of,
    may_ask,
    tuned_step_s,
    usable,
)
from phasesplit.planner.simulation_types import ColocatedPlan
from phasesplit.planner.traffic import MAX_REQUESTS, replay_window

TRACE = random_trace(3, 1.3, 200, 4000, 200)
SERVED = served_trace(TRACE, 1000.0)
NOW_S = 1000.0 + TRACE[-1].at_s + 10.0
GIVEN = auto_object(now_s=NOW_S)


def mark(given: ModeInput = GIVEN, **changes: object) -> ReplayMark:
    job = build_replay(given, SERVED)
    assert job is not None
    return replace(mark_of(given, job), **changes)


def test_the_window_holds_what_has_settled_and_no_text() -> None:
    window = replay_window(SERVED, GIVEN.classes, NOW_S)
    assert len(window) == 200
    assert window[0].at_s == 0.0
    assert window[5].prompt_tokens == TRACE[5].prompt_tokens
    # Of the newest arrivals only those with short answers have ended.
    assert len(replay_window(SERVED, GIVEN.classes, NOW_S - 20.0)) < 200
    many = [served(float(index) / 100) for index in range(3 * MAX_REQUESTS)]
    assert len(replay_window(many, GIVEN.classes, many[-1].at_s + 10)) == MAX_REQUESTS


def test_a_job_has_the_measured_hardware_and_every_class() -> None:
    job = build_replay(GIVEN, SERVED)
    assert job is not None
    assert (job.workers, job.hardware.prefill_profile, job.classes[0].share) == (4, GPU, 0.95)
    assert job.max_num_seqs == 64
    told = (replace(GIVEN.workers[0], max_num_seqs=8), *GIVEN.workers[1:])
    limited = build_replay(replace(GIVEN, workers=told), SERVED)
    assert limited is not None and limited.max_num_seqs == 8
    assert build_replay(GIVEN, SERVED[:30]) is None
    assert build_replay(replace(GIVEN, profiles={}), SERVED) is None


QUESTIONS = {
    "profile is a guess": {
        "profiles": {Pool.PREFILL: GPU.model_copy(update={"guessed": True}), Pool.DECODE: GPU}
    },
    "one worker": {"pools": pools(1, 0)},
    "model unknown": {"kv_bytes_per_token": None},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_nothing_is_asked_that_cannot_be_answered(name: str) -> None:
    assert may_ask(GIVEN, None)
    assert not may_ask(replace(GIVEN, **QUESTIONS[name]), None)


DUE: dict[str, tuple[float, dict[str, object], bool]] = {
    "same question, fresh": (EVERY_S - 1, {}, False),
    "same question, old": (EVERY_S, {}, True),
    "load doubled": (CHANGED_EVERY_S, {"rate_per_s": 0.6}, True),
    "load doubled a moment ago": (CHANGED_EVERY_S - 1, {"rate_per_s": 0.6}, False),
    "load a little higher": (CHANGED_EVERY_S, {"rate_per_s": 1.2}, False),
    "prompts longer": (CHANGED_EVERY_S, {"prompt_tokens": 1000.0}, True),
    "the link got slower": (CHANGED_EVERY_S, {"link_bytes_per_s": 1e12}, True),
    "many more requests": (CHANGED_EVERY_S, {"requests": 70}, True),
}


@pytest.mark.parametrize("name", DUE)
def test_old_evidence_or_another_load_asks_again(name: str) -> None:
    later_s, before, due = DUE[name]
    now = mark()
    last = replace(now, started_s=now.started_s - later_s, **before)
    assert is_due(Mode.AUTO, now, last) == due


def test_advice_is_asked_for_more_rarely() -> None:
    now = mark()
    last = replace(now, started_s=now.started_s - EVERY_S)
    assert not is_due(Mode.SPLIT, now, last)
    assert is_due(Mode.SPLIT, now, None)


def test_an_answer_holds_for_its_terms_and_its_time() -> None:
    job = build_replay(GIVEN, SERVED)
    assert job is not None
    record = ReplayRecord(mark(), replay(job))
    fresh = usable(record, replace(GIVEN, now_s=NOW_S + 40.0))
    assert fresh is not None
    assert fresh.age_s == 40.0
    assert usable(record, replace(GIVEN, now_s=NOW_S + MAX_AGE_S + 1)) is None
    assert usable(record, replace(GIVEN, pools=pools(3, 2))) is None
    assert usable(record, replace(GIVEN, chunk_tokens=64)) is None
    assert usable(replace(record, outcome=None), GIVEN) is None
    assert usable(None, GIVEN) is None


def test_the_tuned_step_holds_for_the_same_workers_and_targets_only() -> None:
    job = build_replay(GIVEN, SERVED)
    assert job is not None
    outcome = replay(job)
    assert outcome is not None
    record = ReplayRecord(mark(), outcome)
    assert isinstance(outcome.colocated.plan, ColocatedPlan)
    found_s = outcome.colocated.plan.step_budget_s
    assert found_s is not None
    assert tuned_step_s(record, GIVEN) == min(found_s, GIVEN.classes[0].tpot_s)
    later = replace(GIVEN, now_s=NOW_S + 10 * MAX_AGE_S)
    assert tuned_step_s(record, later) == tuned_step_s(record, GIVEN)
    assert tuned_step_s(record, replace(GIVEN, pools=pools(3, 3))) is None
    assert tuned_step_s(ReplayRecord(mark(), error="no answer"), GIVEN) is None
    assert tuned_step_s(None, GIVEN) is None
    own = replace(GIVEN, chunk_tokens=64)
    given = build_replay(own, SERVED)
    assert given is not None
    assert tuned_step_s(ReplayRecord(mark(own), replay(given)), own) is None  # the user's own budget stands
