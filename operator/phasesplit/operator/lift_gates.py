"""`phasesplit-operator lift-gates`: no pod may wait for an operator that is about to be removed.

Takes the Lease away from a running operator first, so that it puts no gate back; then removes the
gates from the templates, then from the pods.
"""

import asyncio
import logging
import time

from phasesplit.api import names
from phasesplit.cluster.client import Cluster, connect
from phasesplit.cluster.errors import ConflictError, NotFoundError
from phasesplit.cluster.kinds import POD, STATEFUL_SET
from phasesplit.cluster.lease import LeaseKeeper, LeaseSettings
from phasesplit.operator.placement_binding import release_patch
from phasesplit.operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

IDENTITY = "lift-gates"
# Nobody takes the Lease over meanwhile; by then the operator's Deployment is gone.
_HELD_S = 600.0


async def lift_gates(settings: OperatorSettings) -> int:
    """Lift every gate of ours; returns how many pods were released."""
    cluster = Cluster(await connect())
    try:
        lease = LeaseSettings(settings.namespace, settings.lease_name, IDENTITY, duration_s=_HELD_S)
        await LeaseKeeper(cluster, lease, time.monotonic).seize()
        # An operator that cannot reach the API server may go on writing until its own deadline.
        await asyncio.sleep(settings.lease_seconds)
        await _clean_templates(cluster, settings.watch_namespace)
        return await _release_pods(cluster, settings.watch_namespace)
    finally:
        await cluster.close()


async def _clean_templates(cluster: Cluster, namespace: str | None) -> None:
    async for body in cluster.list(STATEFUL_SET, namespace, labels=names.LABEL_MODEL):
        gates = body["spec"]["template"]["spec"].get("schedulingGates") or ()
        if not any(gate["name"] == names.PLACEMENT_GATE for gate in gates):
            continue
        where, name = body["metadata"]["namespace"], body["metadata"]["name"]
        patch = {"spec": {"template": {"spec": release_patch(None, gates)["spec"]}}}
        logger.info("removing the gate from the template of %s/%s", where, name)
        try:
            await cluster.merge_patch(STATEFUL_SET, where, name, patch, manager=IDENTITY)
        except NotFoundError:
            continue


async def _release_pods(cluster: Cluster, namespace: str | None) -> int:
    released = 0
    async for body in cluster.list(POD, namespace, labels=names.LABEL_MODEL):
        gates = body["spec"].get("schedulingGates") or ()
        if not any(gate["name"] == names.PLACEMENT_GATE for gate in gates):
            continue
        where, name = body["metadata"]["namespace"], body["metadata"]["name"]
        logger.info("releasing %s/%s", where, name)
        try:
            await cluster.merge_patch(POD, where, name, release_patch(None, gates), manager=IDENTITY)
        except (NotFoundError, ConflictError):
            continue
        released += 1
    return released
