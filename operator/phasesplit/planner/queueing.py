"""Waiting times in closed form: several servers, general service times, priorities.

Knows arrivals and service moments only. Sakasegawa's approximation for many servers, Cobham's law
for priorities, exponential tails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stream:
    """One class of arrivals at a station."""

    rate_per_s: float
    mean_s: float
    second_moment_s2: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of one class: mean, and the chance of waiting at all. Infinite when overloaded."""

    mean_s: float
    probability: float

    def share_within(self, limit_s: float) -> float:
        """Share of the requests that wait no longer than that."""
        if not limit_s >= 0 or math.isinf(self.mean_s):
            return 0.0
        if self.mean_s <= 0:
            return 1.0
        return 1 - self.probability * math.exp(-limit_s * self.probability / self.mean_s)

    def quantile_s(self, quantile: float) -> float:
        """Wait that `quantile` of the requests stay within, by an exponential tail."""
        if math.isinf(self.mean_s):
            return math.inf
        if self.mean_s <= 0 or self.probability <= 1 - quantile:
            return 0.0
        return self.mean_s / self.probability * math.log(self.probability / (1 - quantile))


def utilisation(streams: Sequence[Stream], servers: int) -> float:
    """Share of the servers' time that the streams need."""
    if servers <= 0:
        return math.inf
    return sum(stream.rate_per_s * stream.mean_s for stream in streams) / servers


def waits(streams: Sequence[Stream], servers: int) -> list[Wait]:
    """Wait of each stream at a station of equal servers; higher priority goes first, no preemption."""
    total_rate = sum(stream.rate_per_s for stream in streams)
    if total_rate <= 0:
        return [Wait(0.0, 0.0) for _ in streams]
    load = utilisation(streams, servers)
    residual_s = _residual_s(streams, servers, min(load, 0.999))
    # The chance of waiting at c servers, consistent with Sakasegawa's mean.
    probability = min(1.0, min(load, 1.0) ** (math.sqrt(2 * (servers + 1)) - 1)) if servers > 0 else 1.0
    return [_wait(stream, streams, servers, residual_s, probability) for stream in streams]


def _residual_s(streams: Sequence[Stream], servers: int, load: float) -> float:
    """Mean wait times (1 - load): what the priorities then divide."""
    if servers <= 0:
        return math.inf
    total_rate = sum(stream.rate_per_s for stream in streams)
    mean_s = sum(stream.rate_per_s * stream.mean_s for stream in streams) / total_rate
    second = sum(stream.rate_per_s * stream.second_moment_s2 for stream in streams) / total_rate
    variability = second / mean_s**2 if mean_s > 0 else 1.0  # 1 + cv^2
    return float(variability / 2 * mean_s * load ** (math.sqrt(2 * (servers + 1)) - 1) / servers)


def _wait(
    stream: Stream, streams: Sequence[Stream], servers: int, residual_s: float, probability: float
) -> Wait:
    above = utilisation([other for other in streams if other.priority > stream.priority], servers)
    to_here = utilisation([other for other in streams if other.priority >= stream.priority], servers)
    if to_here >= 1:
        return Wait(math.inf, 1.0)
    return Wait(residual_s / ((1 - above) * (1 - to_here)), probability)


def poisson_share(mean: float, count: float) -> float:
    """Chance that a Poisson count stays within `count`, linear between whole numbers."""
    if count < 0:
        return 0.0
    if mean <= 0:
        return 1.0
    if mean > 200:
        return normal_share((count + 0.5 - mean) / math.sqrt(mean))
    whole = math.floor(min(count, 1000.0))
    term = total = math.exp(-mean)
    for index in range(1, whole + 1):
        term *= mean / index
        total += term
    following = term * mean / (whole + 1)
    return min(1.0, total + (min(count, 1000.0) - whole) * following)


def compound_share(rate: float, mean: float, second_moment: float, limit: float) -> float:
    """Chance that a Poisson number of amounts sums to at most `limit`; a gamma beside the atom at 0."""
    if limit < 0:
        return 0.0
    none = math.exp(-rate)
    if rate <= 0 or mean <= 0 or none > 1 - 1e-9:
        return 1.0
    total = rate * mean / (1 - none)
    square = (rate * second_moment + (rate * mean) ** 2) / (1 - none)
    variance = max(1e-12 * total * total, square - total * total)
    return none + (1 - none) * gamma_share(total * total / variance, limit * total / variance)


def gamma_share(shape: float, limit: float) -> float:
    """Chance that a gamma of unit scale stays within `limit`; Wilson and Hilferty's cube root if large."""
    if limit <= 0:
        return 0.0
    if shape > 100:
        cube = (limit / shape) ** (1 / 3)
        return normal_share((cube - 1 + 1 / (9 * shape)) * 3 * math.sqrt(shape))
    term = math.exp(shape * math.log(limit) - limit - math.lgamma(shape + 1)) if limit < 700 else 0.0
    if term == 0.0:
        return 1.0 if limit > shape else 0.0
    total, index = term, 0
    while term > 1e-12 * total and index < 2000:
        index += 1
        term *= limit / (shape + index)
        total += term
    return min(1.0, total)


def normal_share(deviations: float) -> float:
    """Chance that a standard normal stays within that many deviations."""
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))


def poisson_quantile(mean: float, quantile: float) -> float:
    """Smallest k that a Poisson count stays within with that probability; normal beyond 200."""
    if mean <= 0:
        return 0.0
    if mean > 200:
        return mean + normal_quantile(quantile) * math.sqrt(mean)
    term = total = math.exp(-mean)
    count = 0
    while total < quantile and count < 1000:
        count += 1
        term *= mean / count
        total += term
    return float(count)


def normal_quantile(quantile: float) -> float:
    """Standard normal quantile, by bisection of erf; accurate to 1e-6."""
    low, high = -8.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        if normal_share(middle) < quantile:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def squared_variation(mean: float, p95: float | None, default: float) -> float:
    """Squared coefficient of variation of a log-normal with that mean and 95th percentile."""
    if p95 is None or mean <= 0 or p95 <= mean:
        return default if p95 is None else 0.0
    # p95 / mean = exp(1.645 s - s^2 / 2); the smaller root, none beyond the largest possible ratio.
    z = 1.6448536
    root = z * z - 2 * math.log(p95 / mean)
    sigma = z - math.sqrt(root) if root > 0 else z
    return math.exp(sigma * sigma) - 1
