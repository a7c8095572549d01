"""The router's Prometheus metrics. Names come from `phasesplit.api.metric_names`.

Knows records and label values; does not decide anything.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from phasesplit.api import metric_names as names
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode
from phasesplit_router.histograms import Histogram, HistogramCollector
from phasesplit_router.records import Record

_TTFT_BOUNDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    1.5,
    2,
    3,
    5,
    7.5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
)
_TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1, 2, 5, 10, 30,
)  # fmt: skip
_COUNT_BOUNDS = tuple(float(2**power) for power in range(18))
_OBJECT = (names.LABEL_MODEL, names.LABEL_NAMESPACE)
_REQUEST = (*_OBJECT, names.LABEL_SLO, names.LABEL_MODE)


class Metrics:
    """All metrics of one router, for one object."""

    def __init__(self, *, name: str, namespace: str) -> None:
        self._object = (name, namespace)
        self.registry = CollectorRegistry()
        self.ttft = _histogram(
            names.TIME_TO_FIRST_TOKEN_SECONDS, "Arrival at the router to first token sent.", _TTFT_BOUNDS
        )
        self.itl = _histogram(
            names.INTER_TOKEN_LATENCY_SECONDS, "Gap between tokens sent by the router.", _TOKEN_BOUNDS_S
        )
        self.gap = _histogram(
            names.SECOND_TOKEN_GAP_SECONDS, "First to second token sent by the router.", _TOKEN_BOUNDS_S
        )
        self.tpot = _histogram(
            names.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS,
            "(E2E - TTFT) / (n - 1) of a request.",
            _TOKEN_BOUNDS_S,
        )
        self.e2e = _histogram(names.E2E_REQUEST_LATENCY_SECONDS, "Arrival to last token sent.", _TTFT_BOUNDS)
        self.queue = Histogram(
            names.REQUEST_QUEUE_TIME_SECONDS,
            "Time waited in the router's queue of a phase.",
            (*_REQUEST, "phase"),
            (0.001, *_TTFT_BOUNDS),
        )
        self.prompt = _histogram(names.PROMPT_TOKENS, "Prompt tokens of a request.", _COUNT_BOUNDS)
        self.output = _histogram(names.OUTPUT_TOKENS, "Output tokens of a request.", _COUNT_BOUNDS)
        self.registry.register(
            HistogramCollector(
                [self.ttft, self.itl, self.gap, self.tpot, self.e2e, self.queue, self.prompt, self.output]
            )
        )
        slo = (*_OBJECT, names.LABEL_SLO)
        self._requests = self._counter(
            names.SLO_REQUESTS_TOTAL, "Requests ended, refused ones included.", slo
        )
        self._attained = self._counter(
            names.SLO_ATTAINED_REQUESTS_TOTAL, "Requests that met every target of their class.", slo
        )
        self._rejected = self._counter(names.REJECTED_REQUESTS_TOTAL, "Requests refused.", (*slo, "reason"))
        self._local = self._counter(
            names.LOCAL_PREFILLS_TOTAL,
            "Requests of a split model served by one worker.",
            (*_OBJECT, "reason"),
        )
        self._migrations = self._counter(
            names.MIGRATIONS_TOTAL, "Streams continued on another worker.", _OBJECT
        ).labels(*self._object)
        self._in_flight = Gauge(
            names.REQUESTS_IN_FLIGHT, "Requests being served or queued.", _OBJECT, registry=self.registry
        ).labels(*self._object)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def take_table(self, table: RoutingTable) -> None:
        """Make every target a bucket bound, and every class a series from the start."""
        for latency_class in table.classes:
            self.ttft.add_bound(latency_class.ttft_s)
            self.tpot.add_bound(latency_class.tpot_s)
            self.itl.add_bound(latency_class.tpot_s)
            self._requests.labels(*self._object, latency_class.name)
            self._attained.labels(*self._object, latency_class.name)

    def request_labels(self, latency_class: LatencyClass, mode: ServedMode) -> tuple[str, ...]:
        """Labels of a request's histograms."""
        return (*self._object, latency_class.name, str(mode))

    def in_flight(self, change: int) -> None:
        """A request came or went."""
        self._in_flight.inc(change)

    def local_prefill(self, reason: str) -> None:
        """A request of a split model is served by one worker."""
        self._local.labels(*self._object, reason).inc()

    def migrated(self) -> None:
        """A stream goes on elsewhere."""
        self._migrations.inc()

    def ended(self, record: Record) -> None:
        """Count a request that ended. One whose client left or erred is neither attained nor missed."""
        slo = record.latency_class.name
        if record.rejected:
            self._rejected.labels(*self._object, slo, record.rejected).inc()
        if record.is_counted:
            self._requests.labels(*self._object, slo).inc()
            if record.is_attained:
                self._attained.labels(*self._object, slo).inc()
        if record.ttft_s is None:
            return
        labels = self.request_labels(record.latency_class, record.mode)
        self.ttft.observe(labels, record.ttft_s)
        for phase, wait_s in record.waits_s.items():
            self.queue.observe((*labels, str(phase)), wait_s)
        if record.second_token_gap_s is not None:
            self.gap.observe(labels, record.second_token_gap_s)
        if not record.is_finished:
            return
        if record.tpot_s is not None:
            self.tpot.observe(labels, record.tpot_s)
        if record.e2e_s is not None:
            self.e2e.observe(labels, record.e2e_s)
        self.prompt.observe(labels, record.prompt_tokens)
        self.output.observe(labels, record.num_tokens)

    def exposition(self) -> bytes:
        """Text for a scrape."""
        return generate_latest(self.registry)


def _histogram(name: str, help_text: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(name, help_text, _REQUEST, bounds)
