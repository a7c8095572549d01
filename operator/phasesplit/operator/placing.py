"""Placement plans of all objects: one plan per pass, made anew only when its inputs changed.

Knows which resources other objects were promised by their plans but have not taken yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.cluster.snapshot import Key
from phasesplit.planner.facts import LinkFacts, LoadFacts, NodeFacts, Resources
from phasesplit.planner.placement import plan_placement
from phasesplit.planner.placement_types import PlacementPlan, PlacementRequest, PoolRequest

_TYPICAL_PROMPT_TOKENS = 512.0
# A link is a new fact for the placement when it is this many times faster or slower than before.
_LINK_CHANGE = 1.5


@dataclass(frozen=True)
class PlacingInput:
    """What the plan of one object depends on, beside other objects' promises."""

    pools: Mapping[Pool, PoolRequest]
    largest: Mapping[Pool, int]  # most workers a pool may ever have
    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...]
    levels: tuple[str, ...]
    loads: Sequence[LoadFacts]
    kv_bytes_per_token: int | None


@dataclass(frozen=True)
class _Kept:
    request: PlacementRequest
    largest: Mapping[Pool, int]
    plan: PlacementPlan
    placeable: Mapping[Pool, int]


class Placer:
    """The plans of all objects."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}

    def forget(self, key: Key) -> None:
        """The object is gone, and so are its promises."""
        self._kept.pop(key, None)

    def place(self, key: Key, given: PlacingInput) -> tuple[PlacementPlan, Mapping[Pool, int]]:
        """The plan, and how many workers each pool could have at most."""
        kept = self._kept.get(key)
        request = PlacementRequest(
            pools=tuple(given.pools[pool] for pool in Pool),
            nodes=given.nodes,
            links=_steady_links(given.links, kept.request.links if kept else ()),
            levels=given.levels,
            promised=self._promises(key),
            kv_bytes_per_request=_kv_bytes(given.loads, given.kv_bytes_per_token, kept),
        )
        if kept is None or kept.request != request or kept.largest != given.largest:
            placeable = {pool: _count_placeable(request, pool, given.largest[pool]) for pool in Pool}
            kept = self._kept[key] = _Kept(request, given.largest, plan_placement(request), placeable)
        return kept.plan, kept.placeable

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


def _count_placeable(request: PlacementRequest, pool: Pool, largest: int) -> int:
    """Workers of one pool that fit while the other keeps its size."""
    grown = tuple(
        replace(item, count=max(item.count, largest)) if item.pool is pool else item for item in request.pools
    )
    if grown == request.pools:
        return next(item.count for item in request.pools if item.pool is pool)
    plan = plan_placement(replace(request, pools=grown))
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
