"""Exchanges of several pods at once, for the few best placements of small problems.

They cost more to try than `placement_moves` and lead out of placements that no single move improves.
"""

import math
from collections.abc import Iterator

from phasesplit.api.names import Pool
from phasesplit.planner.placement_moves import EPSILON, cheaper_than, improve, move_each, rank, refill_each
from phasesplit.planner.placement_state import Placement

_ROUNDS = 4
_GATHERED = 4  # pods brought to one node at once
_FOLLOWED = 12  # of the gatherings, how many are followed up by single moves


def deepen(placement: Placement) -> Placement:
    """The best found from here on; the placement itself if nothing helps."""
    for _ in range(_ROUNDS):
        found = _gathered(placement)
        if found is None and not _move_two(placement):
            return placement
        placement = found or placement
        improve(placement)
    return placement


def _gathered(placement: Placement) -> Placement | None:
    """Bring some of both pools together on one node and let the others follow, if that helps."""
    before = rank(placement)[2]
    trials: list[tuple[float, int, Placement]] = []
    for node in placement.problem.nodes:
        for prefill, decode in _mixes(placement, node):
            trial = _gather(placement, node, prefill, decode)
            if trial is not None:
                trials.append((rank(trial)[2], len(trials), trial))
    best, least = None, before - EPSILON
    for _, _, trial in sorted(trials)[:_FOLLOWED]:
        move_each(trial)
        refill_each(trial)
        cost = rank(trial)[2]
        if cost < least:
            best, least = trial, cost
    return best


def _mixes(placement: Placement, node: str) -> Iterator[tuple[int, int]]:
    """Numbers of prefill and decode pods worth bringing to a node: a pair of pods, or what fills it."""
    room = max((total for total in range(2, _GATHERED + 1) if any(_holds(placement, node, total))), default=0)
    for total in sorted({2, room} - {0}):
        yield from _holds(placement, node, total)


def _holds(placement: Placement, node: str, total: int) -> Iterator[tuple[int, int]]:
    for prefill in range(total + 1):
        if placement.would_hold(node, prefill, total - prefill):
            yield prefill, total - prefill


def _gather(placement: Placement, node: str, prefill: int, decode: int) -> Placement | None:
    """A copy in which the pods that cost most elsewhere are on the node; None where they do not fit."""
    trial = placement.copy()
    taken: list[Pool] = []
    for pool, count in ((Pool.PREFILL, prefill), (Pool.DECODE, decode)):
        for _ in range(count):
            sources = [name for name in sorted(trial.movable[pool]) if name != node]
            if not sources:
                return None
            values = trial.potentials(pool, sources)
            trial.remove(pool, sources[values.index(max(values))])
            taken.append(pool)
    for pool in taken:
        if not trial.fits(pool, node):
            return None
        trial.add(pool, node)
    return trial


def _move_two(placement: Placement) -> bool:
    """Take any two pods away at once and place them anew, the one or the other first."""
    improved = False
    kinds = [(pool, node) for pool in Pool for node in sorted(placement.movable[pool])]
    for index, one in enumerate(kinds):
        for other in kinds[index:]:
            improved = _replace(placement, one, other) or _replace(placement, other, one) or improved
    return improved


def _replace(placement: Placement, *pods: tuple[Pool, str]) -> bool:
    """Take these pods away and place them anew in this order; undone when it does not help."""
    if any(placement.movable[pool].get(node, 0) < pods.count((pool, node)) for pool, node in pods):
        return False
    before = rank(placement)[2]
    for pool, node in pods:
        placement.remove(pool, node)
    placed = []
    for pool, _ in pods:
        target = cheaper_than(placement, pool, math.inf)
        if target is not None:
            placement.add(pool, target)
            placed.append((pool, target))
    if len(placed) == len(pods) and rank(placement)[2] < before - EPSILON:
        return True
    for pool, node in placed:
        placement.remove(pool, node)
    for pool, node in pods:
        placement.add(pool, node)
    return False
