"""Local search for the cheapest placement: greedy from several seeds, then moves until none helps.

Deterministic and bounded. Exact optima for small instances are kept in the tests as a yardstick.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from phasesplit.api.names import Pool
from phasesplit.planner.placement_state import Placement, Problem, how_many_fit

_SMALL = 64  # up to here every node is a seed and every exchange is tried
_SEEDS_PER_LEVEL = 2
_IMPROVED = 2  # of the fillings of a large problem, how many are worth improving
_ROUNDS = 6
_EPSILON = 1e-15


def search(problem: Problem, start: Placement, wanted: Mapping[Pool, int]) -> Placement:
    """`wanted` further pods per pool added to `start` as cheaply as found; fewer when they do not fit."""
    order = placing_order(wanted, start.totals)
    if not order:
        return start
    filled = []
    for seed in _seeds(problem, start, wanted):
        found = _filled(start, order, seed)
        filled.append(found)
        complete = sum(found.totals.values()) == sum(start.totals.values()) + len(order)
        if complete and len(problem.nodes) <= _SMALL:
            # Also begun with all of one pool around the seed, then all of the other. Where not everything
            # fits only the order along the ratio leaves a share for both pools.
            grouped = sorted(order)
            filled += [_filled(start, grouped, seed), _filled(start, grouped[::-1], seed)]
    filled.sort(key=_rank)
    kept = filled if len(problem.nodes) <= _SMALL else filled[:_IMPROVED]
    for found in kept:
        _improve(found)
    return min(kept, key=_rank, default=start)


def placing_order(wanted: Mapping[Pool, int], present: Mapping[Pool, int]) -> list[Pool]:
    """The pods one by one along the final ratio, decode first: every beginning of it serves."""
    final = {pool: present[pool] + wanted.get(pool, 0) for pool in Pool}
    placed, order = dict(present), []
    left = {pool: wanted.get(pool, 0) for pool in Pool}
    while any(left.values()):
        choices = [pool for pool in (Pool.DECODE, Pool.PREFILL) if left[pool]]
        pool = min(choices, key=lambda item: (placed[item] + 0.5) / final[item])
        placed[pool] += 1
        left[pool] -= 1
        order.append(pool)
    return order


def _rank(placement: Placement) -> tuple[int, int, float]:
    """More pods first, decode before prefill, then cost with penalties."""
    penalties = sum(
        count * placement.problem.penalty[pool].get(node, 0.0)
        for pool in Pool
        for node, count in placement.counts[pool].items()
    )
    placed = sum(placement.totals.values())
    return -placed, -placement.totals[Pool.DECODE], placement.cost + penalties


class _Candidates:
    """Nodes by class, roomiest last. Pods are only added meanwhile, so a full node never returns."""

    def __init__(self, placement: Placement) -> None:
        problem = placement.problem
        self._placement = placement
        self._by_class = {
            pool: {kind: list(nodes) for kind, nodes in problem.by_class[pool].items()} for pool in Pool
        }

    def best(self, pool: Pool) -> str | None:
        """The cheapest node for one more pod."""
        placement = self._placement
        best, bound = None, math.inf
        for value, kind in placement.open_classes(pool):
            if value < bound:
                node = self._first_fitting(pool, self._by_class[pool].get(kind, []))
                if node is not None and placement.potential(pool, node) < bound - _EPSILON:
                    best, bound = node, placement.potential(pool, node)
        return _nearer_shared(placement, pool, bound) or best

    def _first_fitting(self, pool: Pool, nodes: list[str]) -> str | None:
        placement = self._placement
        if placement.problem.spread[pool]:
            return next((node for node in reversed(nodes) if placement.fits(pool, node)), None)
        while nodes and not placement.fits(pool, nodes[-1]):
            nodes.pop()
        return nodes[-1] if nodes else None


def _filled(start: Placement, order: Sequence[Pool], seed: str | None) -> Placement:
    """Add the pods one by one, each where it is cheapest now; the first at the seed."""
    placement = start.copy()
    candidates = _Candidates(placement)
    hopeless: set[Pool] = set()
    for index, pool in enumerate(order):
        if pool in hopeless:
            continue
        node = seed if index == 0 and seed is not None and placement.fits(pool, seed) else None
        node = node or candidates.best(pool)
        if node is None:
            hopeless.add(pool)
        else:
            placement.add(pool, node)
    return placement


def _seeds(problem: Problem, start: Placement, wanted: Mapping[Pool, int]) -> list[str | None]:
    """Nodes worth beginning at. With pods already there the place is given."""
    if any(start.totals.values()):
        return [None]
    if len(problem.nodes) <= _SMALL:
        return list(problem.nodes)
    return list(_group_seeds(problem, wanted))


def _group_seeds(problem: Problem, wanted: Mapping[Pool, int]) -> Iterator[str]:
    """A roomy node in each of the groups, nearest level first, that hold everything most tightly."""
    keys = problem.topology.group_keys()
    size = {
        pool: {
            node: how_many_fit(problem.requests[pool], problem.room[node])
            for node in problem.nodes
            if node in problem.eligible[pool]
        }
        for pool in Pool
    }
    depth = len(next(iter(keys.values()), ()))
    total = sum(wanted.values())
    given: set[str] = set()
    for level in range(depth + 1):
        groups: dict[str, list[str]] = {}
        for node in problem.nodes:
            place = keys[node][level] if level < depth else "all"
            if place is not None:
                groups.setdefault(place, []).append(node)
        capacity = {
            value: sum(max(size[pool].get(node, 0) for pool in Pool) for node in members)
            for value, members in groups.items()
        }
        sufficient = [value for value in groups if capacity[value] >= total]
        ranked = sorted(
            sufficient or groups, key=lambda v: (capacity[v] if sufficient else -capacity[v], str(v))
        )
        for value in ranked[:_SEEDS_PER_LEVEL]:
            node = max(groups[value], key=lambda name: (size[Pool.DECODE].get(name, 0), name))
            if node not in given:
                given.add(node)
                yield node


def _improve(placement: Placement) -> None:
    """Move single pods, then exchange pairs, until nothing helps or the rounds are spent."""
    for _ in range(_ROUNDS):
        moved = _move_each(placement)
        moved = _refill_each(placement) or moved
        if len(placement.problem.nodes) <= _SMALL:
            moved = _exchange_each(placement) or moved
        if not moved:
            return


def _refill_each(placement: Placement) -> bool:
    """Take a whole pool away and place it anew: the best answer to where the other pool is."""
    improved = False
    for pool in (Pool.DECODE, Pool.PREFILL):
        before = _rank(placement)
        old = [node for node, count in sorted(placement.movable[pool].items()) for _ in range(count)]
        for node in old:
            placement.remove(pool, node)
        new = []
        for _ in old:
            target = _cheaper_than(placement, pool, math.inf)
            if target is None:
                break
            placement.add(pool, target)
            new.append(target)
        if _rank(placement) < (before[0], before[1], before[2] - _EPSILON):
            improved = True
            continue
        for node in new:
            placement.remove(pool, node)
        for node in old:
            placement.add(pool, node)
    return improved


def _move_each(placement: Placement) -> bool:
    """Try every movable pod at its best other node."""
    improved = False
    for pool in (Pool.DECODE, Pool.PREFILL):
        for node in sorted(placement.movable[pool]):
            while placement.movable[pool].get(node) and _move_one(placement, pool, node):
                improved = True
    return improved


def _move_one(placement: Placement, pool: Pool, node: str) -> bool:
    placement.remove(pool, node)
    target = _cheaper_than(placement, pool, placement.potential(pool, node) - _EPSILON)
    placement.add(pool, target or node)
    return target is not None


def _cheaper_than(placement: Placement, pool: Pool, bound: float) -> str | None:
    """The cheapest node for one more pod, if it is below the bound."""
    best: str | None = None
    for value, kind in placement.open_classes(pool):
        if value >= bound:
            continue
        nodes = placement.problem.by_class[pool].get(kind, ())
        found = next((name for name in reversed(nodes) if placement.fits(pool, name)), None)
        if found is not None and placement.potential(pool, found) < bound:
            best, bound = found, placement.potential(pool, found)
    return _nearer_shared(placement, pool, bound) or best


def _nearer_shared(placement: Placement, pool: Pool, bound: float) -> str | None:
    """A node that also holds the other pool, if one is below the bound."""
    best: str | None = None
    for node in sorted(placement.shared_nodes(pool)):
        value = placement.potential(pool, node)
        if value < bound - _EPSILON and placement.fits(pool, node):
            best, bound = node, value
    return best


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
    before = _rank(placement)
    placement.remove(Pool.PREFILL, prefill_node)
    placement.remove(Pool.DECODE, decode_node)
    if placement.fits(Pool.PREFILL, decode_node) and placement.fits(Pool.DECODE, prefill_node):
        placement.add(Pool.PREFILL, decode_node)
        placement.add(Pool.DECODE, prefill_node)
        if _rank(placement)[2] < before[2] - _EPSILON:
            return True
        placement.remove(Pool.PREFILL, decode_node)
        placement.remove(Pool.DECODE, prefill_node)
    placement.add(Pool.PREFILL, prefill_node)
    placement.add(Pool.DECODE, decode_node)
    return False
