"""Which nodes may take a pod of a pool, and what stands in the way of the others.

Looks at one node and one pool at a time; how pods then share the nodes is the placement's business.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phasesplit.planner.facts import NodeFacts, Resources, Taint
from phasesplit.planner.placement_types import PoolRequest, Toleration
from phasesplit.planner.reading import matches_term
from phasesplit.planner.text import count_of

_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


class Obstacle(StrEnum):
    """Why a node does not take a pod."""

    NOT_READY = "not ready"
    CORDONED = "cordoned"
    SELECTOR = "excluded by nodeSelector"
    AFFINITY = "excluded by affinity"
    TAINT = "tainted"
    NO_GPU = "without the GPU resource"
    PRODUCT = "another GPU product"
    GPU_MEMORY = "too little GPU memory"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Nodes that the pool's own rules allow, with the room that is left on them."""

    room: Mapping[str, Resources]  # by eligible node, also when full
    obstacles: Mapping[str, Obstacle]  # by the other nodes
    unlabelled: bool = False  # GPU labels asked for but absent: allocatable alone decided


def find_eligible(
    request: PoolRequest, nodes: Sequence[NodeFacts], promised: Mapping[str, Resources]
) -> Eligibility:
    """Apply the pool's rules to every node."""
    room: dict[str, Resources] = {}
    obstacles: dict[str, Obstacle] = {}
    unlabelled = False
    for node in nodes:
        obstacle = find_obstacle(request, node)
        if obstacle is not None:
            obstacles[node.name] = obstacle
            continue
        free = node.free
        if node.name in promised:
            free = free.minus(promised[node.name])
        room[node.name] = free
        unlabelled = unlabelled or _lacks_gpu_labels(request, node)
    return Eligibility(room, obstacles, unlabelled)


def find_obstacle(request: PoolRequest, node: NodeFacts) -> Obstacle | None:
    """The first rule that keeps a pod of the pool off a node; its free room is not looked at."""
    if not node.ready:
        return Obstacle.NOT_READY
    if node.unschedulable:
        return Obstacle.CORDONED
    if any(node.labels.get(key) != value for key, value in request.node_selector.items()):
        return Obstacle.SELECTOR
    if request.required_terms and not any(matches_term(node, term) for term in request.required_terms):
        return Obstacle.AFFINITY
    if any(not is_tolerated(taint, request.tolerations) for taint in node.taints):
        return Obstacle.TAINT
    return _gpu_obstacle(request, node)


def is_tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    """May a pod with these tolerations be scheduled in spite of the taint?"""
    return taint.effect not in _HARD_EFFECTS or any(_tolerates(item, taint) for item in tolerations)


def prefers(request: PoolRequest, node: NodeFacts) -> int:
    """Sum of the weights of the preferred terms that hold, less a soft taint."""
    if not request.preferred_terms and not node.taints:
        return 0
    weight = sum(term.weight for term in request.preferred_terms if matches_term(node, term))
    soft = [taint for taint in node.taints if taint.effect not in _HARD_EFFECTS]
    return weight - sum(not any(_tolerates(item, taint) for item in request.tolerations) for taint in soft)


def describe_obstacles(obstacles: Iterable[Obstacle]) -> str:
    """`2 nodes cordoned, 1 node full`."""
    counts = Counter(obstacles)
    return ", ".join(f"{count_of(number, 'node')} {what}" for what, number in sorted(counts.items()))


def _gpu_obstacle(request: PoolRequest, node: NodeFacts) -> Obstacle | None:
    if not request.gpu_resource:
        return None
    if node.allocatable.gpus.get(request.gpu_resource, 0) <= 0:
        return Obstacle.NO_GPU
    if request.products and node.gpu_product is not None and node.gpu_product not in request.products:
        return Obstacle.PRODUCT
    if node.gpu_memory_bytes is not None and node.gpu_memory_bytes < request.min_gpu_memory_bytes:
        return Obstacle.GPU_MEMORY
    return None


def _lacks_gpu_labels(request: PoolRequest, node: NodeFacts) -> bool:
    """Labels asked for are absent, as on plain k3s: the resource alone decides, and that is said."""
    return (bool(request.products) and node.gpu_product is None) or (
        request.min_gpu_memory_bytes > 0 and node.gpu_memory_bytes is None
    )


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.operator == "Exists":
        return not toleration.key or toleration.key == taint.key
    return toleration.key == taint.key and toleration.value == taint.value
