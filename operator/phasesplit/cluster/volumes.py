"""Nodes to which pods are tied by their volumes: claim -> PersistentVolume -> node affinity.

Read only for pods that have claims and are not bound to a node yet, and remembered for a minute.
"""

from collections.abc import Callable, Iterable

from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ForbiddenError
from phasesplit.cluster.kinds import PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM
from phasesplit.planner.facts import NodeFacts
from phasesplit.planner.reading import to_node_facts, to_volume_nodes

_KEPT_S = 60.0


class VolumeReader:
    """Volumes behind pods."""

    def __init__(
        self, cluster: Cluster, nodes: Callable[[], Iterable[Manifest]], monotonic: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._monotonic = monotonic
        self._known: dict[tuple[str, str], tuple[float, frozenset[str] | None]] = {}
        self._modes: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {}

    async def allowed_nodes(self, pods: Iterable[Manifest]) -> dict[str, frozenset[str]]:
        """By pod name: the nodes on which all its volumes can be mounted. Free pods are left out."""
        allowed: dict[str, frozenset[str]] = {}
        for pod in pods:
            claims = [volume["persistentVolumeClaim"] for volume in pod["spec"].get("volumes") or ()]
            if not claims or pod["spec"].get("nodeName"):
                continue
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            for claim in claims:
                nodes = await self._nodes_of(namespace, claim["claimName"])
                if nodes is not None:
                    allowed[name] = allowed[name] & nodes if name in allowed else nodes
        return allowed

    async def access_modes(self, namespace: str, claim: str) -> tuple[str, ...]:
        """Access modes of a claim; none when it does not exist (yet) or may not be read."""
        known = self._modes.get((namespace, claim))
        if known is not None and self._monotonic() - known[0] < _KEPT_S:
            return known[1]
        try:
            body = await self._cluster.find(PERSISTENT_VOLUME_CLAIM, namespace, claim)
        except ForbiddenError:
            body = None
        modes = tuple(((body or {}).get("spec") or {}).get("accessModes") or ())
        self._modes[namespace, claim] = (self._monotonic(), modes)
        return modes

    async def _nodes_of(self, namespace: str, claim: str) -> frozenset[str] | None:
        known = self._known.get((namespace, claim))
        if known is not None and self._monotonic() - known[0] < _KEPT_S:
            return known[1]
        nodes = await self._read(namespace, claim)
        self._known[namespace, claim] = (self._monotonic(), nodes)
        return nodes

    async def _read(self, namespace: str, claim: str) -> frozenset[str] | None:
        try:
            body = await self._cluster.find(PERSISTENT_VOLUME_CLAIM, namespace, claim)
            volume_name = ((body or {}).get("spec") or {}).get("volumeName")
            volume = await self._cluster.find(PERSISTENT_VOLUME, None, volume_name) if volume_name else None
        except ForbiddenError:
            return None  # the scheduler knows; the plan only misses a restriction
        if volume is None:
            return None
        facts: list[NodeFacts] = [to_node_facts(node) for node in self._nodes()]
        return to_volume_nodes(volume, facts)
