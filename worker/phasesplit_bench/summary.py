"""Numbers of a run from its results. Pure. Failures and refusals count as misses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phasesplit_bench.client import Result

LATE_S = 0.05  # a client later than this at p99 measures itself


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one latency, in seconds. None without any value."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run."""

    requests: int
    finished: int
    rejected: int
    failed: int
    duration_s: float
    request_rate_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    second_token_gap_s: Quantiles
    e2e_s: Quantiles
    attained: int | None  # None without targets
    attainment: float | None
    goodput_per_s: float | None
    late_p99_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def quantile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between closest ranks."""
    if not values:
        return None
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def is_attained(result: Result, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Finished with every target met."""
    if not result.is_finished or result.ttft_s is None:
        return False
    if ttft_s is not None and result.ttft_s > ttft_s:
        return False
    return tpot_s is None or result.tpot_s is None or result.tpot_s <= tpot_s


def summarise(
    results: Sequence[Result],
    *,
    ttft_target_s: float | None = None,
    tpot_target_s: float | None = None,
    warmup_s: float = 0.0,
) -> Summary:
    """The run without its warm-up."""
    kept = [result for result in results if result.start_s >= warmup_s]
    finished = [result for result in kept if result.is_finished]
    starts = [result.start_s for result in kept]
    ends = [result.start_s + (result.e2e_s or 0.0) for result in kept]
    duration_s = max(max(ends) - min(starts), 1e-9) if kept else 0.0
    has_targets = ttft_target_s is not None or tpot_target_s is not None
    attained = (
        sum(is_attained(result, ttft_target_s, tpot_target_s) for result in kept) if has_targets else None
    )

    def per_second(count: float) -> float:
        return count / duration_s if duration_s else 0.0

    return Summary(
        requests=len(kept),
        finished=len(finished),
        rejected=sum(result.is_rejected for result in kept),
        failed=sum(not result.is_finished and not result.is_rejected for result in kept),
        duration_s=duration_s,
        request_rate_per_s=per_second(len(kept)),
        prompt_tokens_per_s=per_second(sum(result.prompt_tokens for result in finished)),
        output_tokens_per_s=per_second(sum(result.output_tokens for result in finished)),
        ttft_s=_quantiles([result.ttft_s for result in finished]),
        tpot_s=_quantiles([result.tpot_s for result in finished]),
        second_token_gap_s=_quantiles([result.second_token_gap_s for result in finished]),
        e2e_s=_quantiles([result.e2e_s for result in finished]),
        attained=attained,
        attainment=attained / len(kept) if attained is not None and kept else None,
        goodput_per_s=per_second(attained) if attained is not None else None,
        late_p99_s=quantile([result.late_s for result in kept], 99),
    )


def _quantiles(values: Sequence[float | None]) -> Quantiles:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else None
    return Quantiles(quantile(known, 50), quantile(known, 95), quantile(known, 99), mean)
