"""Acts on worker pods: lifts gates, replaces outdated pods, frees pods pinned to a full node."""

import logging
from collections.abc import Callable, Sequence

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ConflictError, InvalidError, NotFoundError
from phasesplit.cluster.kinds import POD
from phasesplit.cluster.snapshot import Key
from phasesplit.operator.placement_binding import Release

logger = logging.getLogger(__name__)

# For so long a pod that was just acted on is left alone: the watch will show the effect.
_SETTLE_S = 5.0


class PodActor:
    """Patches and deletes pods, each at most once until the watch has caught up."""

    def __init__(self, cluster: Cluster, monotonic: Callable[[], float]) -> None:
        self._cluster = cluster
        self._monotonic = monotonic
        self._acted_s: dict[str, float] = {}  # by uid

    async def release(self, key: Key, pods: Sequence[Manifest], releases: Sequence[Release]) -> int:
        """Lift gates; returns how many."""
        lifted = 0
        for release in releases:
            pod = _find(pods, release.pod)
            if pod is None or not self._may_act(pod):
                continue
            where = f"to {release.node}" if release.node else "without a node"
            logger.info("%s/%s: releasing %s %s", *key, release.pod, where)
            try:
                await self._cluster.merge_patch(
                    POD, key[0], release.pod, release.patch, manager=names.FIELD_MANAGER
                )
            except (NotFoundError, ConflictError) as error:
                logger.info("%s", error)
                continue
            except InvalidError as error:
                # A pod whose selector contradicts the plan: the scheduler must see it all the same.
                logger.warning("%s; releasing it without a node", error)
                gates = {"spec": {"schedulingGates": release.patch["spec"]["schedulingGates"]}}
                await self._cluster.merge_patch(POD, key[0], release.pod, gates, manager=names.FIELD_MANAGER)
            self._acted_s[pod["metadata"]["uid"]] = self._monotonic()
            lifted += 1
        return lifted

    async def delete(self, key: Key, pods: Sequence[Manifest], wanted: Sequence[str], why: str) -> int:
        """Delete pods gracefully; their StatefulSet makes them anew. Returns how many."""
        deleted = 0
        for name in wanted:
            pod = _find(pods, name)
            if pod is None or not self._may_act(pod):
                continue
            logger.info("%s/%s: deleting pod %s: %s", *key, name, why)
            await self._cluster.delete(POD, key[0], name, uid=pod["metadata"]["uid"])
            self._acted_s[pod["metadata"]["uid"]] = self._monotonic()
            deleted += 1
        return deleted

    def _may_act(self, pod: Manifest) -> bool:
        now_s = self._monotonic()
        for uid in [uid for uid, at_s in self._acted_s.items() if now_s - at_s > _SETTLE_S]:
            del self._acted_s[uid]
        return pod["metadata"]["uid"] not in self._acted_s and "deletionTimestamp" not in pod["metadata"]


def _find(pods: Sequence[Manifest], name: str) -> Manifest | None:
    return next((pod for pod in pods if pod["metadata"]["name"] == name), None)
