"""Plain Kubernetes objects as facts: nodes, what pods ask for, what a pool asks of nodes.

The one place in the planner that knows the shape of manifests. Pure; nothing is fetched here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.quantities import parse_quantity
from phasesplit.api.v1alpha1 import Manifest, PoolSpec
from phasesplit.planner.facts import NodeFacts, Resources, Taint
from phasesplit.planner.placement_types import (
    LabelRequirement,
    NodeTerm,
    PoolRequest,
    SpreadConstraint,
    Toleration,
)

_MEBIBYTE = 1 << 20
_PLAIN_RESOURCES = frozenset({"cpu", "memory", "pods", "ephemeral-storage"})
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def to_resources(amounts: Mapping[str, Any] | None) -> Resources:
    """A map of quantities; extended resources count as GPUs by name, storage is left out."""
    found = {name: parse_quantity(value) for name, value in (amounts or {}).items()}
    return Resources(
        cpu_millis=round(found.get("cpu", 0.0) * 1000),
        memory_bytes=round(found.get("memory", 0.0)),
        pods=round(found.get("pods", 0.0)),
        gpus={
            name: round(amount)
            for name, amount in found.items()
            if name not in _PLAIN_RESOURCES and not name.startswith("hugepages-")
        },
    )


def to_pod_requests(pod_spec: Manifest) -> Resources:
    """What the scheduler reserves for one pod: the containers' sum or the largest init container.

    A container without a request for a resource but with a limit asks for the limit.
    """
    sidecars = [c for c in pod_spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"]
    total = Resources(pods=1)
    for container in (*(pod_spec.get("containers") or []), *sidecars):
        total = total.plus(_container_requests(container))
    for container in pod_spec.get("initContainers") or []:
        if container not in sidecars:
            total = _larger(total, _container_requests(container))
    return total.plus(to_resources(pod_spec.get("overhead")))


def sum_requests(pods: Iterable[Manifest]) -> dict[str, Resources]:
    """Requests of every unfinished pod, by the node it is bound to."""
    totals: dict[str, Resources] = {}
    for pod in pods:
        spec = pod.get("spec") or {}
        node = spec.get("nodeName")
        phase = (pod.get("status") or {}).get("phase")
        if node and phase not in ("Succeeded", "Failed"):
            totals[node] = totals.get(node, Resources()).plus(to_pod_requests(spec))
    return totals


def to_node_facts(node: Manifest, requested: Resources | None = None) -> NodeFacts:
    """A Node object, with what the pods on it ask for."""
    metadata, spec, status = (node.get(key) or {} for key in ("metadata", "spec", "status"))
    labels = dict(metadata.get("labels") or {})
    memory_mib = labels.get(names.GPU_MEMORY_LABEL, "")
    ready = [c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready"]
    return NodeFacts(
        name=metadata.get("name", ""),
        labels=labels,
        taints=tuple(
            Taint(taint.get("key", ""), taint.get("effect", ""), taint.get("value") or "")
            for taint in spec.get("taints") or []
        ),
        unschedulable=bool(spec.get("unschedulable")),
        ready=ready == ["True"] if ready else False,
        allocatable=to_resources(status.get("allocatable")),
        requested=requested or Resources(),
        gpu_product=labels.get(names.GPU_PRODUCT_LABEL),
        gpu_memory_bytes=int(memory_mib) * _MEBIBYTE if memory_mib.isdigit() else None,
    )


def to_pool_request(
    pool: Pool,
    pool_spec: PoolSpec,
    pod_spec: Manifest,
    count: int,
    *,
    existing: Mapping[int, str] | None = None,
    allowed_nodes: Mapping[int, frozenset[str]] | None = None,
) -> PoolRequest:
    """What a pool asks of nodes. `pod_spec` is the finished template's, the user's overlay included."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    gpu = pool_spec.gpu
    return PoolRequest(
        pool=pool,
        count=count,
        requests=to_pod_requests(pod_spec),
        gpu_resource=gpu.resource_name if gpu.count else "",
        products=tuple(gpu.products) if gpu.count else (),
        min_gpu_memory_bytes=int(parse_quantity(gpu.min_memory)) if gpu.count and gpu.min_memory else 0,
        node_selector=dict(pod_spec.get("nodeSelector") or {}),
        tolerations=tuple(_to_toleration(item) for item in pod_spec.get("tolerations") or []),
        required_terms=tuple(
            _to_term(term) for term in (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
        ),
        preferred_terms=tuple(
            _to_term(item.get("preference") or {}, int(item.get("weight", 1)))
            for item in affinity.get(_PREFERRED) or []
        ),
        spread=tuple(
            SpreadConstraint(
                item.get("topologyKey", ""),
                int(item.get("maxSkew", 1)),
                item.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule",
            )
            for item in pod_spec.get("topologySpreadConstraints") or []
        ),
        existing=dict(existing or {}),
        allowed_nodes=dict(allowed_nodes or {}),
    )


def to_volume_nodes(volume: Manifest, nodes: Iterable[NodeFacts]) -> frozenset[str] | None:
    """Nodes that can mount a PersistentVolume; None: any."""
    required = ((volume.get("spec") or {}).get("nodeAffinity") or {}).get("required") or {}
    terms = [_to_term(term) for term in required.get("nodeSelectorTerms") or []]
    if not terms:
        return None
    return frozenset(node.name for node in nodes if any(matches_term(node, term) for term in terms))


def matches_term(node: NodeFacts, term: NodeTerm) -> bool:
    """Do all expressions of a term hold on a node? An empty term matches nothing, as in Kubernetes."""
    if not term.labels and not term.fields:
        return False
    fields = {"metadata.name": node.name}
    return all(_matches(node.labels, need) for need in term.labels) and all(
        _matches(fields, need) for need in term.fields
    )


def _matches(labels: Mapping[str, str], need: LabelRequirement) -> bool:
    value = labels.get(need.key)
    match need.operator:
        case "In":
            return value is not None and value in need.values
        case "NotIn":
            return value is None or value not in need.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(value, need)
        case _:
            return False


def _compares(value: str | None, need: LabelRequirement) -> bool:
    try:
        have, bound = int(value or ""), int(need.values[0])
    except (ValueError, IndexError):
        return False  # Kubernetes, too, lets a label that is no whole number match nothing
    return have > bound if need.operator == "Gt" else have < bound


def _container_requests(container: Manifest) -> Resources:
    resources = container.get("resources") or {}
    return to_resources({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _larger(one: Resources, other: Resources) -> Resources:
    return Resources(
        max(one.cpu_millis, other.cpu_millis),
        max(one.memory_bytes, other.memory_bytes),
        max(one.pods, other.pods),
        {name: max(one.gpus.get(name, 0), other.gpus.get(name, 0)) for name in {*one.gpus, *other.gpus}},
    )


def _to_toleration(item: Manifest) -> Toleration:
    return Toleration(
        item.get("key") or "",
        item.get("operator") or "Equal",
        item.get("value") or "",
        item.get("effect") or "",
    )


def _to_term(term: Manifest, weight: int = 0) -> NodeTerm:
    return NodeTerm(
        labels=tuple(_to_requirement(item) for item in term.get("matchExpressions") or []),
        fields=tuple(_to_requirement(item) for item in term.get("matchFields") or []),
        weight=weight,
    )


def _to_requirement(item: Manifest) -> LabelRequirement:
    return LabelRequirement(item.get("key", ""), item.get("operator", ""), tuple(item.get("values") or ()))
