"""KV transfers of the last minute, from the workers' counters. Pure.

A counter that went back means a restarted worker: it counts from zero again.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from phasesplit.api.reports import WorkerReport
from phasesplit.planner.mode_types import TransferWindow

WINDOW_S = 60.0


@dataclass
class TransferCounter:
    """Increments of the workers' counters with their times."""

    _last: dict[tuple[str, str], tuple[int, dict[str, int]]] = field(default_factory=dict)
    _steps: deque[tuple[float, int, Counter[str]]] = field(default_factory=deque)

    def add(self, reports: Iterable[WorkerReport], now_s: float) -> None:
        """Take in the counters of one round of reports."""
        seen = set()
        for report in reports:
            key = (report.pod, report.engine_id)
            seen.add(key)
            known = key in self._last
            total, failures = self._last.get(key, (0, {}))
            self._last[key] = (report.transfers_total, dict(report.transfer_failures_total))
            if not known:
                continue  # what happened before we looked has no time
            attempts = max(0, report.transfers_total - total)
            grown = Counter(
                {
                    reason: count - failures.get(reason, 0)
                    for reason, count in report.transfer_failures_total.items()
                    if count > failures.get(reason, 0)
                }
            )
            if attempts or grown:
                self._steps.append((now_s, max(attempts, grown.total()), grown))
        for key in self._last.keys() - seen:
            del self._last[key]
        while self._steps and self._steps[0][0] < now_s - WINDOW_S:
            self._steps.popleft()

    def window(self, now_s: float) -> TransferWindow:
        """Attempts and failures of the last minute."""
        recent = [step for step in self._steps if step[0] >= now_s - WINDOW_S]
        failures: Counter[str] = Counter()
        for _, _, grown in recent:
            failures += grown
        worst = failures.most_common(1)
        return TransferWindow(
            attempts=sum(attempts for _, attempts, _ in recent),
            failures=failures.total(),
            worst_reason=worst[0][0] if worst else "",
        )
