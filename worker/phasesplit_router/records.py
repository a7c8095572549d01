"""What is remembered of requests: times of one request, the recent window, traces.

Definitions: TTFT = arrival at the router to first token sent; TPOT = (E2E - TTFT) / (n - 1),
undefined for n = 1; attained = finished and every target met. Rejected and failed requests are
misses. The clock is passed in.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phasesplit.api.legs import LegReport
from phasesplit.api.reports import ClassReport, KVTrace
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit_router.fleet import Phase

WINDOW_S = 60.0
MAX_TRACES = 1000
MAX_WINDOW = 20_000  # requests; at most this many are looked at for the recent window


@dataclass(slots=True)
class Record:
    """Times and counts of one request, filled while it runs."""

    request_id: str
    latency_class: LatencyClass
    arrival_s: float
    expected_prompt_tokens: int = 0  # before any worker has counted
    expected_output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    mode: ServedMode = ServedMode.COLOCATED
    drawn: tuple[str, ServedMode] | None = None  # trial, and the mode to be tried in
    first_sent_s: float | None = None
    second_sent_s: float | None = None
    last_sent_s: float | None = None
    ended_s: float | None = None
    waits_s: dict[Phase, float] = field(default_factory=dict)
    prefill: LegReport | None = None
    decode: LegReport | None = None
    num_migrations: int = 0
    finish_reason: str | None = None
    text: str | None = None
    rejected: str = ""  # reason, when it was refused
    failed: bool = False
    abandoned: bool = False  # the client went away
    invalid: bool = False  # the worker found a mistake in it

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token sent."""
        return None if self.first_sent_s is None else self.first_sent_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token sent."""
        return None if self.last_sent_s is None else self.last_sent_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.first_sent_s is None or self.last_sent_s is None or self.num_tokens < 2:
            return None
        return (self.last_sent_s - self.first_sent_s) / (self.num_tokens - 1)

    @property
    def second_token_gap_s(self) -> float | None:
        """First to second token: where an exposed transfer shows."""
        if self.first_sent_s is None or self.second_sent_s is None:
            return None
        return self.second_sent_s - self.first_sent_s

    @property
    def queue_s(self) -> float:
        """Time waited in both queues."""
        return sum(self.waits_s.values())

    @property
    def is_counted(self) -> bool:
        """Does it count for its class, as attained or missed."""
        return not self.abandoned and not self.invalid

    @property
    def is_finished(self) -> bool:
        """Served to its end."""
        return self.finish_reason is not None and not self.failed and self.is_counted

    @property
    def is_attained(self) -> bool:
        """Every target of its class was met."""
        if not self.is_finished or self.ttft_s is None or self.ttft_s > self.latency_class.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= self.latency_class.tpot_s

    def trace(self) -> KVTrace:
        """The request as `GET /v1/kv/{request_id}` shows it."""
        return KVTrace(
            request_id=self.request_id,
            mode=self.mode,
            slo_class=self.latency_class.name,
            prefill=self.prefill,
            decode=self.decode,
            ttft_s=self.ttft_s,
            second_token_gap_s=self.second_token_gap_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            queue_s=self.queue_s,
            num_migrations=self.num_migrations,
            finish_reason=self.finish_reason,
            text=self.text,
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the window keeps of an ended request."""

    at_s: float
    slo_class: str
    attained: bool
    finished: bool
    rejected: bool
    ttft_s: float | None
    tpot_s: float | None
    gap_s: float | None
    prompt_tokens: int
    output_tokens: int


class Ledger:
    """Ended requests: a ring of traces and the window of the last minute."""

    def __init__(self, started_s: float) -> None:
        self.requests_total = 0
        self.failed_total = 0
        self.migrations_total = 0
        self.local_prefills: dict[str, int] = {}
        self.last_arrival_s = started_s
        self._started_s = started_s
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=MAX_WINDOW)
        self._samples: deque[_Sample] = deque(maxlen=MAX_WINDOW)
        self._traces: OrderedDict[str, KVTrace] = OrderedDict()

    def arrived(self, slo_class: str, now_s: float) -> None:
        """A request of a known class came in."""
        self.requests_total += 1
        self.last_arrival_s = now_s
        self._arrivals.append((now_s, slo_class))

    def ended(self, record: Record, now_s: float) -> None:
        """A request ended, in whatever way."""
        self.failed_total += record.failed
        self.migrations_total += record.num_migrations
        if not record.rejected:
            self._traces[record.request_id] = record.trace()
            self._traces.move_to_end(record.request_id)
            if len(self._traces) > MAX_TRACES:
                self._traces.popitem(last=False)
        if not record.is_counted:
            return
        self._samples.append(
            _Sample(
                at_s=now_s,
                slo_class=record.latency_class.name,
                attained=record.is_attained,
                finished=record.is_finished,
                rejected=bool(record.rejected),
                ttft_s=record.ttft_s,
                tpot_s=record.tpot_s,
                gap_s=record.second_token_gap_s,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.num_tokens,
            )
        )

    def find_trace(self, request_id: str) -> KVTrace | None:
        """A recent request by its id; `last` is the newest one."""
        if request_id == "last" and self._traces:
            return next(reversed(self._traces.values()))
        return self._traces.get(request_id)

    def class_reports(
        self, classes: Sequence[LatencyClass], queue_s: dict[str, float], now_s: float
    ) -> list[ClassReport]:
        """The recent window by class."""
        while self._samples and now_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()
        while self._arrivals and now_s - self._arrivals[0][0] > WINDOW_S:
            self._arrivals.popleft()
        span_s = max(1.0, min(WINDOW_S, now_s - self._started_s))
        return [self._class_report(item.name, queue_s.get(item.name, 0.0), span_s) for item in classes]

    def _class_report(self, name: str, queue_s: float, span_s: float) -> ClassReport:
        samples = [sample for sample in self._samples if sample.slo_class == name]
        finished = [sample for sample in samples if sample.finished]
        ttfts = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
        tpots = [sample.tpot_s for sample in finished if sample.tpot_s is not None]
        gaps = [sample.gap_s for sample in samples if sample.gap_s is not None]
        return ClassReport(
            name=name,
            arrival_rate_per_s=sum(slo == name for _, slo in self._arrivals) / span_s,
            attained=sum(sample.attained for sample in samples),
            finished=len(finished),
            rejected=sum(sample.rejected for sample in samples),
            ttft_p50_s=percentile(ttfts, 50),
            ttft_p95_s=percentile(ttfts, 95),
            tpot_p50_s=percentile(tpots, 50),
            tpot_p95_s=percentile(tpots, 95),
            second_token_gap_p99_s=percentile(gaps, 99),
            mean_prompt_tokens=_mean([sample.prompt_tokens for sample in finished]),
            mean_output_tokens=_mean([sample.output_tokens for sample in finished]),
            queue_s=queue_s,
        )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest-rank percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(1, math.ceil(percent / 100 * len(ordered))) - 1]


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
