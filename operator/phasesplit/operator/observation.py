"""What the pods and workloads of one object look like now, counted. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.reports import WorkerReport
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.kinds import DEPLOYMENT, STATEFUL_SET
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.cluster.snapshot import Child, Snapshot
from phasesplit.operator.health import PodProblem, find_problems, is_gated, is_ready
from phasesplit.operator.rollout import RolloutPod


@dataclass(frozen=True)
class PoolObservation:
    """One pool as it is."""

    pool: Pool
    desired: int = 0  # the StatefulSet's replicas; 0 while there is none
    exists: bool = False
    ready: int = 0
    updated: int = 0  # pods of the current template
    settled: int = 0  # pods that are both, and not going away
    present: int = 0
    gated: int = 0
    nodes: tuple[str, ...] = ()
    bound: int = 0
    template_gated: bool = False


@dataclass(frozen=True)
class Observation:
    """One object's workers and routers."""

    pools: Mapping[Pool, PoolObservation]
    router_desired: int = 0
    router_ready: int = 0
    router_updated: bool = False  # the Deployment's controller has brought out the current template
    problems: tuple[PodProblem, ...] = ()
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)  # by pod
    unreachable: Mapping[str, str] = field(default_factory=dict)
    rollout: tuple[RolloutPod, ...] = ()

    @property
    def ready_workers(self) -> int:
        """Workers that may get requests."""
        return sum(pool.ready for pool in self.pools.values())

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes whenever something gets better or worse."""
        counts = [(pool.present, pool.ready, pool.updated, pool.bound) for pool in self.pools.values()]
        return (self.router_ready, *(number for item in counts for number in item))


def observe(
    snapshot: Snapshot, answers: Sequence[RouterAnswer], hashes: Mapping[Pool, str], *, managed: bool
) -> Observation:
    """Count. `hashes` are the template hashes that the accepted spec asks for.

    `managed`: replicas are the operator's; a number that somebody else wrote since is not wanted.
    """
    reports, unreachable = merge_reports(answers)
    workers = snapshot.worker_pods()
    name = snapshot.model.name
    deployment = snapshot.child(DEPLOYMENT, names.router_name(name))
    routers = [pod for pod in snapshot.router_pods() if is_ready(pod)]
    return Observation(
        pools={pool: _observe_pool(snapshot, pool, hashes.get(pool, ""), managed=managed) for pool in Pool},
        router_desired=_replicas(deployment),
        router_ready=len(routers),
        router_updated=_is_rolled_out(deployment),
        problems=find_problems((*workers, *snapshot.router_pods()), reports),
        reports=reports,
        unreachable=unreachable,
        rollout=tuple(_rollout_pod(pod, hashes) for pod in workers),
    )


def merge_reports(answers: Sequence[RouterAnswer]) -> tuple[dict[str, WorkerReport], dict[str, str]]:
    """Reports by pod over all routers, and the errors of pods that no router reaches."""
    reports: dict[str, WorkerReport] = {}
    errors: dict[str, str] = {}
    for answer in answers:
        if answer.report is None:
            continue
        for report in answer.report.workers:
            known = reports.get(report.pod)
            if known is None or report.role_version >= known.role_version:
                reports[report.pod] = report
        errors.update(answer.report.unreachable)
    return reports, {pod: error for pod, error in errors.items() if pod not in reports}


def ordinal_of(pod: Manifest) -> int:
    """Number at the end of a StatefulSet pod's name."""
    text = str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(text) if text.isdigit() else 0


def pool_of(pod: Manifest) -> Pool:
    """Pool that a worker pod's label says."""
    return Pool(pod["metadata"]["labels"][names.LABEL_POOL])


def _observe_pool(snapshot: Snapshot, pool: Pool, wanted_hash: str, *, managed: bool) -> PoolObservation:
    child = snapshot.child(STATEFUL_SET, names.pool_name(snapshot.model.name, pool))
    desired = _replicas(child)
    if managed and child is not None and not _is_scaled_by_us(child):
        desired = _last_desired(snapshot, pool, desired)
    pods = [pod for pod in snapshot.worker_pods(pool) if ordinal_of(pod) < desired]
    current = [pod for pod in pods if _template_hash(pod) == wanted_hash]
    nodes = sorted({str(pod["spec"]["nodeName"]) for pod in pods if pod["spec"].get("nodeName")})
    return PoolObservation(
        pool=pool,
        desired=desired,
        exists=child is not None,
        ready=sum(1 for pod in pods if is_ready(pod)),
        updated=len(current),
        settled=sum(1 for pod in current if is_ready(pod)),
        present=len(pods),
        gated=sum(1 for pod in pods if is_gated(pod)),
        nodes=tuple(nodes),
        bound=sum(1 for pod in pods if pod["spec"].get("nodeName")),
        template_gated=child is not None and _has_gate(child),
    )


def _has_gate(child: Child) -> bool:
    pod = child.body.get("spec", {}).get("template", {}).get("spec", {})
    return any(gate.get("name") == names.PLACEMENT_GATE for gate in pod.get("schedulingGates") or ())


def _rollout_pod(pod: Manifest, hashes: Mapping[Pool, str]) -> RolloutPod:
    pool = pool_of(pod)
    return RolloutPod(
        name=str(pod["metadata"]["name"]),
        pool=pool,
        ordinal=ordinal_of(pod),
        ready=is_ready(pod),
        terminating="deletionTimestamp" in pod["metadata"],
        outdated=_template_hash(pod) != hashes.get(pool, ""),
    )


def _template_hash(pod: Manifest) -> str | None:
    return (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_TEMPLATE_HASH)


def _replicas(child: Child | None) -> int:
    return int(child.body.get("spec", {}).get("replicas", 1)) if child is not None else 0


def _is_scaled_by_us(child: Child) -> bool:
    fields = child.fields.get(names.SCALER_FIELD_MANAGER, {})
    return "f:replicas" in fields.get("f:spec", {})


def _last_desired(snapshot: Snapshot, pool: Pool, otherwise: int) -> int:
    """The number that the operator decided for last, from the status."""
    for item in snapshot.model.status.get("pools") or ():
        if item.get("name") == pool:
            return int(item.get("desired", otherwise))
    return otherwise


def _is_rolled_out(deployment: Child | None) -> bool:
    if deployment is None:
        return False
    spec, status = deployment.body.get("spec", {}), deployment.body.get("status", {})
    wanted = spec.get("replicas", 1)
    return bool(
        status.get("observedGeneration", 0) >= deployment.body["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) >= wanted
        and status.get("availableReplicas", 0) >= wanted
        and status.get("replicas", 0) == status.get("updatedReplicas", 0)
    )


def addresses_of(pods: Iterable[Manifest]) -> dict[str, str]:
    """Where pods can be reached, by name; those without an address or on their way out left out."""
    return {
        str(pod["metadata"]["name"]): str(pod["status"]["podIP"])
        for pod in pods
        if pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]
    }
