"""Moves that make a placement cheaper: one pod, two at once, a whole pool anew.

Each keeps what is fixed, never loses a pod, and is undone when it does not help.
"""

import math

from phasesplit.api.names import Pool
from phasesplit.planner.placement_state import Placement

SMALL = 64  # up to this many nodes every exchange and every fast link is tried
EPSILON = 1e-15
FAST_LINKS = 32
_ROUNDS = 6


def rank(placement: Placement) -> tuple[int, int, float]:
    """More pods first, decode before prefill, then cost with penalties."""
    penalties = sum(
        count * placement.problem.penalty[pool].get(node, 0.0)
        for pool in Pool
        for node, count in placement.counts[pool].items()
    )
    placed = sum(placement.totals.values())
    return -placed, -placement.totals[Pool.DECODE], placement.cost + penalties


def improve(placement: Placement) -> None:
    """Move single pods, then exchange pairs, until nothing helps or the rounds are spent."""
    for _ in range(_ROUNDS):
        moved = move_each(placement)
        moved = refill_each(placement) or moved
        if len(placement.problem.nodes) <= SMALL:
            moved = _exchange_each(placement) or moved
            moved = _move_pairs(placement) or moved
        if not moved:
            return


def refill_each(placement: Placement) -> bool:
    """Take a whole pool away and place it anew: the best answer to where the other pool is."""
    improved = False
    for pool in (Pool.DECODE, Pool.PREFILL):
        before = rank(placement)
        old = [node for node, count in sorted(placement.movable[pool].items()) for _ in range(count)]
        for node in old:
            placement.remove(pool, node)
        new = []
        for _ in old:
            target = cheaper_than(placement, pool, math.inf)
            if target is None:
                break
            placement.add(pool, target)
            new.append(target)
        if rank(placement) < (before[0], before[1], before[2] - EPSILON):
            improved = True
            continue
        for node in new:
            placement.remove(pool, node)
        for node in old:
            placement.add(pool, node)
    return improved


def move_each(placement: Placement) -> bool:
    """Try every movable pod at its best other node."""
    improved = False
    for pool in (Pool.DECODE, Pool.PREFILL):
        for node in sorted(placement.movable[pool]):
            while placement.movable[pool].get(node) and _move_one(placement, pool, node):
                improved = True
    return improved


def _move_one(placement: Placement, pool: Pool, node: str) -> bool:
    placement.remove(pool, node)
    target = cheaper_than(placement, pool, placement.potential(pool, node) - EPSILON)
    placement.add(pool, target or node)
    return target is not None


def cheaper_than(placement: Placement, pool: Pool, bound: float) -> str | None:
    """The cheapest node for one more pod, if it is below the bound."""
    cheapest = placement.cheapest_class(pool)
    if cheapest is None or cheapest[0] >= bound:
        return nearer_shared(placement, pool, bound)
    value, kind = cheapest
    best = _first_fitting(placement, pool, kind)
    if best is not None and placement.potential(pool, best) <= value:
        return nearer_shared(placement, pool, value) or best
    best = None
    for value, kind in placement.open_classes(pool):
        if value >= bound:
            continue
        found = _first_fitting(placement, pool, kind)
        if found is not None and placement.potential(pool, found) < bound:
            best, bound = found, placement.potential(pool, found)
    return nearer_shared(placement, pool, bound) or best


def _first_fitting(placement: Placement, pool: Pool, kind: int) -> str | None:
    """The roomiest node of a class that may take one more."""
    nodes = placement.problem.by_class[pool].get(kind, ())
    return next((name for name in reversed(nodes) if placement.fits(pool, name)), None)


def nearer_shared(placement: Placement, pool: Pool, bound: float) -> str | None:
    """A node that also holds the other pool, if one is below the bound."""
    best: str | None = None
    for node in sorted(placement.shared_nodes(pool)):
        value = placement.potential(pool, node)
        if value < bound - EPSILON and placement.fits(pool, node):
            best, bound = node, value
    return best


def _move_pairs(placement: Placement) -> bool:
    """Move one pod of each pool at once to the ends of a fast link; singly neither would go."""
    improved = False
    for one, other in placement.problem.topology.fastest_measured()[:FAST_LINKS]:
        if not all(placement.movable[pool] for pool in Pool):
            break
        before = rank(placement)[2]
        old = {
            pool: max(sorted(placement.movable[pool]), key=lambda n: placement.potential(pool, n))
            for pool in Pool
        }
        for pool, node in old.items():
            placement.remove(pool, node)
        if placement.fits(Pool.PREFILL, one):
            placement.add(Pool.PREFILL, one)
            if placement.fits(Pool.DECODE, other):
                placement.add(Pool.DECODE, other)
                if rank(placement)[2] < before - EPSILON:
                    improved = True
                    continue
                placement.remove(Pool.DECODE, other)
            placement.remove(Pool.PREFILL, one)
        for pool, node in old.items():
            placement.add(pool, node)
    return improved


def _exchange_each(placement: Placement) -> bool:
    """Exchange a prefill pod of one node with a decode pod of another, where that is cheaper."""
    improved = False
    prefill, decode = placement.movable[Pool.PREFILL], placement.movable[Pool.DECODE]
    for one in sorted(prefill):
        for other in sorted(decode):
            if one != other and prefill.get(one) and decode.get(other):
                improved = _exchange(placement, one, other) or improved
    return improved


def _exchange(placement: Placement, prefill_node: str, decode_node: str) -> bool:
    before = rank(placement)
    placement.remove(Pool.PREFILL, prefill_node)
    placement.remove(Pool.DECODE, decode_node)
    if placement.fits(Pool.PREFILL, decode_node) and placement.fits(Pool.DECODE, prefill_node):
        placement.add(Pool.PREFILL, decode_node)
        placement.add(Pool.DECODE, prefill_node)
        if rank(placement)[2] < before[2] - EPSILON:
            return True
        placement.remove(Pool.PREFILL, decode_node)
        placement.remove(Pool.DECODE, prefill_node)
    placement.add(Pool.PREFILL, prefill_node)
    placement.add(Pool.DECODE, decode_node)
    return False
