"""The operator's own metrics, for its dashboard and for alerts."""

import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Gauge, Histogram

from phasesplit.operator.queue import Key

PASSES = Counter("phasesplit_operator_passes_total", "Passes over objects.", ["result"])
PASS_SECONDS = Histogram(
    "phasesplit_operator_pass_seconds",
    "Time of one pass over one object, waiting for the API server included.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
WRITES = Counter("phasesplit_operator_writes_total", "Changes made in the cluster.", ["kind"])
REPLAYS = Counter(
    "phasesplit_operator_replays_total", "Windows of requests served again on paper.", ["result"]
)
REPLAY_SECONDS = Histogram(
    "phasesplit_operator_replay_seconds",
    "Time of one replay, in a process of its own.",
    buckets=(0.5, 1, 2, 5, 10, 15, 20, 30),
)
OBJECTS = Gauge("phasesplit_operator_objects", "Objects of kind DisaggregatedModel.")


def measured(
    process: Callable[[Key], Awaitable[float | None]],
) -> Callable[[Key], Awaitable[float | None]]:
    """The same pass, counted and timed."""

    async def pass_over(key: Key) -> float | None:
        started_s = time.perf_counter()
        result = "error"
        try:
            again_s = await process(key)
            result = "ok"
            return again_s
        finally:
            PASSES.labels(result).inc()
            PASS_SECONDS.observe(time.perf_counter() - started_s)

    return pass_over
