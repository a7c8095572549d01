"""The last requests as lengths and times, for the operator to serve again on paper. Never text.

A ring of fixed size; readers come with a cursor, and are told with each answer what has come and not ended.
Knows records; the clock is passed in.
"""

import uuid
from collections import deque
from itertools import islice
from typing import NamedTuple

from phasesplit.api.routing import ServedMode
from phasesplit.api.traces import MAX_OPEN, MAX_ROWS, MAX_TOKENS, TraceBatch, TraceOutcome
from phasesplit_router.records import Record

CAPACITY = 8192  # rows, about 300 bytes each


class _Row(NamedTuple):
    arrival_s: float
    slo_class: str
    split: bool
    attained: bool
    drawn: bool | None
    outcome: TraceOutcome
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    e2e_s: float | None


class TraceRing:
    """Rows of ended requests, oldest first, and those in flight. `total` counts rows that were ever added."""

    def __init__(self, started_s: float, *, capacity: int = CAPACITY) -> None:
        self.epoch = uuid.uuid4().hex
        self.total = 0
        self._started_s = started_s
        self._rows: deque[_Row] = deque(maxlen=capacity)
        self._open: dict[str, Record] = {}  # by id, in the order in which they came

    def begin(self, record: Record) -> None:
        """A request came in. It stays open until it is added, whether it waits or is answered."""
        self._open[record.request_id] = record

    def add(self, record: Record) -> None:
        """A request ended. A client's own mistake was no load."""
        self._open.pop(record.request_id, None)
        if record.invalid:
            return
        outcome = _outcome(record)
        finished = outcome is TraceOutcome.FINISHED
        prompt = record.prompt_tokens or record.expected_prompt_tokens
        output = record.num_tokens if finished else max(record.num_tokens, record.expected_output_tokens)
        self._rows.append(
            _Row(
                arrival_s=_seconds(record.arrival_s - self._started_s) or 0.0,
                slo_class=record.latency_class.name,
                split=record.mode is ServedMode.SPLIT,
                attained=record.is_attained,
                drawn=None if record.drawn is None else record.drawn[1] is ServedMode.SPLIT,
                outcome=outcome,
                prompt_tokens=_tokens(prompt),
                cached_tokens=_tokens(record.cached_tokens),
                output_tokens=_tokens(output),
                ttft_s=_seconds(record.ttft_s),
                e2e_s=_seconds(record.e2e_s),
            )
        )
        self.total += 1

    def after(self, epoch: str, cursor: int, now_s: float) -> TraceBatch:
        """Rows from `cursor` on, at most so many as one answer holds; all that are kept for a new reader."""
        kept_from = self.total - len(self._rows)
        known = epoch == self.epoch and 0 <= cursor <= self.total
        start = max(cursor, kept_from) if known else kept_from
        rows = list(islice(self._rows, start - kept_from, start - kept_from + MAX_ROWS))
        newest = list(islice(reversed(self._open.values()), MAX_OPEN))[::-1]
        ended_names = [row.slo_class for row in rows]
        open_names = [record.latency_class.name for record in newest]
        classes = tuple(dict.fromkeys((*ended_names, *open_names)))
        index = {name: number for number, name in enumerate(classes)}
        return TraceBatch(
            epoch=self.epoch,
            now_s=max(0.0, now_s - self._started_s),
            next=start + len(rows),
            total=self.total,
            lost=start - cursor if known else 0,
            classes=classes,
            arrival_s=tuple(row.arrival_s for row in rows),
            class_index=tuple(index[name] for name in ended_names),
            split=tuple(row.split for row in rows),
            attained=tuple(row.attained for row in rows),
            drawn=tuple(row.drawn for row in rows),
            outcome=tuple(row.outcome for row in rows),
            prompt_tokens=tuple(row.prompt_tokens for row in rows),
            cached_tokens=tuple(row.cached_tokens for row in rows),
            output_tokens=tuple(row.output_tokens for row in rows),
            ttft_s=tuple(row.ttft_s for row in rows),
            e2e_s=tuple(row.e2e_s for row in rows),
            open_total=len(self._open),
            open_arrival_s=tuple(_seconds(record.arrival_s - self._started_s) or 0.0 for record in newest),
            open_class_index=tuple(index[name] for name in open_names),
            open_prompt_tokens=tuple(
                _tokens(record.prompt_tokens or record.expected_prompt_tokens) for record in newest
            ),
            open_cached_tokens=tuple(
                _tokens(record.cached_tokens) if record.prompt_tokens else None for record in newest
            ),
            open_output_tokens=tuple(_tokens(record.num_tokens) for record in newest),
        )


def _outcome(record: Record) -> TraceOutcome:
    if record.rejected:
        return TraceOutcome.REJECTED
    if record.abandoned:
        return TraceOutcome.ABANDONED
    return TraceOutcome.FINISHED if record.is_finished else TraceOutcome.FAILED


def _seconds(value: float | None) -> float | None:
    """Milliseconds are enough, and short."""
    return None if value is None else round(max(0.0, value), 3)


def _tokens(count: int) -> int:
    return min(max(count, 0), MAX_TOKENS)
