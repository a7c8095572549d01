"""What all other pods ask for: read in chunks when a placement needs it, and remembered for a while.

Our own pods come from the watch. Watching every pod of the cluster would cost memory and CPU for
something that is needed only when a pod is to be placed.
"""

import logging
from collections.abc import Callable

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ForbiddenError
from phasesplit.cluster.kinds import POD
from phasesplit.cluster.snapshot import project_pod

logger = logging.getLogger(__name__)

FRESH_S = 15.0
STALE_S = 300.0


class OtherPods:
    """Unfinished pods without our label."""

    def __init__(self, cluster: Cluster, namespace: str | None, monotonic: Callable[[], float]) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._monotonic = monotonic
        self._read_at_s = float("-inf")
        self._pods: tuple[Manifest, ...] = ()

    async def read(self, *, placing: bool) -> tuple[Manifest, ...]:
        """The pods; read anew after seconds while something is being placed, after minutes otherwise."""
        now_s = self._monotonic()
        if now_s - self._read_at_s < (FRESH_S if placing else STALE_S):
            return self._pods
        self._read_at_s = now_s
        try:
            self._pods = await self._read(None)
        except ForbiddenError as error:
            if self._namespace is None:
                raise
            logger.info("%s; pods of other namespaces are not counted", error)
            self._pods = await self._read(self._namespace)
        return self._pods

    async def _read(self, namespace: str | None) -> tuple[Manifest, ...]:
        fields = "status.phase!=Succeeded,status.phase!=Failed"
        found = []
        async for pod in self._cluster.list(POD, namespace, labels=f"!{names.LABEL_MODEL}", fields=fields):
            if pod["spec"].get("nodeName"):
                slim = project_pod(pod)
                slim["status"] = {"phase": slim["status"].get("phase")}
                found.append(slim)
        return tuple(found)
