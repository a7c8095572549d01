"""A regime of load, targets and link; what a mode kept of it, and whether choosing it was right. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from helpers_truth import Shape
from phasesplit.api.routing import ServedMode
from phasesplit_bench.client import Result
from phasesplit_bench.summary import is_attained, quantile

EITHER = 0.05  # modes closer than this are equally right


@dataclass(frozen=True, slots=True)
class Regime:
    """Load, targets and link, and what the literature expects of them."""

    name: str
    shape: Shape
    ttft_s: float
    tpot_s: float
    expected: ServedMode
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """What one mode did with the trace."""

    attained: float  # share of requests
    ttft_p90_s: float
    tpot_p90_s: float

    @classmethod
    def of(cls, results: Sequence[Result], regime: Regime) -> "Served":
        finished = [result for result in results if result.is_finished]
        return cls(
            mean(is_attained(result, regime.ttft_s, regime.tpot_s) for result in results),
            quantile([result.ttft_s for result in finished if result.ttft_s is not None], 90) or 0.0,
            quantile([result.tpot_s for result in finished if result.tpot_s is not None], 90) or 0.0,
        )


def advantage(one: float, other: float) -> float:
    """Of one share over another, as a share of the lesser; 0 when both are nothing."""
    least = min(one, other)
    if least == 0:
        return float("inf") if one > 0 else -float(other > 0) * 1e9
    return (one - other) / least


def is_right(chose_split: bool, split: float, colocated: float) -> bool:
    """Did the chosen mode keep more in target, or do both keep about the same?"""
    gain = advantage(split, colocated)
    return abs(gain) <= EITHER or chose_split == (gain > 0)
