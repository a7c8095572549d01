"""What is known about the links between nodes, and when to measure one on purpose. Pure.

Bandwidth is bytes over the time the socket was busy. A busy processor makes a link look slower than it is,
never faster, so the best of the last three measurements counts; a link that looks much slower than before
is measured again at once, so that a real change shows within seconds. Samples age; a pair without a fresh
one is probed, at no more than 1 % of the time while that keeps its measurement fresh.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phasesplit.api.reports import LinkSample
from phasesplit.planner.facts import LinkFacts, WorkerFacts
from phasesplit.planner.links import MAX_AGE_S

Pair = tuple[str, str]  # node of the prefill side, node of the decode side

# Measurements of one pair that are compared, each of at least so many bytes: less can hide in the buffers
# and bursts that lie along the way.
MEASUREMENTS = 3
MEASUREMENT_BYTES = 1 << 20
# Samples this far behind the newest one of a pair say nothing new.
HORIZON_S = 30.0
# A pair this much slower than before is in doubt until it has been measured often enough.
DOUBT_SHARE = 0.5
DOUBT_DUTY = 0.5
# Less than this says more about latency than about bandwidth.
MIN_BYTES = 64 << 10
FORGET_S = 600.0
MAX_SAMPLES_PER_PAIR = 64

MIN_PROBE_BYTES = 1 << 20
MAX_PROBE_BYTES = 2 << 20
PROBE_TARGET_S = 0.5
PROBE_DUTY = 0.01
# However long a probe takes on a slow link, the next comes before the last is too old to be believed.
MAX_PROBE_WAIT_S = MAX_AGE_S / 2


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
    _settled: dict[Pair, float] = field(default_factory=dict)  # the last rate that was certain, bytes/s
    _doubted_at_s: dict[Pair, float] = field(default_factory=dict)  # the last measurement that was in doubt

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
            pair = (sample.from_node, sample.to_node)
            if self.is_in_doubt(pair):
                self._doubted_at_s[pair] = known[-1].at_s

    def forget_old(self, now_s: float) -> None:
        """Drop pairs that nobody has used for long."""
        for pair in [pair for pair, items in self._pairs.items() if items[-1].at_s < now_s - FORGET_S]:
            del self._pairs[pair]
            self._settled.pop(pair, None)
            self._doubted_at_s.pop(pair, None)

    def facts(self, now_s: float) -> tuple[LinkFacts, ...]:
        """The current estimate of every known pair; `settled` when it rests on enough measurements."""
        found = []
        for pair, items in sorted(self._pairs.items()):
            rates = _rates(items)
            settled = len(rates) >= MEASUREMENTS
            if settled:
                self._settled[pair] = max(rates)
            elif pair in self._settled:
                # One measurement that says about what was certain before confirms it.
                settled = DOUBT_SHARE < max(rates) / self._settled[pair] < 1 / DOUBT_SHARE
            age_s = max(0.0, now_s - items[-1].at_s)
            found.append(LinkFacts(*pair, max(rates), age_s, settled=settled))
        return tuple(found)

    def is_in_doubt(self, pair: Pair) -> bool:
        """Does the newest measurement say something else than before, and is it too early to believe it?"""
        items = self._pairs.get(pair)
        if not items:
            return False
        rates = _rates(items)
        before = self._settled.get(pair)
        if len(rates) >= MEASUREMENTS:
            return rates[0] < DOUBT_SHARE * max(rates)
        return before is None or rates[0] < DOUBT_SHARE * max(*rates, before)

    def is_suspect(self, pair: Pair) -> bool:
        """In doubt itself, or not measured since a link of one of its nodes came into doubt."""
        items = self._pairs.get(pair)
        known_at_s = items[-1].at_s if items else -math.inf
        return self.is_in_doubt(pair) or any(
            at_s > known_at_s for other, at_s in self._doubted_at_s.items() if set(other) & set(pair)
        )

    def transfer_s(self, pair: Pair, num_bytes: int) -> float | None:
        """How long a link is busy with so many bytes, at the best of its last measurements."""
        items = self._pairs.get(pair)
        return num_bytes / max(_rates(items)) if items else None

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
    waited_s = math.inf if last is None else now_s - last.ended_s
    took_s = 0.0 if last is None else last.took_s
    stale: list[tuple[float, str, str, Probe]] = []
    rates = {(fact.from_node, fact.to_node): fact.bytes_per_s for fact in book.facts(now_s)}
    for source in sources:
        for puller in workers:
            pair = (source.node, puller.node)
            age_s = book.age_s(pair, now_s)
            doubt = book.is_suspect(pair)
            wait_s = min(took_s / (DOUBT_DUTY if doubt else PROBE_DUTY), MAX_PROBE_WAIT_S)
            if source.node == puller.node or waited_s < wait_s:
                continue
            if not doubt and age_s is not None and age_s < stale_s:
                continue
            size = MIN_PROBE_BYTES if last is not None and last.failed else probe_bytes(rates.get(pair))
            order_s = -(age_s if age_s is not None else math.inf)
            stale.append((order_s, source.pod, puller.pod, Probe(source.pod, puller.pod, pair, size)))
    return min(stale)[3] if stale else None


def _rates(items: Sequence[Measurement]) -> list[float]:
    """Bytes per second of the last measurements, newest first; small samples are put together."""
    rates: list[float] = []
    size, busy_s = 0, 0.0
    for item in reversed(items):
        if item.at_s < items[-1].at_s - HORIZON_S or len(rates) == MEASUREMENTS:
            break
        size, busy_s = size + item.bytes, busy_s + item.busy_s
        if size >= MEASUREMENT_BYTES:
            rates.append(size / busy_s)
            size, busy_s = 0, 0.0
    return rates or [size / busy_s]


def probe_bytes(rate: float | None) -> int:
    """As much as takes about half a second at most, so that even a slow link is probed often enough."""
    if rate is None:
        return MAX_PROBE_BYTES
    return int(min(MAX_PROBE_BYTES, max(MIN_PROBE_BYTES, rate * PROBE_TARGET_S)))


def _is_same(sample: LinkSample, at_s: float, item: Measurement) -> bool:
    # A report's ages are taken at slightly different moments.
    return (
        sample.bytes == item.bytes and abs(sample.busy_s - item.busy_s) < 1e-6 and abs(at_s - item.at_s) < 3.0
    )
