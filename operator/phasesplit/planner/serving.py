"""What split and colocated workers share: the decode batch, and the share of requests in target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phasesplit.planner.demand import Demand
from phasesplit.planner.facts import StepProfile
from phasesplit.planner.performance import decode_step_s
from phasesplit.planner.queueing import Stream, Wait, normal_share

# Gauss-Hermite points and weights: exact for the moments of a log-normal that matter here.
_NORMAL_POINTS = (
    (-2.856970, 0.011257),
    (-1.355626, 0.222076),
    (0.0, 0.533333),
    (1.355626, 0.222076),
    (2.856970, 0.011257),
)
# A batch seen over a request's life varies less than at one instant.
_BATCH_AVERAGING = 2.0 / 3.0
MAX_BATCH = 4096.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """The batch of one decode worker."""

    batch: float  # mean
    step_s: float  # as a request sees it: the others plus itself
    slope_s: float  # per sequence
    base_s: float
    context_tokens: float
    utilisation: float

    def share_within(self, tpot_s: float) -> float:
        """Share of requests whose mean step stays within that, as the batch varies."""
        if math.isinf(self.step_s):
            return 0.0
        if self.slope_s <= 0:
            return 1.0 if self.base_s <= tpot_s else 0.0
        others = (tpot_s - self.base_s) / self.slope_s - 1
        if others < 0:
            return 0.0
        deviation = math.sqrt(max(1e-9, _BATCH_AVERAGING * self.batch))
        return normal_share((others + 0.5 - self.batch) / deviation)


def predict_decoding(
    demands: Sequence[Demand], profile: StepProfile, workers: int, kv_tokens: float
) -> Decoding:
    tokens_per_s = sum(demand.rate_per_s * demand.decode_steps for demand in demands)
    if tokens_per_s <= 0:
        context = max((demand.context_tokens for demand in demands), default=0.0)
        return Decoding(0.0, decode_step_s(profile, 1, context), 0.0, profile.base_s, context, 0.0)
    if workers <= 0:
        return Decoding(math.inf, math.inf, 0.0, profile.base_s, 0.0, math.inf)
    context = sum(d.rate_per_s * d.decode_steps * d.context_tokens for d in demands) / tokens_per_s
    slope_s = decode_step_s(profile, 1, context) - profile.base_s
    per_worker = tokens_per_s / workers
    busy = per_worker * slope_s  # at 1 the batch grows without end
    if busy >= 1:
        return Decoding(math.inf, math.inf, slope_s, profile.base_s, context, busy)
    seen_s = (profile.base_s + slope_s) / (1 - busy)
    batch = per_worker * seen_s
    room = batch * context / kv_tokens
    if batch > MAX_BATCH or room >= 1:
        return Decoding(math.inf, math.inf, slope_s, profile.base_s, context, max(busy, room))
    return Decoding(batch, seen_s, slope_s, profile.base_s, context, max(busy, room))


def prompt_lengths(demand: Demand) -> tuple[tuple[float, float, float], ...]:
    """(new tokens, cached tokens, weight): prompts that stand for the class's distribution."""
    return _lengths(demand.new_tokens, demand.cached_tokens, demand.prompt_variation)


@lru_cache(maxsize=256)  # a search asks for the same class at many rates
def _lengths(
    new_tokens: float, cached_tokens: float, variation: float
) -> tuple[tuple[float, float, float], ...]:
    sigma = math.sqrt(math.log(1 + variation))
    factors = [(math.exp(sigma * point - sigma * sigma / 2), weight) for point, weight in _NORMAL_POINTS]
    return tuple(
        (max(1.0, new_tokens * factor), cached_tokens * factor, weight) for factor, weight in factors
    )


Services = Sequence[tuple[float, float]]  # (seconds, weight)


def mean_service_s(services: Services) -> float:
    """Mean over the prompts that stand for a class."""
    return sum(seconds * weight for seconds, weight in services)


def ttft_share(demand: Demand, wait: Wait, services: Services, fixed_s: float = 0.0) -> float:
    """Share within the TTFT target, over the spread of prompt lengths and of waits."""
    return sum(weight * wait.share_within(demand.ttft_s - fixed_s - seconds) for seconds, weight in services)


def build_stream(demand: Demand, services: Services) -> Stream:
    """A class as the arrivals of a station."""
    second = sum(seconds * seconds * weight for seconds, weight in services)
    return Stream(demand.rate_per_s, mean_service_s(services), second, demand.priority)
