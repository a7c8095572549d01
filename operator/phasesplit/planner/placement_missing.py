"""What a pool lacks when it does not fit: how many of what kind, and what stands in the way where."""

from collections.abc import Sequence

from phasesplit.api.conditions import Reason
from phasesplit.planner.eligibility import Eligibility, Obstacle, describe_obstacles
from phasesplit.planner.placement_state import Placement
from phasesplit.planner.placement_types import Missing, PoolRequest
from phasesplit.planner.text import count_of


def find_missing(
    request: PoolRequest, nodes: Sequence[str | None], eligibility: Eligibility, found: Placement
) -> Missing | None:
    """One sentence for a pool with pods left over; None when all have a node."""
    lacking = sum(node is None for node in nodes)
    if not lacking:
        return None
    if not eligibility.room:
        return _without_nodes(request, lacking, eligibility)
    resource = _scarce_resource(request, found)
    kind = (
        f" ({' or '.join(request.products)})" if request.products and resource == request.gpu_resource else ""
    )
    offered = len(eligibility.room)
    others = describe_obstacles(eligibility.obstacles.values())
    return Missing(
        request.pool,
        lacking,
        resource,
        Reason.NOT_ENOUGH_GPUS if resource == request.gpu_resource else Reason.UNSCHEDULABLE,
        f"the {request.pool} pool lacks {_amount(request, lacking, resource)}{kind} for "
        f"{lacking} of its {count_of(request.count, 'worker')}: {count_of(offered, 'node')} would do but "
        f"{'is' if offered == 1 else 'are'} full{f', {others}' if others else ''}",
    )


def _without_nodes(request: PoolRequest, lacking: int, eligibility: Eligibility) -> Missing:
    obstacles = set(eligibility.obstacles.values())
    if request.gpu_resource and obstacles == {Obstacle.NO_GPU}:
        return Missing(
            request.pool,
            lacking,
            request.gpu_resource,
            Reason.NO_GPU_RESOURCE,
            f"no node offers {request.gpu_resource}: install its device plugin, or set "
            f"{request.pool}.gpu.count: 0 to serve on CPU",
        )
    why = describe_obstacles(eligibility.obstacles.values()) or "the cluster has no nodes"
    return Missing(
        request.pool,
        lacking,
        "node",
        Reason.NO_ELIGIBLE_NODE,
        f"no node may take the {request.pool} pool: {why}",
    )


def _scarce_resource(request: PoolRequest, found: Placement) -> str:
    """What is short on most of the nodes that would do; the GPU if it is short on all of them."""
    problem = found.problem
    need = problem.requests[request.pool]
    nodes = problem.eligible[request.pool]
    short = dict.fromkeys(problem.resource_names, 0)
    for node in nodes:
        room = found.room.get(node) or problem.room[node]
        for name, amount, have in zip(problem.resource_names, need, room, strict=True):
            short[name] += amount > 0 and amount > have
    if short.get(request.gpu_resource) == len(nodes):
        return request.gpu_resource
    most = max(short.values(), default=0)
    return next(name for name, count in short.items() if count == most) if most else "node"


def _amount(request: PoolRequest, lacking: int, resource: str) -> str:
    per_pod = request.requests.gpus.get(resource)
    if per_pod:
        return f"{lacking * per_pod} {resource}"
    if resource == "node":
        return "a node that its spread constraints or volumes allow"
    return resource
