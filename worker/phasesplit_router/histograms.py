"""Histograms whose buckets can grow: a class's target becomes a bucket bound when it is known.

prometheus-client fixes buckets at creation, but attainment can only be read from buckets that hold
the targets, and targets come with the routing table. Observations of k equal values cost one call.
"""

import bisect
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

_Labels = tuple[str, ...]


class _Series:
    """Counts of one label set. `counts[i]` belongs to `(bounds[i-1], bounds[i]]`, the last to +Inf."""

    __slots__ = ("counts", "total")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.total = 0.0


class Histogram:
    """One metric. Bounds are shared by all its series."""

    def __init__(
        self, name: str, help_text: str, label_names: Sequence[str], bounds: Iterable[float]
    ) -> None:
        self.name = name
        self._help = help_text
        self._label_names = tuple(label_names)
        self._bounds = sorted(set(bounds))
        self._series: dict[_Labels, _Series] = {}

    def add_bound(self, bound: float) -> None:
        """Split a bucket. What it already held counts as above the new bound, where unknown."""
        if bound in self._bounds:
            return
        index = bisect.bisect_left(self._bounds, bound)
        self._bounds.insert(index, bound)
        for series in self._series.values():
            series.counts.insert(index, 0)

    def observe(self, labels: _Labels, value: float, times: int = 1) -> None:
        """Note `times` observations of `value`."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(len(self._bounds))
        series.counts[bisect.bisect_left(self._bounds, value)] += times
        series.total += value * times

    def collect(self) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        family = HistogramMetricFamily(self.name, self._help, labels=self._label_names)
        for labels, series in self._series.items():
            buckets: list[tuple[str, float]] = []
            below = 0
            for bound, count in zip([*self._bounds, float("inf")], series.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), below))
            family.add_metric(labels, buckets, series.total)
        return family


class HistogramCollector(Collector):
    """Gives all histograms to a registry."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = tuple(histograms)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called for every scrape."""
        return [histogram.collect() for histogram in self._histograms]
