"""Placement plans of all objects: one plan per pass, made anew only when its inputs changed.

Knows which resources other objects were promised by their plans but have not taken yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.cluster.snapshot import Key
from phasesplit.planner.facts import LinkFacts, LoadFacts, NodeFacts, Resources
from phasesplit.planner.placement import plan_placement
from phasesplit.planner.placement_types import Missing, PlacementPlan, PlacementRequest, PoolRequest

_TYPICAL_PROMPT_TOKENS = 512.0
# A link is a new fact for the placement when it is this many times faster or slower than before.
_LINK_CHANGE = 1.5


@dataclass(frozen=True)
class PlacingInput:
    """What the plan of one object depends on, beside other objects' promises."""

    pools: Mapping[Pool, PoolRequest]
    least: Mapping[Pool, int]  # fewest workers a pool ought to have
    largest: Mapping[Pool, int]  # most workers a pool may ever have
    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...]
    levels: tuple[str, ...]
    loads: Sequence[LoadFacts]
    kv_bytes_per_token: int | None


@dataclass(frozen=True)
class Room:
    """How many workers the cluster can hold, existing ones included."""

    by_pool: Mapping[Pool, int]  # while the other pool keeps its size
    total: int  # of both pools together, however they share it
    missing: tuple[Missing, ...] = ()  # what the pools lack for their least size


@dataclass(frozen=True)
class _Kept:
    request: PlacementRequest
    bounds: tuple[Mapping[Pool, int], Mapping[Pool, int]]
    plan: PlacementPlan
    room: Room


class Placer:
    """The plans of all objects."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}

    def forget(self, key: Key) -> None:
        """The object is gone, and so are its promises."""
        self._kept.pop(key, None)

    def place(self, key: Key, given: PlacingInput) -> tuple[PlacementPlan, Room]:
        """The plan, and how many workers there could be at most."""
        kept = self._kept.get(key)
        request = PlacementRequest(
            pools=tuple(given.pools[pool] for pool in Pool),
            nodes=given.nodes,
            links=_steady_links(given.links, kept.request.links if kept else ()),
            levels=given.levels,
            promised=self._promises(key),
            kv_bytes_per_request=_kv_bytes(given.loads, given.kv_bytes_per_token, kept),
        )
        bounds = (given.least, given.largest)
        if kept is None or kept.request != request or kept.bounds != bounds:
            plan = plan_placement(request)
            kept = self._kept[key] = _Kept(request, bounds, plan, _find_room(request, plan, *bounds))
        return kept.plan, kept.room

    def count_fitting(self, key: Key, counts: Mapping[Pool, int]) -> dict[Pool, int]:
        """How many workers of each pool have a node when there are `counts`; `place` was called before."""
        kept = self._kept[key]
        pools = tuple(replace(item, count=counts[item.pool]) for item in kept.request.pools)
        same = pools == kept.request.pools
        plan = kept.plan if same else plan_placement(replace(kept.request, pools=pools))
        return {pool: _count_placed(plan, pool) for pool in Pool}

    def _promises(self, key: Key) -> dict[str, Resources]:
        """What other objects' plans give to pods that are not bound yet."""
        promised: dict[str, Resources] = {}
        for other, kept in self._kept.items():
            if other == key:
                continue
            for pool in kept.request.pools:
                for ordinal in range(pool.count):
                    node = kept.plan.node_of(pool.pool, ordinal)
                    if node is not None and ordinal not in pool.existing:
                        promised[node] = promised.get(node, Resources()).plus(pool.requests)
        return promised


def tell_shortage(plan: PlacementPlan, room: Room) -> PlacementPlan:
    """A plan for what is asked for now, and what is not asked for because it would find no node."""
    if plan.missing or not room.missing:
        return plan
    message = "; ".join(item.message for item in room.missing)
    return replace(plan, missing=room.missing, reason=room.missing[0].reason, message=message)


def _find_room(
    request: PlacementRequest, plan: PlacementPlan, least: Mapping[Pool, int], largest: Mapping[Pool, int]
) -> Room:
    """Try each pool, and both together, at their largest.

    Pools whose workers differ in size have no exact total: the best that was found is never less than
    what runs, and the next pass looks again from there.
    """
    trials = {pool: _plan_grown(request, plan, {pool: largest[pool]}) for pool in Pool}
    both = _plan_grown(request, plan, largest)
    return Room(
        by_pool={pool: _count_placed(trials[pool], pool) for pool in Pool},
        total=max(
            sum(_count_placed(trial, pool) for pool in Pool) for trial in (plan, both, *trials.values())
        ),
        missing=_plan_grown(request, plan, least).missing,
    )


def _plan_grown(request: PlacementRequest, plan: PlacementPlan, counts: Mapping[Pool, int]) -> PlacementPlan:
    grown = tuple(replace(item, count=max(item.count, counts.get(item.pool, 0))) for item in request.pools)
    return plan if grown == request.pools else plan_placement(replace(request, pools=grown))


def _count_placed(plan: PlacementPlan, pool: Pool) -> int:
    return sum(1 for node in plan.nodes.get(pool, ()) if node is not None)


def _steady_links(new: Sequence[LinkFacts], old: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
    """Links without their ages and without noise, so that a plan is not made anew for nothing."""
    before = {(link.from_node, link.to_node): link.bytes_per_s for link in old}
    steady = []
    for link in new:
        known = before.get((link.from_node, link.to_node))
        rate = link.bytes_per_s
        if known is not None and known / _LINK_CHANGE < rate < known * _LINK_CHANGE:
            rate = known
        steady.append(LinkFacts(link.from_node, link.to_node, rate))
    return tuple(steady)


def _kv_bytes(loads: Sequence[LoadFacts], per_token: int | None, kept: _Kept | None) -> float:
    """KV of a typical request; what was taken before stands unless it is far off."""
    if per_token is None:
        return kept.request.kv_bytes_per_request if kept else 1.0
    rate = sum(load.arrival_rate_per_s for load in loads)
    tokens = (
        sum(load.arrival_rate_per_s * load.mean_prompt_tokens for load in loads) / rate if rate > 0 else 0.0
    )
    fresh = per_token * (tokens or _TYPICAL_PROMPT_TOKENS)
    known = kept.request.kv_bytes_per_request if kept else None
    return known if known is not None and known / 2 < fresh < known * 2 else fresh
