"""`Auto` over whole passes of the operator: closed form, replay, then a trial that switches the table."""

from helpers_tick import BusyObject
from helpers_traffic import batch
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Role
from phasesplit.api.routing import ServedMode
from phasesplit.operator.evidence_status import ReplayNews, build_evidence
from phasesplit.operator.situation import Decisions
from phasesplit.planner.replay_schedule import tuned_step_s
from phasesplit.planner.simulation_types import ColocatedPlan


def begin_trial() -> tuple[BusyObject, Decisions]:
    """An object whose list has held for a dwell, with the decisions that begin its trial."""
    busy = BusyObject(8)
    busy.tick()
    busy.now_s += busy.spec.adoption.dwell_seconds
    begun = busy.tick()
    assert begun.mode.reason is Reason.TRIAL
    return busy, begun


def test_a_pass_says_which_evidence_it_decided_on() -> None:
    busy = BusyObject(8)
    first = busy.tick()
    assert "in closed form" in first.mode.beneficial_message
    busy.replay()
    second = busy.tick()
    assert "replayed" in second.mode.beneficial_message
    shown = build_evidence(second.mode, ReplayNews(), busy.now_s)
    assert shown is not None
    assert shown.source == "Replay"


def test_the_tuned_step_reaches_the_workers() -> None:
    busy = BusyObject(8)
    assert busy.tick().table.colocated_max_step_s is None
    busy.replay()
    record = busy.memory.replay
    assert record is not None
    assert record.outcome is not None
    tuned = busy.tick()
    assert isinstance(record.outcome.colocated.plan, ColocatedPlan)
    step_s = record.outcome.colocated.plan.step_budget_s
    assert step_s is not None
    assert tuned.table.colocated_max_step_s == step_s
    assert tuned.table.max_step_s(Role.COLOCATED) == step_s
    # Where decode is alone, prompts computed again still keep to the target.
    assert tuned.table.max_step_s(Role.DECODE) == min(item.tpot_s for item in tuned.classes)


def test_the_tuned_step_stands_still_in_a_trial() -> None:
    busy, begun = begin_trial()
    busy.replay()
    assert busy.memory.replay is not None
    assert tuned_step_s(busy.memory.replay, begun.mode_input) is not None
    later = busy.tick()
    assert later.mode.reason is Reason.TRIAL
    assert later.table.colocated_max_step_s is begun.table.colocated_max_step_s is None


def test_a_trial_draws_requests_in_the_table_until_the_split_is_confirmed() -> None:
    busy, begun = begin_trial()
    assert begun.table.mode is ServedMode.COLOCATED
    assert begun.table.trial is not None
    assert begun.table.trial.split_share == 0.5
    assert sorted(begun.table.roles.values()).count(Role.PREFILL) >= 1
    assert len(begun.table.roles) == 4
    rows = 0
    for _ in range(150):
        decisions = busy.tick()
        if decisions.mode.reason is Reason.SPLIT_PAYS:
            break
        assert decisions.table == begun.table  # roles stand still while it runs
        arrivals = [busy.now_s - 2.0 + k / 2 for k in range(4)]
        good = [True, False, True, False]
        busy.memory.traffic.add(
            "router",
            batch("a", rows, arrivals, busy.now_s, attained=good, drawn=good, e2e_s=[0.5] * 4),
            busy.now_s,
        )
        rows += 4
    assert decisions.table.mode is ServedMode.SPLIT
    assert decisions.table.trial is None
    assert "confirmed" in decisions.mode.message


def test_a_paused_object_is_not_tried() -> None:
    busy = BusyObject(8)
    busy.tick()
    busy.spec = busy.spec.model_copy(update={"paused": True})
    busy.now_s += busy.spec.adoption.dwell_seconds
    assert busy.tick().mode.reason is Reason.TRIAL  # what would be done
    assert not busy.memory.in_trial
