"""The window of failed transfers: what is new, what is recent, and what a dead pod is to blame for."""

from dataclasses import dataclass

import pytest

from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import WorkerReport, WorkerState
from phasesplit.operator.transfers import TransferCounter
from phasesplit.planner.links import MIN_FAILURES

ALL = ("p0", "p1", "d0")


def report(
    total: int, engine_id: str = "e1", by_peer: dict[str, dict[str, int]] | None = None, **failures: int
) -> WorkerReport:
    return WorkerReport(
        pod="d0",
        node="b",
        pool=Pool.DECODE,
        role=Role.DECODE,
        role_version=1,
        state=WorkerState.READY,
        engine_id=engine_id,
        transfers_total=total,
        transfer_failures_total=failures,
        transfer_failures_by_peer=by_peer or {},
    )


def test_the_window_counts_what_happened_since_the_first_look() -> None:
    counter = TransferCounter()
    counter.add([report(100, timeout=50)], 0)
    counter.add([report(110, timeout=52, refused=1)], 10)
    window = counter.window(10)
    assert (window.attempts, window.failures, window.worst_reason) == (10, 3, "timeout")


def test_a_restarted_worker_counts_from_zero() -> None:
    counter = TransferCounter()
    counter.add([report(100)], 0)
    counter.add([report(3, engine_id="e2")], 10)
    counter.add([report(5, engine_id="e2", timeout=1)], 12)
    window = counter.window(12)
    assert (window.attempts, window.failures) == (2, 1)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    counter = TransferCounter()
    counter.add([report(0)], 0)
    counter.add([report(10, timeout=5)], 5)
    counter.add([report(10, timeout=5)], 70)
    assert counter.window(70).attempts == 0


@dataclass(frozen=True)
class Case:
    """Failures of the decode worker toward two prefill pods, and when these were ready."""

    failures_at_s: dict[float, dict[str, dict[str, int]]]  # totals at that time, by peer and reason
    gone_s: dict[str, tuple[float, float]]  # pod -> from, to
    counted: int
    worst: str = ""


CASES = {
    "both pods are well": Case({10: {"p0": {"timeout": 4}}}, {}, 4, "timeout"),
    "one has crashed": Case({10: {"p0": {"connect": 4}}}, {"p0": (8, 99)}, 0),
    "it is noticed after its failures": Case({10: {"p0": {"connect": 4}}}, {"p0": (14, 99)}, 0),
    "it is back before its failures are reported": Case({20: {"p0": {"connect": 4}}}, {"p0": (4, 14)}, 0),
    "the other one fails at the same time": Case(
        {10: {"p0": {"connect": 40}, "p1": {"timeout": 3}}}, {"p0": (8, 99)}, 3, "timeout"
    ),
    "it fails again long after it came back": Case(
        {10: {"p0": {"connect": 4}}, 40: {"p0": {"connect": 4, "timeout": 5}}}, {"p0": (8, 14)}, 5, "timeout"
    ),
    "it was well long before it crashed": Case({10: {"p0": {"timeout": 5}}}, {"p0": (35, 99)}, 5, "timeout"),
}


@pytest.mark.parametrize("name", CASES)
def test_failures_toward_a_pod_that_is_gone_do_not_count(name: str) -> None:
    case = CASES[name]
    counter = TransferCounter()
    seen: dict[str, dict[str, int]] = {}
    for now_s in range(51):
        seen = case.failures_at_s.get(now_s, seen)
        reasons: dict[str, int] = {}
        for counts in seen.values():
            for reason, count in counts.items():
                reasons[reason] = reasons.get(reason, 0) + count
        counter.add([report(now_s + sum(reasons.values()), by_peer=seen, **reasons)], now_s)
        gone = {pod for pod, (start_s, end_s) in case.gone_s.items() if start_s <= now_s < end_s}
        counter.note_ready({pod: pod not in gone for pod in ALL}, now_s)
    window = counter.window(50)
    assert (window.failures, window.worst_reason) == (case.counted, case.worst)
    assert window.attempts == 50 + case.counted
    assert (window.failures >= MIN_FAILURES) == bool(case.counted)


def test_a_failure_without_a_peer_always_counts() -> None:
    counter = TransferCounter()
    counter.add([report(0)], 0)
    counter.add([report(5, by_peer={"p0": {"connect": 1}}, connect=3)], 5)
    counter.note_ready({"d0": True}, 5)
    window = counter.window(5)
    assert (window.attempts, window.failures, window.worst_reason) == (4, 2, "connect")


def test_absences_of_pods_that_are_gone_for_good_are_forgotten() -> None:
    counter = TransferCounter()
    counter.add([report(0)], 0)
    for number in range(50):
        peers = {f"p{number}": {"connect": 1}}
        counter.add([report(number + 1, by_peer=peers, connect=1)], 10.0 * number)
        counter.note_ready({"d0": True}, 10.0 * number)
    assert len(counter._absences) < 20
