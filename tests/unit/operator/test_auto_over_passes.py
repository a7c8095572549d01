"""`Auto` over whole passes of the operator: closed form, replay, then a trial that switches the table."""

from helpers_tick import BusyObject
from helpers_traffic import batch
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Role
from phasesplit.api.routing import ServedMode
from phasesplit.operator.evidence_status import ReplayNews, build_evidence


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


def test_a_trial_draws_requests_in_the_table_until_the_split_is_confirmed() -> None:
    busy = BusyObject(8)
    busy.tick()
    busy.now_s += busy.spec.adoption.dwell_seconds
    begun = busy.tick()
    assert begun.mode.reason is Reason.TRIAL
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
