"""KV transfers of the last minute, from the workers' counters. Pure.

A counter that went back means a restarted worker: it counts from zero again. A failed pull from a pod
that is gone or not ready says nothing about the link: it is left out, with the attempt.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phasesplit.api.reports import WorkerReport
from phasesplit.planner.mode_types import TransferWindow

WINDOW_S = 60.0
# A pod fails pulls before its readiness says so, and reports of them come in later.
ABSENCE_GRACE_S = 15.0

_Failures = Counter[tuple[str, str]]  # by (pod pulled from or "", reason)


@dataclass(frozen=True)
class _Step:
    """What one worker's counters grew by between two looks."""

    at_s: float
    attempts: int
    failures: _Failures


@dataclass(frozen=True)
class _Absence:
    """A time in which a pod was not ready, as far as was looked."""

    since_s: float
    until_s: float

    def covers(self, at_s: float) -> bool:
        return self.since_s - ABSENCE_GRACE_S <= at_s <= self.until_s + ABSENCE_GRACE_S


@dataclass
class TransferCounter:
    """Increments of the workers' counters with their times."""

    _last: dict[tuple[str, str], tuple[int, _Failures]] = field(default_factory=dict)
    _steps: deque[_Step] = field(default_factory=deque)
    _absences: dict[str, _Absence] = field(default_factory=dict)  # the latest of each pod

    def add(self, reports: Iterable[WorkerReport], now_s: float) -> None:
        """Take in the counters of one round of reports."""
        seen = set()
        for report in reports:
            key = (report.pod, report.engine_id)
            seen.add(key)
            known = key in self._last
            total, before = self._last.get(key, (0, _Failures()))
            failures = _failures_of(report)
            self._last[key] = (report.transfers_total, failures)
            if not known:
                continue  # what happened before we looked has no time
            attempts = max(0, report.transfers_total - total)
            grown = failures - before
            if attempts or grown:
                self._steps.append(_Step(now_s, max(attempts, grown.total()), grown))
        for key in self._last.keys() - seen:
            del self._last[key]
        while self._steps and self._steps[0].at_s < now_s - WINDOW_S:
            self._steps.popleft()

    def note_ready(self, pods: Mapping[str, bool], now_s: float) -> None:
        """Say which worker pods exist and are ready now: failures toward others do not count."""
        peers = {peer for step in self._steps for peer, _ in step.failures if peer}
        for pod in [pod for pod in peers | pods.keys() if not pods.get(pod, False)]:
            known = self._absences.get(pod)
            still = known is not None and known.covers(now_s)
            self._absences[pod] = _Absence(known.since_s if known and still else now_s, now_s)
        old_s = now_s - WINDOW_S - ABSENCE_GRACE_S
        self._absences = {pod: item for pod, item in self._absences.items() if item.until_s >= old_s}

    def window(self, now_s: float) -> TransferWindow:
        """Attempts and failures of the last minute that say something about links."""
        attempts, reasons = 0, Counter[str]()
        for step in self._steps:
            if step.at_s < now_s - WINDOW_S:
                continue
            attempts += step.attempts
            for (peer, reason), count in step.failures.items():
                absence = self._absences.get(peer)
                if absence is not None and absence.covers(step.at_s):
                    attempts -= count
                else:
                    reasons[reason] += count
        worst = reasons.most_common(1)
        return TransferWindow(
            attempts=attempts, failures=reasons.total(), worst_reason=worst[0][0] if worst else ""
        )


def _failures_of(report: WorkerReport) -> _Failures:
    """By peer and reason; what the worker could not attribute has no peer."""
    failures = _Failures(
        {
            (peer, reason): count
            for peer, reasons in report.transfer_failures_by_peer.items()
            for reason, count in reasons.items()
        }
    )
    rest = Counter(report.transfer_failures_total)
    for (_, reason), count in failures.items():
        rest[reason] -= count
    failures.update({("", reason): count for reason, count in rest.items() if count > 0})
    return failures
