"""Kubernetes Events about the user's object, written on transitions only.

An event that cannot be written is logged and forgotten: it is news, not state.
"""

import hashlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from phasesplit.api import names
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ClusterError

logger = logging.getLogger(__name__)

_MAX_NOTE = 1000


@dataclass(frozen=True)
class Notice:
    """One thing that happened to one object."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str = "Reconcile"


class EventWriter:
    """Writes Events as `phasesplit`."""

    def __init__(self, cluster: Cluster, instance: str) -> None:
        self._cluster = cluster
        self._instance = instance

    async def write(self, namespace: str, name: str, uid: str, notice: Notice) -> None:
        """One Event, regarding the user's object."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        unique = hashlib.sha256(f"{uid}{notice.reason}{notice.note}{now}".encode()).hexdigest()[:16]
        manifest = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{unique}", "namespace": namespace},
            "eventTime": now,
            "type": notice.type,
            "reason": notice.reason,
            "note": notice.note[:_MAX_NOTE],
            "action": notice.action,
            "reportingController": f"{names.GROUP}/operator",
            "reportingInstance": self._instance[:128] or "operator",
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": namespace,
                "name": name,
                "uid": uid,
            },
        }
        try:
            await self._cluster.create(manifest, names.FIELD_MANAGER)
        except ClusterError as error:
            logger.info("no event for %s/%s: %s", namespace, name, error)
