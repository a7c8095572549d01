"""The regular part: reads Prometheus for all objects at once, and offers every object to the queue.

Offering all objects is a safety net: should a wake-up ever be lost, it comes late, not never.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.cluster.errors import ClusterError
from phasesplit.cluster.prometheus import Answer, Endpoint, PrometheusReader
from phasesplit.cluster.snapshot import ClusterState, Key
from phasesplit.operator.memory import Memories
from phasesplit.operator.metrics import build_queries
from phasesplit.operator.queue import WorkQueue
from phasesplit.operator.secrets import SecretReader
from phasesplit.operator.settings import OperatorSettings
from phasesplit.operator.situation import MetricsState

logger = logging.getLogger(__name__)

_IDLE_FACTOR = 3


@dataclass
class _Source:
    """One Prometheus."""

    reader: PrometheusReader
    interval_s: float = 15.0
    answer: Answer | None = None
    failing_since_s: float | None = None
    used_by: set[Key] = field(default_factory=set)


class MetricsTick:
    """Reads every Prometheus that an object uses."""

    def __init__(
        self,
        state: ClusterState,
        memories: Memories,
        secrets: SecretReader,
        settings: OperatorSettings,
        monotonic: Callable[[], float],
    ) -> None:
        self._state = state
        self._memories = memories
        self._secrets = secrets
        self._settings = settings
        self._monotonic = monotonic
        self._specs: dict[Key, DisaggregatedModelSpec] = {}
        self._sources: dict[Endpoint, _Source] = {}
        self._endpoints: dict[Key, Endpoint] = {}
        self.last_round_s = monotonic()

    def state_of(self, key: Key, spec: DisaggregatedModelSpec) -> MetricsState:
        """How the Prometheus of an object does; remembers that the object wants it read."""
        self._specs[key] = spec
        if spec.metrics.prometheus is None and self._settings.prometheus_address is None:
            return MetricsState(configured=False)
        endpoint = self._endpoints.get(key)
        source = self._sources.get(endpoint) if endpoint is not None else None
        if source is None or source.answer is None:
            return MetricsState(configured=True, asked=False)
        since_s = source.failing_since_s
        return MetricsState(
            configured=True,
            error=source.answer.error,
            error_detail=source.answer.error_detail,
            failing_s=self._monotonic() - since_s if since_s is not None else 0.0,
            scrape_interval_s=source.interval_s,
        )

    async def run(self, queue: WorkQueue) -> None:
        """Rounds for ever."""
        while True:
            await self._round()
            self.last_round_s = self._monotonic()
            keys = self._state.all_keys()
            for key in keys:
                queue.add(key, self._settings.idle_seconds)
            busy = any(self._is_busy(key) for key in keys)
            pause_s = self._settings.metrics_seconds * (1 if busy else _IDLE_FACTOR)
            # Soon after a start there is nothing to read, but something to come.
            await asyncio.sleep(pause_s if self._sources else min(pause_s, 5.0))

    async def _round(self) -> None:
        await self._find_sources()
        # One after the other: there is rarely more than one, and they share the loop.
        for endpoint, source in list(self._sources.items()):
            answer = await source.reader.read(build_queries(source.interval_s))
            self._take(endpoint, source, answer)

    def _take(self, endpoint: Endpoint, source: _Source, answer: Answer) -> None:
        now_s = self._monotonic()
        if answer.error is not None and source.failing_since_s is None:
            logger.warning("Prometheus %s: %s", endpoint.address, answer.error_detail)
        if answer.error is None:
            source.failing_since_s = None
        elif source.failing_since_s is None:
            source.failing_since_s = now_s
        source.answer = answer
        if answer.error is None:
            source.interval_s = answer.scrape_interval_s
        for key in source.used_by:
            model = self._state.model(key)
            if model is not None:
                self._memories.of(key, model.uid).metrics = tuple(answer.values.get(key, ()))

    async def _find_sources(self) -> None:
        """Which objects use which Prometheus; those that nobody uses any more are closed."""
        known = set(self._state.all_keys())
        self._specs = {key: spec for key, spec in self._specs.items() if key in known}
        self._endpoints = {}
        for source in self._sources.values():
            source.used_by.clear()
        for key, spec in self._specs.items():
            try:
                endpoint = await self._endpoint(key, spec)
            except ClusterError as error:
                logger.warning("%s", error)
                continue
            if endpoint is None:
                continue
            self._endpoints[key] = endpoint
            source = self._sources.setdefault(
                endpoint,
                _Source(
                    PrometheusReader(endpoint, self._settings.prometheus_timeout_seconds, self._monotonic)
                ),
            )
            source.used_by.add(key)
        for endpoint in [endpoint for endpoint, source in self._sources.items() if not source.used_by]:
            self._sources.pop(endpoint).reader.close()

    async def _endpoint(self, key: Key, spec: DisaggregatedModelSpec) -> Endpoint | None:
        wanted = spec.metrics.prometheus
        if wanted is None:
            address = self._settings.prometheus_address
            return Endpoint(address) if address else None
        values: Mapping[str, str | None] = {
            name: await self._secrets.value(key[0], reference.name, reference.key) if reference else None
            for name, reference in (("token", wanted.bearer_token_secret_ref), ("ca", wanted.ca_secret_ref))
        }
        return Endpoint(wanted.address, values["token"], values["ca"])

    def _is_busy(self, key: Key) -> bool:
        model = self._state.model(key)
        return model is not None and bool(self._memories.of(key, model.uid).flowing)
