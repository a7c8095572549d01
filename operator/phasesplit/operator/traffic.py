"""The last window of one object's requests, from the traces of all its routers. Pure.

Bounded in requests and in time; a router that starts anew, or is new, brings its own numbering.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from phasesplit.api.traces import TraceBatch, TraceOutcome
from phasesplit.cluster.router_client import TraceCursor
from phasesplit.planner.traffic import MAX_REQUESTS, WINDOW_S, ServedRequest

# Long answers are known late: what arrived before the window may end within it.
_KEEP_S = 1.5 * WINDOW_S
_KEEP = MAX_REQUESTS + MAX_REQUESTS // 3


@dataclass
class TrafficBook:
    """Requests by arrival, and up to where each router's trace is known."""

    lost: int = 0  # rows that no one has read in time
    _requests: list[ServedRequest] = field(default_factory=list)
    _cursors: dict[str, TraceCursor] = field(default_factory=dict)

    def cursor(self, router: str) -> TraceCursor:
        """Where to go on reading."""
        return self._cursors.get(router, TraceCursor())

    def requests(self) -> tuple[ServedRequest, ...]:
        """What is known, by arrival."""
        return tuple(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, router: str, batch: TraceBatch, now_s: float) -> None:
        """Take in one answer. The router's clock is put on ours by the time of the answer."""
        self._cursors[router] = TraceCursor(batch.epoch, batch.next)
        self.lost += batch.lost
        offset_s = now_s - batch.now_s
        for row in range(len(batch.arrival_s)):
            outcome = batch.outcome[row]
            self._requests.append(
                ServedRequest(
                    at_s=offset_s + batch.arrival_s[row],
                    class_name=batch.classes[batch.class_index[row]],
                    split=batch.split[row],
                    attained=batch.attained[row],
                    counted=outcome is not TraceOutcome.ABANDONED,
                    prompt_tokens=batch.prompt_tokens[row],
                    cached_tokens=batch.cached_tokens[row],
                    output_tokens=batch.output_tokens[row],
                    e2e_s=batch.e2e_s[row],
                    drawn=batch.drawn[row] if batch.drawn else None,
                )
            )
        if batch.arrival_s:
            self._requests.sort(key=lambda request: request.at_s)
        self.forget_old(now_s)

    def forget_old(self, now_s: float) -> None:
        """Keep the window and no more."""
        first = next(
            (index for index, item in enumerate(self._requests) if item.at_s >= now_s - _KEEP_S),
            len(self._requests),
        )
        del self._requests[: max(first, len(self._requests) - _KEEP)]

    def keep_only(self, routers: Collection[str]) -> None:
        """Routers that are gone need no cursor."""
        for router in [router for router in self._cursors if router not in routers]:
            del self._cursors[router]
