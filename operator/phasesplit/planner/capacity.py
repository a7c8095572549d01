"""Searches over plans: the best chunk, the best ratio, the largest load, the fewest workers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasesplit.api.names import Role
from phasesplit.planner.colocated_serving import predict_colocated
from phasesplit.planner.demand import Demand, Hardware, Prediction, scale_demands
from phasesplit.planner.performance import MIN_CHUNK_TOKENS, largest_chunk_tokens
from phasesplit.planner.serving import predict_decoding
from phasesplit.planner.split_serving import predict_split

# Chunk budgets tried, as multiples of the tightest TPOT target in predicted step seconds.
CHUNK_BUDGET_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


MOST_WORKERS = 1024
_FEW_WORKERS = 6  # up to here every ratio is tried
_FACTOR_PRECISION = 1.003
# Load of the busiest part that is still planned for when no number of workers meets the targets.
_PLAIN_UTILISATION = 0.8


def tuned_colocated(
    demands: Sequence[Demand], hardware: Hardware, workers: int, chunk_tokens: int | None = None
) -> Prediction:
    """The best colocated plan over chunk budgets in predicted step seconds, or at the user's budget."""
    if chunk_tokens is not None:
        return predict_colocated(demands, hardware, workers, chunk_tokens)
    budgets = sorted(chunk_budgets(demands, hardware))
    predictions = [predict_colocated(demands, hardware, workers, budget) for budget in budgets]
    return max(predictions, key=lambda item: (item.meets, round(item.attainment, 6), item.chunk_tokens))


def chunk_budgets(demands: Sequence[Demand], hardware: Hardware) -> set[int]:
    """Token budgets worth trying, from the targets."""
    if not demands:
        return {MIN_CHUNK_TOKENS}
    tightest_s = min(demand.tpot_s for demand in demands)
    context = max(demand.prompt_tokens for demand in demands) / 2
    return {
        largest_chunk_tokens(
            hardware.decode_profile,
            tightest_s * factor,
            chunk_context_tokens=context,
            batch=4,
            context_tokens=2 * context,
        )
        for factor in CHUNK_BUDGET_FACTORS
    }


def best_split(demands: Sequence[Demand], hardware: Hardware, workers: int) -> tuple[int, Prediction]:
    """The best number of prefill workers among `workers`, at least one of each.

    More prefill workers raise the share in the TTFT target and lower that in the TPOT target, so with
    many workers only the counts where either begins to fail, and those between, need a look.
    """

    def predict(prefill: int) -> Prediction:
        return predict_split(demands, hardware, prefill, workers - prefill)

    candidates = set(range(1, workers))
    if workers > _FEW_WORKERS:
        prefill_load = predict(1).prefill_utilisation
        decode_load = predict_decoding(demands, hardware.decode_profile, 1, math.inf).utilisation
        enough = _smallest(
            lambda count: _all_reach([item.ttft_attainment for item in predict(count).classes], demands),
            workers - 1,
            least=_least(prefill_load, workers - 1),
        )
        spare = _smallest(
            lambda count: _all_reach(
                [item.tpot_attainment for item in predict(workers - count).classes], demands
            ),
            workers - 1,
            least=_least(decode_load, workers - 1),
        )
        ends = sorted((enough, workers - spare))
        candidates = {*ends, (ends[0] + ends[1]) // 2, min(workers - 1, ends[0] + 1), max(1, ends[1] - 1)}
    options = [(prefill, predict(prefill)) for prefill in sorted(candidates)]
    return max(options, key=lambda item: (item[1].meets, round(item[1].attainment, 6), -item[0]))


def colocated_goodput_factor(
    demands: Sequence[Demand], hardware: Hardware, workers: int, chunk_tokens: int | None = None
) -> float:
    """Largest multiple of the load that some chunk budget serves in target."""
    if chunk_tokens is not None:
        budgets = [chunk_tokens]
    else:
        # The best at this load is likely the best at others, too: the rest are then asked once each.
        likely = tuned_colocated(demands, hardware, workers).chunk_tokens
        budgets = sorted(chunk_budgets(demands, hardware), key=lambda budget: (budget != likely, budget))
    best = 0.0
    for budget in budgets:

        def meets(factor: float, budget: int = budget) -> bool:
            return predict_colocated(scale_demands(demands, factor), hardware, workers, budget).meets

        if best == 0.0 or meets(best * _FACTOR_PRECISION):
            best = max(best, sustainable_factor(meets, start=best or 1.0))
    return best


def capacity_per_worker(
    demands: Sequence[Demand], hardware: Hardware, role: Role, chunk_tokens: int | None = None
) -> float:
    """Requests per second, in this mix, that one worker of a role serves within its targets.

    Prefill is held to TTFT alone and decode to TPOT alone; a colocated worker to both.
    """
    rate = sum(demand.rate_per_s for demand in demands)
    if role is Role.COLOCATED:
        return rate * colocated_goodput_factor(demands, hardware, 1, chunk_tokens)

    def meets(factor: float) -> bool:
        scaled = scale_demands(demands, factor)
        if role is Role.PREFILL:
            found = predict_split(scaled, hardware, 1, MOST_WORKERS).classes
            return _all_reach([item.ttft_attainment for item in found], scaled)
        found = predict_split(scaled, hardware, MOST_WORKERS, 1).classes
        return _all_reach([item.tpot_attainment for item in found], scaled)

    return rate * sustainable_factor(meets)


def split_goodput_factor(demands: Sequence[Demand], hardware: Hardware, workers: int) -> float:
    """Largest multiple of the load that some ratio serves in target."""
    return sustainable_factor(
        lambda factor: best_split(scale_demands(demands, factor), hardware, workers)[1].meets
    )


def sustainable_factor(
    meets: Callable[[float], bool], *, start: float = 1.0, highest: float = 1024.0, lowest: float = 1e-3
) -> float:
    """Largest multiple of the load that still meets every target, to 0.3 %; 0 when none does."""
    low = high = start
    if meets(start):
        while high < highest and meets(high):
            low, high = high, high * 2
    else:
        while not meets(low):
            if low < lowest:
                return 0.0
            low, high = low / 2, low
    while high / low > _FACTOR_PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Need:
    """Fewest workers per role that meet every target; `feasible` False: none do, and these carry the load."""

    prefill: int
    decode: int
    feasible: bool


def needed_split(demands: Sequence[Demand], hardware: Hardware, most: int = MOST_WORKERS) -> Need:
    """Fewest prefill and decode workers. TTFT depends on the former alone, TPOT on the latter."""
    if not demands:
        return Need(1, 1, feasible=True)

    def ttft_meets(count: int) -> bool:
        found = predict_split(demands, hardware, count, most)
        return _all_reach([item.ttft_attainment for item in found.classes], demands)

    def tpot_meets(count: int) -> bool:
        found = predict_split(demands, hardware, most, count)
        return _all_reach([item.tpot_attainment for item in found.classes], demands)

    prefill, prefill_ok = _fewest(
        ttft_meets, lambda count: predict_split(demands, hardware, count, 1).prefill_utilisation, most
    )
    decode, decode_ok = _fewest(
        tpot_meets, lambda count: predict_split(demands, hardware, 1, count).decode_utilisation, most
    )
    if not (prefill_ok and decode_ok):
        return Need(prefill, decode, feasible=False)
    return _raise_until_joint(demands, hardware, prefill, decode, most)


def needed_colocated(
    demands: Sequence[Demand], hardware: Hardware, chunk_tokens: int | None = None, most: int = MOST_WORKERS
) -> tuple[int, bool]:
    """Fewest colocated workers, and whether they meet every target."""
    if not demands:
        return 1, True
    budgets = [chunk_tokens] if chunk_tokens is not None else sorted(chunk_budgets(demands, hardware))

    def meets(count: int) -> bool:
        for index, budget in enumerate(budgets):
            if predict_colocated(demands, hardware, count, budget).meets:
                budgets.insert(0, budgets.pop(index))  # likely to do for the next count, too
                return True
        return False

    return _fewest(
        meets,
        lambda count: tuned_colocated(demands, hardware, count, chunk_tokens).prefill_utilisation,
        most,
    )


def _all_reach(attainments: Sequence[float], demands: Sequence[Demand]) -> bool:
    return all(got >= demand.share for got, demand in zip(attainments, demands, strict=True))


def _fewest(meets: Callable[[int], bool], load: Callable[[int], float], most: int) -> tuple[int, bool]:
    """Smallest count that meets; when none does, the smallest that is not overloaded."""
    if meets(most):
        return _smallest(meets, most), True
    return _smallest(lambda count: load(count) <= _PLAIN_UTILISATION, most), False


def _least(load: float, most: int) -> int:
    """Fewer workers than this are overloaded."""
    return most if load >= most else max(1, math.floor(load) + 1)


def _smallest(holds: Callable[[int], bool], most: int, least: int = 1) -> int:
    """Smallest count from `least` on for which a monotone predicate holds, `most` if none."""
    low, high, stride = least, least, 1
    while high < most and not holds(high):
        low, high, stride = high + 1, min(most, high + stride), stride * 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _raise_until_joint(
    demands: Sequence[Demand], hardware: Hardware, prefill: int, decode: int, most: int
) -> Need:
    """Both targets must hold for the same request: raise the side that helps more."""
    while True:
        found = predict_split(demands, hardware, prefill, decode)
        if found.meets or prefill + decode >= 2 * most:
            return Need(prefill, decode, feasible=found.meets)
        worst = min(found.classes, key=lambda item: item.attainment)
        if worst.ttft_attainment <= worst.tpot_attainment and prefill < most:
            prefill += 1
        else:
            decode += 1
