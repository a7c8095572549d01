"""Nodes on paper: Node objects with labels, GPUs and a fresh lease, and no kubelet behind them.

Enough for the scheduler and for placement: pods are bound to them and stay Pending. The controller manager
believes in a node as long as its lease is renewed, so a thread renews all of them.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.processes import wait_for
from testbed.spec import GPU_RESOURCE

_LEASE_NAMESPACE = "kube-node-lease"
_RENEW_EVERY_S = 4.0
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PaperNode:
    """What the node claims to be."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    cpu: str = "32"
    memory: str = "128Gi"
    gpu_resource: str = GPU_RESOURCE

    def node(self) -> dict[str, Any]:
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels}
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}}

    def status(self, now: datetime) -> dict[str, Any]:
        amounts = {"cpu": self.cpu, "memory": self.memory, "pods": "110"}
        if self.gpus:
            amounts[self.gpu_resource] = str(self.gpus)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "PaperNode",
            "message": "a node without a kubelet",
            "lastHeartbeatTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "lastTransitionTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        }
        return {**self.node(), "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}

    def lease(self, now: datetime) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": _LEASE_NAMESPACE},
            "spec": {
                "holderIdentity": self.name,
                "leaseDurationSeconds": 10,
                "renewTime": f"{now:%Y-%m-%dT%H:%M:%S.%fZ}",
            },
        }


@contextmanager
def paper_nodes(kubectl: Kubectl, nodes: Sequence[PaperNode]) -> Iterator[None]:
    """The nodes exist, Ready and schedulable, for the body; then they and the pods bound to them are gone."""
    ended = threading.Event()
    renewer = threading.Thread(target=_renew, args=(kubectl, nodes, ended), daemon=True)
    try:
        now = datetime.now(UTC)
        kubectl.apply(*(node.lease(now) for node in nodes), timeout_s=_CALL_TIMEOUT_S)
        kubectl.apply(*(node.node() for node in nodes), timeout_s=_CALL_TIMEOUT_S)
        kubectl.apply(*(node.status(now) for node in nodes), subresource="status", timeout_s=_CALL_TIMEOUT_S)
        renewer.start()
        names = [f"node/{node.name}" for node in nodes]
        kubectl("wait", "--for=condition=Ready", *names, "--timeout=30s", timeout_s=_CALL_TIMEOUT_S)
        # A new node has a taint that the controller manager takes away once it sees the node Ready.
        wait_for(lambda: not _tainted(kubectl, nodes), 30, "the paper nodes to lose their first taint")
        yield
    finally:
        ended.set()
        if renewer.ident is not None:
            renewer.join(timeout=_CALL_TIMEOUT_S)
        _remove(kubectl, [node.name for node in nodes])


def _tainted(kubectl: Kubectl, nodes: Sequence[PaperNode]) -> set[str]:
    items = kubectl.get("nodes")["items"]
    tainted = {item["metadata"]["name"] for item in items if item["spec"].get("taints")}
    return tainted & {node.name for node in nodes}


def _renew(kubectl: Kubectl, nodes: Sequence[PaperNode], ended: threading.Event) -> None:
    while not ended.wait(_RENEW_EVERY_S):
        now = datetime.now(UTC)
        try:
            kubectl.apply(*(node.lease(now) for node in nodes), timeout_s=_CALL_TIMEOUT_S)
        except TestbedError:
            continue  # a busy API server; the leases last longer than one renewal


def _remove(kubectl: Kubectl, names: list[str]) -> None:
    bound: dict[str, list[str]] = {}
    for pod in kubectl.get("pods", "-A", timeout_s=_CALL_TIMEOUT_S)["items"]:
        if pod["spec"].get("nodeName") in names:
            bound.setdefault(pod["metadata"]["namespace"], []).append(pod["metadata"]["name"])
    for namespace, pods in bound.items():
        # No kubelet would ever end these pods.
        force = ("--force", "--grace-period=0", "--ignore-not-found")
        kubectl("delete", "pod", "-n", namespace, *pods, *force, timeout_s=_CALL_TIMEOUT_S)
    kubectl("delete", "node", *names, "--ignore-not-found", timeout_s=_CALL_TIMEOUT_S)
    kubectl(
        "delete", "lease", "-n", _LEASE_NAMESPACE, *names, "--ignore-not-found", timeout_s=_CALL_TIMEOUT_S
    )
