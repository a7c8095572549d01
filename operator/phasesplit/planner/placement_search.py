"""Local search for the cheapest placement: greedy from several seeds, then moves until none helps.

Deterministic and bounded. Exact optima for small instances are kept in the tests as a yardstick.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from phasesplit.api.names import Pool
from phasesplit.planner.placement_deep import deepen
from phasesplit.planner.placement_moves import EPSILON, FAST_LINKS, SMALL, improve, nearer_shared, rank
from phasesplit.planner.placement_order import placing_order
from phasesplit.planner.placement_state import OTHER, Placement, Problem, how_many_fit

_SEEDS_PER_LEVEL = 1
# Of the fillings, how many are worth improving.
_IMPROVED = 2
_IMPROVED_OF_SMALL = 16
_DEEPENED = 4
_FEW_PODS = 32  # up to here exchanges of several pods are affordable, and matter

Seed = Mapping[Pool, str]  # node of the first pod of a pool


def search(problem: Problem, start: Placement, wanted: Mapping[Pool, int]) -> Placement:
    """`wanted` further pods per pool added to `start` as cheaply as found; fewer when they do not fit."""
    order = placing_order(wanted, start.totals)
    if not order:
        return start
    filled = [found for seed in _seeds(problem, start, wanted) for found in _begin(start, order, seed)]
    small = len(problem.nodes) <= SMALL
    kept = _best_distinct(filled, _IMPROVED_OF_SMALL if small else _IMPROVED)
    for found in kept:
        improve(found)
    if small and len(order) <= _FEW_PODS:
        kept = [deepen(found) for found in _best_distinct(kept, _DEEPENED)]
    return min(kept, key=rank, default=start)


def _begin(start: Placement, order: Sequence[Pool], seed: Seed) -> list[Placement]:
    """Fillings from one seed."""
    found = _filled(start, order, seed)
    complete = sum(found.totals.values()) == sum(start.totals.values()) + len(order)
    if not complete or len(start.problem.nodes) > SMALL:
        return [found]
    # Also begun with all of one pool around the seed, then all of the other. Where not everything fits
    # only the order along the ratio leaves a share for both pools.
    grouped = sorted(order)
    return [found, _filled(start, grouped, seed), _filled(start, grouped[::-1], seed)]


def _best_distinct(filled: Sequence[Placement], count: int) -> list[Placement]:
    """The cheapest fillings, each arrangement once."""
    kept: list[Placement] = []
    seen: set[tuple[tuple[Pool, tuple[tuple[str, int], ...]], ...]] = set()
    for found in sorted(filled, key=rank):
        arrangement = tuple((pool, tuple(sorted(found.counts[pool].items()))) for pool in Pool)
        if arrangement not in seen:
            seen.add(arrangement)
            kept.append(found)
        if len(kept) == count:
            break
    return kept


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
        cheapest = placement.cheapest_class(pool)
        if cheapest is None:
            return None
        value, kind = cheapest
        best = self._first_fitting(pool, self._by_class[pool].get(kind, []))
        if best is not None and placement.potential(pool, best) <= value:
            return nearer_shared(placement, pool, value) or best
        best, bound = None, math.inf
        for value, kind in placement.open_classes(pool):
            if value < bound:
                node = self._first_fitting(pool, self._by_class[pool].get(kind, []))
                if node is not None and placement.potential(pool, node) < bound - EPSILON:
                    best, bound = node, placement.potential(pool, node)
        return nearer_shared(placement, pool, bound) or best

    def _first_fitting(self, pool: Pool, nodes: list[str]) -> str | None:
        placement = self._placement
        if placement.problem.spread[pool]:
            return next((node for node in reversed(nodes) if placement.fits(pool, node)), None)
        while nodes and not placement.fits(pool, nodes[-1]):
            nodes.pop()
        return nodes[-1] if nodes else None


def _filled(start: Placement, order: Sequence[Pool], seed: Seed) -> Placement:
    """Add the pods one by one, each where it is cheapest now; the first ones at the seed."""
    placement = start.copy()
    candidates = _Candidates(placement)
    hopeless: set[Pool] = set()
    for pool in order:
        if pool in hopeless:
            continue
        # While the other pool is nowhere all nodes cost the same: stay at the seed.
        alone = not placement.totals[OTHER[pool]]
        node = seed.get(pool) if alone or not placement.totals[pool] else None
        if node is None or not placement.fits(pool, node):
            node = candidates.best(pool)
        if node is None:
            hopeless.add(pool)
        else:
            placement.add(pool, node)
    return placement


def _seeds(problem: Problem, start: Placement, wanted: Mapping[Pool, int]) -> list[Seed]:
    """Where to begin. With pods already there the place is given."""
    if any(start.totals.values()):
        return [{}]
    links = [
        {Pool.PREFILL: one, Pool.DECODE: other}
        for one, other in problem.topology.fastest_measured()[:FAST_LINKS]
        if start.fits(Pool.PREFILL, one) and start.fits(Pool.DECODE, other)
    ]
    nodes = problem.nodes if len(problem.nodes) <= SMALL else list(_group_seeds(problem, wanted))
    return [
        *links[: FAST_LINKS if len(problem.nodes) <= SMALL else 1],
        *({pool: n} for n in nodes for pool in Pool),
    ]


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
