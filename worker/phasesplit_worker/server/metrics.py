"""The worker's Prometheus metrics: step and transfer observations, and load read at scrape time.

Knows metric names and labels; knows nothing of where the numbers come from. Thread-safe: steps are
observed on the engine thread, transfers on the event loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phasesplit.api import metric_names as names
from phasesplit.api.names import Pool, Role
from phasesplit_worker.requests import EngineStats, StepRecord

_BASE_LABELS = (names.LABEL_MODEL, names.LABEL_NAMESPACE, names.LABEL_ROLE, names.LABEL_POOL)
_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class LoadReading:
    """What a scrape reads; `stats` is None while no model is loaded."""

    stats: EngineStats | None = None
    weights_bytes: int = 0


class _LoadCollector(Collector):
    """Gauges and totals that the engine already keeps, read when scraped, under the role of that moment."""

    def __init__(self, labels: Callable[[], tuple[str, ...]], read: Callable[[], LoadReading]) -> None:
        self._labels = labels
        self._read = read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        if reading.stats is None:
            return
        stats, total = reading.stats, reading.stats.kv_total_blocks
        usage = stats.kv_used_blocks / total if total else 0.0
        yield self._gauge(names.NUM_REQUESTS_RUNNING, "Sequences in the running batch.", stats.num_running)
        yield self._gauge(
            names.NUM_REQUESTS_WAITING, "Sequences waiting for their first step.", stats.num_waiting
        )
        yield self._gauge(names.KV_CACHE_USAGE_PERC, "Share of KV blocks in use, 0 to 1.", usage)
        yield self._gauge(names.WEIGHTS_BYTES, "Bytes of the loaded weights.", reading.weights_bytes)
        hits, preemptions = stats.prefix_cache_hit_tokens_total, stats.num_preemptions_total
        yield self._counter(names.PREFIX_CACHE_HITS_TOTAL, "Prompt tokens found in the prefix cache.", hits)
        yield self._counter(
            names.NUM_PREEMPTIONS_TOTAL, "Sequences whose KV was dropped and recomputed.", preemptions
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_BASE_LABELS)
        family.add_metric(self._labels(), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_BASE_LABELS)
        family.add_metric(self._labels(), value)
        return family


class WorkerMetrics:
    """One registry per worker, so that several can live in one process."""

    def __init__(self, *, model: str, namespace: str, pool: Pool, role: Callable[[], Role]) -> None:
        self._model = model
        self._namespace = namespace
        self._pool = pool
        self._role = role
        self._read: Callable[[], LoadReading] = LoadReading
        registry = self._registry = CollectorRegistry()
        self._step_seconds = Histogram(
            names.STEP_SECONDS,
            "Duration of an engine step.",
            (*_BASE_LABELS, "mix"),
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._step_tokens = Histogram(
            names.STEP_TOKENS,
            "Tokens computed by an engine step.",
            (*_BASE_LABELS, "kind"),
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            names.KV_TRANSFER_SECONDS,
            "First KV byte asked for to last byte verified, seen by the pulling worker.",
            _BASE_LABELS,
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self._transfer_bytes = Counter(
            names.KV_TRANSFER_BYTES_TOTAL,
            "KV bytes pulled from a peer.",
            (*_BASE_LABELS, "peer", "transport"),
            registry=registry,
        )
        self._transfer_failures = Counter(
            names.KV_TRANSFER_FAILURES_TOTAL,
            "KV pulls that failed; each was recomputed locally.",
            (*_BASE_LABELS, "reason"),
            registry=registry,
        )
        self._expired_blocks = Counter(
            names.KV_EXPIRED_BLOCKS_TOTAL,
            "KV blocks freed because nobody pulled them in time.",
            _BASE_LABELS,
            registry=registry,
        )
        registry.register(_LoadCollector(self._labels, self._read_load))

    def _read_load(self) -> LoadReading:
        return self._read()

    def _labels(self) -> tuple[str, ...]:
        return (self._model, self._namespace, str(self._role()), str(self._pool))

    def read_load_from(self, read: Callable[[], LoadReading]) -> None:
        """Where scrapes read the engine's load, once there is an engine."""
        self._read = read

    def observe_step(self, step: StepRecord) -> None:
        """Count one engine step. Called on the engine thread."""
        labels = self._labels()
        self._step_seconds.labels(*labels, step.mix).observe(step.seconds)
        if step.prefill_tokens:
            self._step_tokens.labels(*labels, "prefill").observe(step.prefill_tokens)
        if step.decode_sequences:
            self._step_tokens.labels(*labels, "decode").observe(step.decode_sequences)

    def observe_transfer(self, *, peer: str, transport: str, num_bytes: int, seconds: float) -> None:
        """Count one KV pull that succeeded."""
        labels = self._labels()
        self._transfer_seconds.labels(*labels).observe(seconds)
        self._transfer_bytes.labels(*labels, peer, transport).inc(num_bytes)

    def observe_transfer_failure(self, reason: str) -> None:
        """Count one KV pull that failed."""
        self._transfer_failures.labels(*self._labels(), reason).inc()

    def observe_expired_blocks(self, num_blocks: int) -> None:
        """Count KV blocks whose time to live ran out."""
        self._expired_blocks.labels(*self._labels()).inc(num_blocks)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
