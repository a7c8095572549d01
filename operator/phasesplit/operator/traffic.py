"""The last window of one object's requests, from the traces of all its routers. Pure.

Bounded in requests and in time; a router that starts anew, or is new, brings its own numbering.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from phasesplit.api.routing import LatencyClass
from phasesplit.api.traces import TraceBatch, TraceOutcome
from phasesplit.cluster.router_client import TraceCursor
from phasesplit.planner import scaling_arrivals
from phasesplit.planner.simulation_types import Arrival
from phasesplit.planner.traffic import (
    MAX_REQUESTS,
    WINDOW_S,
    OpenRequest,
    ServedRequest,
    open_arrivals,
    to_arrival,
)

# Between two looks at the traces while requests flow: a trial counts what it sees, and a burst that workers
# are asked for is seen while it is in flight.
READ_EVERY_S = 4.0
# What a router has not told for so long is not known: a look may fail, or come late.
_STALE_S = 2.5 * READ_EVERY_S
# Long answers are known late: what arrived before the window may end within it.
_KEEP_S = 1.5 * WINDOW_S
_KEEP = MAX_REQUESTS + MAX_REQUESTS // 3


@dataclass(frozen=True)
class _Trace:
    """What one router has told."""

    cursor: TraceCursor = field(default_factory=TraceCursor)
    unended: tuple[OpenRequest, ...] = ()
    told_all_at_s: float = float("-inf")  # up to then every request is known


@dataclass
class TrafficBook:
    """Requests by arrival, what is in flight, and up to where each router's trace is known."""

    lost: int = 0  # rows that no one has read in time
    _lost_at_s: float = float("-inf")
    _requests: list[ServedRequest] = field(default_factory=list)
    _traces: dict[str, _Trace] = field(default_factory=dict)
    # The ended ones of the scaling window as arrivals, with the classes' numbers in them, and those to come.
    _ended: list[Arrival] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)
    _not_taken: list[ServedRequest] = field(default_factory=list)

    def cursor(self, router: str) -> TraceCursor:
        """Where to go on reading."""
        return self._traces.get(router, _Trace()).cursor

    def requests(self) -> tuple[ServedRequest, ...]:
        """What is known, by arrival."""
        return tuple(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def arrivals(self, classes: Sequence[LatencyClass], now_s: float) -> tuple[Arrival, ...]:
        """All that came lately, ended or not; nothing where some of it may be missing.

        A part of the requests would look like less load than there is: then the rates alone have to do.
        """
        traces = self._traces.values()
        if not traces:
            return ()
        since_s = now_s - scaling_arrivals.WINDOW_S
        if self._lost_at_s >= since_s or any(now_s - trace.told_all_at_s > _STALE_S for trace in traces):
            return ()
        if len(self._requests) >= _KEEP:  # older ones may have had to go
            since_s = max(since_s, self._requests[0].at_s)
            if since_s > now_s - scaling_arrivals.SHORT_WINDOW_S:
                return ()
        index = {item.name: number for number, item in enumerate(classes)}
        unended = [request for trace in traces for request in trace.unended if request.at_s >= since_s]
        found = [*self._ended_since(since_s, index), *open_arrivals(unended, self._requests, index)]
        return tuple(sorted(found, key=attrgetter("at_s")))

    def _ended_since(self, since_s: float, index: dict[str, int]) -> list[Arrival]:
        """Each request becomes an arrival once, however often they are asked for."""
        if index != self._index:
            self._index, self._ended, self._not_taken = index, [], list(self._requests)
        self._ended += [to_arrival(item, index) for item in self._not_taken if item.at_s >= since_s]
        self._not_taken.clear()
        self._ended.sort(key=attrgetter("at_s"))
        del self._ended[: bisect_left(self._ended, since_s, key=attrgetter("at_s"))]
        return self._ended

    def add(self, router: str, batch: TraceBatch, now_s: float) -> None:
        """Take in one answer. The router's clock is put on ours by the time of the answer."""
        self.lost += batch.lost
        known = self._traces.get(router, _Trace())
        if batch.lost or known.cursor.epoch not in ("", batch.epoch):
            self._lost_at_s = now_s
        offset_s = now_s - batch.now_s
        unended = _open_requests(batch, offset_s)
        self._traces[router] = _Trace(
            TraceCursor(batch.epoch, batch.next),
            unended,
            now_s if _tells_all(batch, unended, now_s) else known.told_all_at_s,
        )
        rows = _ended_requests(batch, offset_s)
        if rows:
            self._requests += rows
            self._requests.sort(key=attrgetter("at_s"))
            self._not_taken = [*self._not_taken, *rows][-_KEEP:]
        self.forget_old(now_s)

    def note_quiet(self, router: str, now_s: float) -> None:
        """A router has told that nothing ended since the last answer and nothing is in flight."""
        self._traces[router] = _Trace(self.cursor(router), (), now_s)

    def forget_old(self, now_s: float) -> None:
        """Keep the window and no more."""
        first = next(
            (index for index, item in enumerate(self._requests) if item.at_s >= now_s - _KEEP_S),
            len(self._requests),
        )
        del self._requests[: max(first, len(self._requests) - _KEEP)]

    def keep_only(self, routers: Collection[str], now_s: float) -> None:
        """These routers there are. How the requests of one that is gone ended is not told any more."""
        for router in [router for router in self._traces if router not in routers]:
            if self._traces.pop(router).unended:
                self._lost_at_s = now_s
        for router in routers:
            self._traces.setdefault(router, _Trace())


def _ended_requests(batch: TraceBatch, offset_s: float) -> list[ServedRequest]:
    return [
        ServedRequest(
            at_s=offset_s + batch.arrival_s[row],
            class_name=batch.classes[batch.class_index[row]],
            split=batch.split[row],
            attained=batch.attained[row],
            counted=batch.outcome[row] is not TraceOutcome.ABANDONED,
            prompt_tokens=batch.prompt_tokens[row],
            cached_tokens=batch.cached_tokens[row],
            output_tokens=batch.output_tokens[row],
            e2e_s=batch.e2e_s[row],
            drawn=batch.drawn[row] if batch.drawn else None,
        )
        for row in range(len(batch.arrival_s))
    ]


def _open_requests(batch: TraceBatch, offset_s: float) -> tuple[OpenRequest, ...]:
    return tuple(
        OpenRequest(
            at_s=offset_s + batch.open_arrival_s[row],
            class_name=batch.classes[batch.open_class_index[row]],
            prompt_tokens=batch.open_prompt_tokens[row],
            cached_tokens=batch.open_cached_tokens[row],
            output_tokens=batch.open_output_tokens[row],
        )
        for row in range(len(batch.open_arrival_s))
    )


def _tells_all(batch: TraceBatch, unended: Sequence[OpenRequest], now_s: float) -> bool:
    """Is every request of the scaling window in what was told up to this answer?

    An older router does not tell what is in flight, and of very many the oldest are left out.
    """
    if batch.next < batch.total or batch.open_total is None:
        return False
    oldest_s = min((request.at_s for request in unended), default=now_s)
    return batch.open_total == len(unended) or oldest_s < now_s - scaling_arrivals.WINDOW_S
