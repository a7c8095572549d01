"""`Auto` over whole passes of the operator: closed form, replay, then a trial that switches the table."""

from helpers_tick import BusyObject
from helpers_traffic import batch
from phasesplit.api.conditions import Reason
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


def test_a_trial_switches_the_table_window_by_window() -> None:
    busy = BusyObject(8)
    busy.tick()
    busy.now_s += busy.spec.adoption.dwell_seconds
    modes, reasons, rows = [], [], 0
    for _ in range(120):
        decisions = busy.tick()
        modes.append(decisions.table.mode)
        reasons.append(decisions.mode.reason)
        arrivals = [busy.now_s - 2.0 + k / 2 for k in range(4)]
        good = decisions.table.mode is ServedMode.SPLIT
        busy.memory.traffic.add(
            "router",
            batch("a", rows, arrivals, busy.now_s, attained=[good] * 4, e2e_s=[0.5] * 4),
            busy.now_s,
        )
        rows += 4
        if decisions.mode.reason is Reason.SPLIT_PAYS:
            break
    assert reasons[0] is Reason.TRIAL
    assert (modes[0], modes[-1], reasons[-1]) == (
        ServedMode.COLOCATED,
        ServedMode.SPLIT,
        Reason.SPLIT_PAYS,
    )
    assert "confirmed" in decisions.mode.message
