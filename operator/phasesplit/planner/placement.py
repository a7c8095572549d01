"""Which node each worker goes to, so that KV spends the least time on the wire.

Existing pods stay; new ones are searched for; ordinals are given so that every prefix of them, which
is what scaling down leaves, is a good placement too. Knows nothing of gates and patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import Binding
from phasesplit.planner.eligibility import Eligibility, find_eligible, prefers
from phasesplit.planner.facts import Resources
from phasesplit.planner.placement_missing import find_missing
from phasesplit.planner.placement_order import ordinal_order
from phasesplit.planner.placement_search import search
from phasesplit.planner.placement_state import Placement, Problem, group_by_class, how_many_fit, to_vector
from phasesplit.planner.placement_types import Move, PlacementPlan, PlacementRequest, PoolRequest
from phasesplit.planner.text import format_rate, format_seconds
from phasesplit.planner.topology import Topology

_SPREAD_DECODE_COST = 1.10  # decode on two nodes is worth this much more wire time
_MOVE_HORIZON_S = 3600.0  # a move must pay for its model load within this time
_SAME_COST = 1.05  # bandwidths within this factor count as equal
# Weight of a preferred term, relative to the distance of the farthest nodes.
_PREFERENCE_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class _Setting:
    request: PlacementRequest
    pools: Mapping[Pool, PoolRequest]
    eligibility: Mapping[Pool, Eligibility]
    problem: Problem


def plan_placement(request: PlacementRequest) -> PlacementPlan:
    """Nodes for every ordinal of both pools."""
    setting = _prepare(request)
    stay = _plan(setting, keep_existing=True)
    if not request.movable or not any(pool.existing for pool in request.pools):
        return stay
    fresh_request = _without_existing(request)
    fresh = _plan(_prepare(fresh_request), keep_existing=False)
    moves = _moves(request, fresh)
    saved_s = (stay.wire_s - fresh.wire_s) * request.requests_per_s * _MOVE_HORIZON_S
    if fresh.missing or not moves or saved_s <= len(moves) * request.model_load_s:
        return stay
    return replace(fresh, moves=moves)


def binding_for(wanted: Binding, plan: PlacementPlan) -> Binding:
    """Automatic pins pods only where the exact node changes the cost."""
    if wanted is not Binding.AUTOMATIC:
        return wanted
    return Binding.GATED if plan.node_matters else Binding.AFFINITY


def _prepare(request: PlacementRequest) -> _Setting:
    pools = {pool.pool: pool for pool in request.pools}
    for pool in Pool:
        pools.setdefault(pool, PoolRequest(pool, 0))
    eligibility = {pool: find_eligible(pools[pool], request.nodes, request.promised) for pool in Pool}
    by_name = {node.name: node for node in request.nodes}
    spread_keys = sorted({c.topology_key for pool in pools.values() for c in pool.spread})
    weights = {pool: {node.name: prefers(pools[pool], node) for node in request.nodes} for pool in Pool}
    apart = {}
    if spread_keys or any(any(found.values()) for found in weights.values()):
        apart = {
            node.name: (
                tuple(node.labels.get(key) for key in spread_keys),
                tuple(weights[pool][node.name] for pool in Pool),
            )
            for node in request.nodes
        }
    topology = Topology(request.nodes, request.levels, request.links, apart)
    gpu_names = sorted({name for pool in pools.values() for name in pool.requests.gpus})
    room: dict[str, Resources] = {}
    for pool in Pool:
        room.update(eligibility[pool].room)
    nodes = tuple(sorted(room))
    vectors = {name: to_vector(amount, gpu_names) for name, amount in room.items()}
    requests = {pool: to_vector(pools[pool].requests, gpu_names) for pool in Pool}
    problem = Problem(
        topology=topology,
        nodes=nodes,
        room=vectors,
        requests=requests,
        eligible={pool: frozenset(eligibility[pool].room) for pool in Pool},
        spread={pool: tuple(c for c in pools[pool].spread if c.hard) for pool in Pool},
        labels={name: node.labels for name, node in by_name.items()},
        resource_names=("cpu", "memory", "pods", *gpu_names),
        by_class={
            pool: group_by_class(topology, eligibility[pool].room, requests[pool], vectors) for pool in Pool
        },
        penalty=_penalties(weights, topology, nodes),
    )
    return _Setting(request, pools, eligibility, problem)


def _penalties(
    preferences: Mapping[Pool, Mapping[str, int]], topology: Topology, nodes: Sequence[str]
) -> dict[Pool, dict[str, float]]:
    """Preferred terms as a small cost, so that they decide between nodes that are otherwise equal."""
    scale = _PREFERENCE_SHARE * max((max(topology.row(0)) if topology.num_classes else 0.0), 1e-12)
    penalties: dict[Pool, dict[str, float]] = {}
    for pool in Pool:
        weights = {name: preferences[pool][name] for name in nodes}
        best = max(weights.values(), default=0)
        penalties[pool] = {
            name: scale * (best - weight) / 100 for name, weight in weights.items() if weight != best
        }
    return penalties


def _plan(setting: _Setting, *, keep_existing: bool) -> PlacementPlan:
    known = set(setting.problem.topology.class_of)
    fixed: list[tuple[Pool, int, str]] = []
    if keep_existing:
        fixed = [
            (pool, ordinal, node)
            for pool, wanted in setting.pools.items()
            for ordinal, node in sorted(wanted.existing.items())
            if ordinal < wanted.count and node in known
        ]
    start = Placement(setting.problem, [(pool, node) for pool, _, node in fixed])
    bound = _place_bound(setting, start, {(pool, ordinal) for pool, ordinal, _ in fixed})
    taken = {(pool, ordinal): node for pool, ordinal, node in (*fixed, *bound)}
    wanted = {pool: _open_count(setting.pools[pool], taken, pool) for pool in Pool}
    start = _freeze(start)
    found = search(setting.problem, start, wanted)
    if setting.request.spread_decode:
        _spread_decode(found)
    order = ordinal_order(found, start)
    nodes = {pool: _by_ordinal(setting.pools[pool], pool, taken, order[pool]) for pool in Pool}
    return _describe(setting, found, nodes)


def _open_count(request: PoolRequest, taken: Mapping[tuple[Pool, int], str], pool: Pool) -> int:
    bound = {ordinal for ordinal in request.allowed_nodes if ordinal < request.count}
    settled = {ordinal for which, ordinal in taken if which is pool}
    return request.count - len(bound | settled)


def _place_bound(
    setting: _Setting, placement: Placement, done: set[tuple[Pool, int]]
) -> list[tuple[Pool, int, str]]:
    """Pods whose volumes allow few nodes come first, the most constrained before the others."""
    bound = [
        (len(allowed), pool, ordinal, allowed)
        for pool, request in setting.pools.items()
        for ordinal, allowed in request.allowed_nodes.items()
        if ordinal < request.count and (pool, ordinal) not in done
    ]
    placed = []
    for _, pool, ordinal, allowed in sorted(bound, key=lambda item: (item[0], item[1], item[2])):
        fitting = [node for node in sorted(allowed) if placement.fits(pool, node)]
        if fitting:
            node = min(fitting, key=lambda name: (placement.potential(pool, name), name))
            placement.add(pool, node)
            placed.append((pool, ordinal, node))
    return placed


def _freeze(placement: Placement) -> Placement:
    """Pods bound to their nodes by volumes are not moved by the search."""
    placement.movable = {pool: {} for pool in Pool}
    return placement


def _spread_decode(placement: Placement) -> None:
    """One node's failure should not take all decode workers, if that costs little."""
    counts = placement.counts[Pool.DECODE]
    if placement.totals[Pool.DECODE] < 2 or len(counts) != 1 or not placement.movable[Pool.DECODE]:
        return
    node = next(iter(counts))
    before = placement.cost
    placement.remove(Pool.DECODE, node)
    options = [
        (placement.potential(Pool.DECODE, name), name)
        for name in placement.problem.nodes
        if name != node and placement.fits(Pool.DECODE, name)
    ]
    if options:
        best = min(options)[1]
        placement.add(Pool.DECODE, best)
        if placement.cost <= _SPREAD_DECODE_COST * before:
            return
        placement.remove(Pool.DECODE, best)
    placement.add(Pool.DECODE, node)


def _by_ordinal(
    request: PoolRequest, pool: Pool, taken: Mapping[tuple[Pool, int], str], order: Sequence[str]
) -> tuple[str | None, ...]:
    remaining = iter(order)
    nodes: list[str | None] = []
    for ordinal in range(request.count):
        if (pool, ordinal) in taken:
            nodes.append(taken[pool, ordinal])
        elif ordinal in request.allowed_nodes:
            nodes.append(None)
        else:
            nodes.append(next(remaining, None))
    return tuple(nodes)


def _describe(
    setting: _Setting, found: Placement, nodes: Mapping[Pool, tuple[str | None, ...]]
) -> PlacementPlan:
    request = setting.request
    pairs = found.totals[Pool.PREFILL] * found.totals[Pool.DECODE]
    wire_s = request.kv_bytes_per_request * found.cost / pairs if pairs else 0.0
    nearest, farthest = _extremes(setting)
    missing = tuple(
        item
        for pool in Pool
        if (item := find_missing(setting.pools[pool], nodes[pool], setting.eligibility[pool], found))
    )
    notes = tuple(
        f"nodes of the {pool} pool carry no GPU labels: the resource alone decided"
        for pool in Pool
        if setting.eligibility[pool].unlabelled
    )
    message = "; ".join(item.message for item in missing) or _placed_sentence(setting, nodes, wire_s, pairs)
    return PlacementPlan(
        nodes=nodes,
        wire_s=wire_s,
        bound_wire_s=request.kv_bytes_per_request * nearest if pairs else 0.0,
        reason=missing[0].reason if missing else Reason.PLACED,
        message="; ".join((message, *notes)),
        eligible={pool: tuple(sorted(setting.eligibility[pool].room)) for pool in Pool},
        missing=missing,
        node_matters=farthest > _SAME_COST * nearest > 0,
        notes=notes,
    )


def _extremes(setting: _Setting) -> tuple[float, float]:
    """Seconds per byte of the nearest and the farthest pair of eligible nodes that could be used."""
    problem, topology = setting.problem, setting.problem.topology
    by_class: dict[Pool, dict[int, tuple[str, ...]]] = {}
    for pool, wanted in setting.pools.items():
        by_class[pool] = dict(problem.by_class[pool])
        for node in sorted(set(wanted.existing.values()) & set(topology.class_of)):
            kind = topology.class_of[node]
            by_class[pool][kind] = (*by_class[pool].get(kind, ()), node)
    values = []
    for one, prefill_nodes in by_class[Pool.PREFILL].items():
        row = topology.row(one)
        for other, decode_nodes in by_class[Pool.DECODE].items():
            if one != other or len({*prefill_nodes, *decode_nodes}) > 1:
                values.append(row[other])
    both = [a + b for a, b in zip(problem.requests[Pool.PREFILL], problem.requests[Pool.DECODE], strict=True)]
    values += [
        topology.seconds_per_byte(node, node)
        for node in problem.eligible[Pool.PREFILL] & problem.eligible[Pool.DECODE]
        if how_many_fit(both, problem.room[node]) > 0
    ]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _placed_sentence(
    setting: _Setting, nodes: Mapping[Pool, tuple[str | None, ...]], wire_s: float, pairs: int
) -> str:
    where = " and ".join(
        f"{pool} on {_name_some(sorted({node for node in nodes[pool] if node}))}"
        for pool in Pool
        if nodes[pool]
    )
    if not pairs:
        return where or "nothing to place"
    speed = format_rate(setting.request.kv_bytes_per_request / wire_s) if wire_s > 0 else "unlimited"
    return f"{where}: KV travels at about {speed}, {format_seconds(wire_s)} per request"


def _name_some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "no node"


def _without_existing(request: PlacementRequest) -> PlacementRequest:
    """The same question with our own pods' room given back and no pod placed yet."""
    freed: dict[str, Resources] = {}
    for pool in request.pools:
        for node in pool.existing.values():
            freed[node] = freed.get(node, Resources()).plus(pool.requests)
    nodes = tuple(
        replace(node, requested=node.requested.minus(freed[node.name])) if node.name in freed else node
        for node in request.nodes
    )
    pools = tuple(replace(pool, existing={}) for pool in request.pools)
    return replace(request, nodes=nodes, pools=pools, movable=False)


def _moves(request: PlacementRequest, fresh: PlacementPlan) -> tuple[Move, ...]:
    return tuple(
        Move(pool.pool, ordinal, node, target)
        for pool in request.pools
        for ordinal, node in sorted(pool.existing.items())
        if (target := fresh.node_of(pool.pool, ordinal)) is not None and target != node
    )
