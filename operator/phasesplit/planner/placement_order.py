"""In which order pods are placed, and which ordinal gets which node, so that every prefix is good."""

from collections.abc import Mapping, Sequence

from phasesplit.api.names import Pool
from phasesplit.planner.placement_state import Placement

_FEW_PODS = 48  # up to here every node is tried as the first of the ordinals


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


def ordinal_order(placement: Placement, start: Placement) -> dict[Pool, list[str]]:
    """Nodes of the movable pods, to be given to ascending ordinals.

    Scaling down takes the highest ordinals along the ratio, so every beginning should be cheap. Built
    forwards from each possible first pair and backwards from the whole; the better one on average wins.
    """
    wanted = {pool: sum(placement.movable[pool].values()) for pool in Pool}
    steps = placing_order(wanted, start.totals)
    built = [_backward_order(placement, steps)]
    if 0 < len(steps) <= _FEW_PODS:
        firsts = sorted(placement.movable[steps[0]])
        built += [_forward_order(placement, start, steps, first) for first in firsts]
    return min(built, key=lambda item: item[0])[1]


def _backward_order(placement: Placement, steps: Sequence[Pool]) -> tuple[float, dict[Pool, list[str]]]:
    """Take away, again and again, the pod whose loss leaves the cheapest rest."""
    rest = placement.copy()
    order: dict[Pool, list[str]] = {pool: [] for pool in Pool}
    left = {pool: sorted(rest.movable[pool]) for pool in Pool}
    total = 0.0
    for pool in reversed(steps):
        values = rest.potentials(pool, left[pool])
        node = left[pool][values.index(max(values))]
        rest.remove(pool, node)
        if node not in rest.movable[pool]:
            left[pool].remove(node)
        order[pool].append(node)
        total += _mean_cost(rest)
    return total, {pool: nodes[::-1] for pool, nodes in order.items()}


def _forward_order(
    placement: Placement, start: Placement, steps: Sequence[Pool], first: str
) -> tuple[float, dict[Pool, list[str]]]:
    """Put back, from a first node on, the pod that is cheapest beside those already there."""
    grown = start.copy()
    left = {pool: dict(placement.movable[pool]) for pool in Pool}
    order: dict[Pool, list[str]] = {pool: [] for pool in Pool}
    total = 0.0
    for index, pool in enumerate(steps):
        total += _mean_cost(grown)
        node = first if index == 0 else min(sorted(left[pool]), key=lambda name: grown.potential(pool, name))
        left[pool][node] -= 1
        if not left[pool][node]:
            del left[pool][node]
        grown.add(pool, node)
        order[pool].append(node)
    return total, order


def _mean_cost(placement: Placement) -> float:
    pairs = placement.totals[Pool.PREFILL] * placement.totals[Pool.DECODE]
    return placement.cost / pairs if pairs else 0.0
