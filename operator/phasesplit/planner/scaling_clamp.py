"""Fitting wanted counts into what exists: ratio-preserving, never above what was wanted."""

from collections.abc import Callable, Mapping

from phasesplit.api.names import Pool

Counts = Mapping[Pool, int]


def shrink_until(wanted: Counts, fits: Callable[[Counts], bool]) -> dict[Pool, int]:
    """Reduce both pools along their ratio until they fit.

    The pool that is furthest above its share gives first. At one worker each the prefill pool goes to
    zero: one worker that decodes can serve colocated.
    """
    counts = {pool: max(0, wanted.get(pool, 0)) for pool in Pool}
    total = sum(counts.values())
    while not fits(counts) and sum(counts.values()) > 0:
        counts[_next_to_give(counts, wanted, total)] -= 1
    return counts


def shrink_to_total(wanted: Counts, most: int) -> dict[Pool, int]:
    """At most that many workers over both pools."""
    return shrink_until(wanted, lambda counts: sum(counts.values()) <= most)


def repair_one_sided(counts: Counts) -> dict[Pool, int]:
    """Workers that can only prefill serve nobody: the last of them decodes instead."""
    repaired = {pool: counts.get(pool, 0) for pool in Pool}
    if repaired[Pool.DECODE] == 0 and repaired[Pool.PREFILL] > 0:
        repaired[Pool.PREFILL] -= 1
        repaired[Pool.DECODE] = 1
    return repaired


def _next_to_give(counts: Counts, wanted: Counts, total: int) -> Pool:
    prefill, decode = counts[Pool.PREFILL], counts[Pool.DECODE]
    if prefill == 0:
        return Pool.DECODE
    if decode == 0:
        return Pool.PREFILL
    if decode == 1 or prefill == 1:
        # Neither goes to zero while the other has more than one to give.
        if decode == 1:
            return Pool.PREFILL
        return Pool.DECODE
    now = prefill + decode
    excess = prefill * total - wanted[Pool.PREFILL] * now
    return Pool.PREFILL if excess > 0 or (excess == 0 and prefill > decode) else Pool.DECODE
