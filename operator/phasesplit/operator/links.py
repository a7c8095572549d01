"""What is known about the links between nodes, and when to measure one on purpose. Pure.

Bandwidth is bytes over the time the socket was busy; samples of the last seconds of one node pair are
summed, so that a link that has just become slow shows at once. Samples age; a pair without a fresh one
is probed, at no more than 1 % of the time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phasesplit.api.reports import LinkSample
from phasesplit.planner.facts import LinkFacts, WorkerFacts

Pair = tuple[str, str]  # node of the prefill side, node of the decode side

# Samples this far behind the newest one of a pair say nothing new.
WINDOW_S = 5.0
# Less than this says more about latency than about bandwidth.
MIN_BYTES = 64 << 10
FORGET_S = 600.0
MAX_SAMPLES_PER_PAIR = 64

MIN_PROBE_BYTES = 256 << 10
MAX_PROBE_BYTES = 1 << 20
PROBE_TARGET_S = 0.1
PROBE_DUTY = 0.01


@dataclass(frozen=True)
class Measurement:
    """One sample with the time at which it was taken."""

    at_s: float
    bytes: int
    busy_s: float
    transport: str
    probe: bool


@dataclass
class LinkBook:
    """Measurements by pair of nodes."""

    _pairs: dict[Pair, list[Measurement]] = field(default_factory=dict)

    def add(self, samples: Iterable[LinkSample], now_s: float) -> None:
        """Take in samples; one that a router reports again is known already."""
        for sample in samples:
            if sample.busy_s <= 0 or sample.bytes < MIN_BYTES or sample.from_node == sample.to_node:
                continue
            at_s = now_s - sample.age_s
            known = self._pairs.setdefault((sample.from_node, sample.to_node), [])
            if any(_is_same(sample, at_s, item) for item in known):
                continue
            known.append(Measurement(at_s, sample.bytes, sample.busy_s, sample.transport, sample.probe))
            known.sort(key=lambda item: item.at_s)
            del known[:-MAX_SAMPLES_PER_PAIR]

    def forget_old(self, now_s: float) -> None:
        """Drop pairs that nobody has used for long."""
        for pair in [pair for pair, items in self._pairs.items() if items[-1].at_s < now_s - FORGET_S]:
            del self._pairs[pair]

    def facts(self, now_s: float) -> tuple[LinkFacts, ...]:
        """The current estimate of every known pair."""
        found = []
        for (from_node, to_node), items in sorted(self._pairs.items()):
            newest_s = items[-1].at_s
            recent = [item for item in items if item.at_s >= newest_s - WINDOW_S]
            busy_s = sum(item.busy_s for item in recent)
            rate = sum(item.bytes for item in recent) / busy_s
            found.append(LinkFacts(from_node, to_node, rate, max(0.0, now_s - newest_s)))
        return tuple(found)

    def age_s(self, pair: Pair, now_s: float) -> float | None:
        """Age of a pair's newest measurement, None if there is none."""
        items = self._pairs.get(pair)
        return now_s - items[-1].at_s if items else None

    def transport(self) -> str:
        """The transport last seen."""
        newest = max((items[-1] for items in self._pairs.values()), key=lambda item: item.at_s, default=None)
        return newest.transport if newest else ""


@dataclass(frozen=True)
class Probe:
    """A measurement to be made: `puller` pulls from `source`."""

    source: str  # pod
    puller: str  # pod
    pair: Pair
    bytes: int


@dataclass(frozen=True)
class ProbeMemory:
    """The last probe of an object."""

    ended_s: float
    took_s: float
    failed: bool = False


def plan_probe(
    book: LinkBook,
    workers: Sequence[WorkerFacts],
    sources: Sequence[WorkerFacts],
    *,
    now_s: float,
    stale_s: float,
    last: ProbeMemory | None,
) -> Probe | None:
    """The pair whose newest measurement is oldest, if it is stale and a probe is affordable now.

    `sources` are ready workers of the prefill pool, `workers` those of the decode pool.
    """
    if last is not None and now_s - last.ended_s < last.took_s / PROBE_DUTY:
        return None
    stale: list[tuple[float, str, str, Probe]] = []
    rates = {(fact.from_node, fact.to_node): fact.bytes_per_s for fact in book.facts(now_s)}
    for source in sources:
        for puller in workers:
            pair = (source.node, puller.node)
            age_s = book.age_s(pair, now_s)
            if source.node == puller.node or (age_s is not None and age_s < stale_s):
                continue
            size = MIN_PROBE_BYTES if last is not None and last.failed else probe_bytes(rates.get(pair))
            order_s = -(age_s if age_s is not None else float("inf"))
            stale.append((order_s, source.pod, puller.pod, Probe(source.pod, puller.pod, pair, size)))
    return min(stale)[3] if stale else None


def probe_bytes(rate: float | None) -> int:
    """As much as takes about a tenth of a second, so that even a slow link is probed often enough."""
    if rate is None:
        return MAX_PROBE_BYTES
    return int(min(MAX_PROBE_BYTES, max(MIN_PROBE_BYTES, rate * PROBE_TARGET_S)))


def _is_same(sample: LinkSample, at_s: float, item: Measurement) -> bool:
    # A report's ages are taken at slightly different moments.
    return (
        sample.bytes == item.bytes and abs(sample.busy_s - item.busy_s) < 1e-6 and abs(at_s - item.at_s) < 3.0
    )
