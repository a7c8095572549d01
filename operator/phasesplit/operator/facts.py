"""Worker pods as the planner's facts, and questions about them that need a manifest. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.reports import WorkerReport
from phasesplit.api.v1alpha1 import Manifest, PoolSpec
from phasesplit.operator.health import condition, is_gated, is_ready
from phasesplit.operator.observation import ordinal_of, pool_of
from phasesplit.operator.times import from_rfc3339
from phasesplit.planner.facts import NodeFacts, PodFacts
from phasesplit.planner.reading import sum_requests, to_node_facts

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_HARD = "DoNotSchedule"
_SHARING_LABEL = "nvidia.com/gpu.sharing-strategy"


def read_nodes(nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> tuple[NodeFacts, ...]:
    """Nodes with what every unfinished pod on them asks for."""
    requested = sum_requests(pods)
    return tuple(to_node_facts(node, requested.get(node["metadata"]["name"])) for node in nodes)


def read_pods(
    pods: Iterable[Manifest], reports: Mapping[str, WorkerReport], now_s: float
) -> tuple[PodFacts, ...]:
    """Worker pods."""
    return tuple(_read_pod(pod, reports, now_s) for pod in pods)


def bound_nodes(pods: Iterable[PodFacts], pool: Pool) -> dict[int, str]:
    """Where the pods of a pool are, by ordinal."""
    return {
        pod.ordinal: pod.node
        for pod in pods
        if pod.pool is pool and pod.node is not None and not pod.terminating
    }


def shares_device(pool: PoolSpec, placed: Sequence[str], nodes: Sequence[NodeFacts]) -> bool:
    """Are the pool's GPUs time slices of devices that others use too?"""
    if pool.gpu.count == 0:
        return False
    sharing = {node.name for node in nodes if node.labels.get(_SHARING_LABEL, "none") not in ("none", "")}
    return any(node in sharing for node in placed)


def has_rules_between_pods(pod_spec: Manifest, pool: Pool) -> bool:
    """Does the pod ask where other pods are, beyond those of its own pool?

    Required pod affinity, and hard spreading over pods of both pools.
    """
    affinity = pod_spec.get("affinity") or {}
    if any((affinity.get(kind) or {}).get(_REQUIRED) for kind in ("podAffinity", "podAntiAffinity")):
        return True
    return any(
        item.get("whenUnsatisfiable", _HARD) == _HARD
        and ((item.get("labelSelector") or {}).get("matchLabels") or {}).get(names.LABEL_POOL) != pool
        for item in pod_spec.get("topologySpreadConstraints") or ()
    )


def _read_pod(pod: Manifest, reports: Mapping[str, WorkerReport], now_s: float) -> PodFacts:
    name = str(pod["metadata"]["name"])
    report = reports.get(name)
    return PodFacts(
        name=name,
        pool=pool_of(pod),
        ordinal=ordinal_of(pod),
        node=pod["spec"].get("nodeName"),
        pinned_node=(pod["spec"].get("nodeSelector") or {}).get(names.HOSTNAME_LABEL),
        gated=is_gated(pod),
        ready=is_ready(pod),
        terminating="deletionTimestamp" in pod["metadata"],
        unschedulable_s=_unschedulable_s(pod, now_s),
        role=report.role if report is not None else None,
    )


def _unschedulable_s(pod: Manifest, now_s: float) -> float | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled is None or scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    since_s = from_rfc3339(str(scheduled.get("lastTransitionTime", "")))
    return max(0.0, now_s - since_s) if since_s is not None else 0.0
