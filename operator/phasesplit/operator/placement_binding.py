"""From a placement plan to patches of gated pods. Pure.

A gated pod is pinned by a node selector on the node's own hostname label and released in the same
patch; one that fits nowhere is released without a pin, so that a cluster autoscaler sees it. A pinned
pod that the scheduler cannot place for `STUCK_S` is deleted, to be placed anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.planner.facts import NodeFacts, PodFacts
from phasesplit.planner.placement_types import PlacementPlan

STUCK_S = 20.0


@dataclass(frozen=True)
class Release:
    """One gated pod to be let go, to a node or to the scheduler."""

    pod: str
    node: str | None
    patch: Manifest


def plan_releases(
    pods: Sequence[PodFacts],
    plan: PlacementPlan,
    nodes: Iterable[NodeFacts],
    gates: Mapping[str, Sequence[Manifest]],
) -> tuple[Release, ...]:
    """Patches for all gated pods. `gates` are the pods' scheduling gates, by pod name."""
    hostnames = {node.name: node.labels.get(names.HOSTNAME_LABEL) for node in nodes}
    releases = []
    for pod in pods:
        if not pod.gated or pod.terminating:
            continue
        node = plan.node_of(pod.pool, pod.ordinal)
        hostname = hostnames.get(node) if node is not None else None
        patch = release_patch(hostname, gates.get(pod.name, ()))
        releases.append(Release(pod.name, node if hostname else None, patch))
    return tuple(releases)


def release_patch(hostname: str | None, gates: Sequence[Manifest]) -> Manifest:
    """Merge patch that pins (or not) and lifts our gate; gates of others stay."""
    others = [dict(gate) for gate in gates if gate.get("name") != names.PLACEMENT_GATE]
    spec: Manifest = {"schedulingGates": others or None}
    if hostname is not None:
        spec["nodeSelector"] = {names.HOSTNAME_LABEL: hostname}
    return {"spec": spec}


def find_stuck(pods: Iterable[PodFacts]) -> tuple[str, ...]:
    """Pinned pods whose node has no room any more."""
    return tuple(
        pod.name
        for pod in pods
        if pod.pinned_node is not None
        and not pod.gated
        and not pod.terminating
        and pod.node is None
        and pod.unschedulable_s is not None
        and pod.unschedulable_s >= STUCK_S
    )
