"""Children: apply what differs, refuse what another owner holds, re-create what cannot be changed."""

import asyncio
import hashlib
import json
import logging
from dataclasses import dataclass

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.diff import Difference, Why, first_difference
from phasesplit.cluster.errors import ConflictError, InvalidError
from phasesplit.cluster.kinds import kind_of
from phasesplit.cluster.snapshot import Child, ClusterState, ModelView, Snapshot
from phasesplit.operator import instruments

logger = logging.getLogger(__name__)

_GONE_WITHIN_S = 10.0
_IMMUTABLE_SIGNS = (
    "immutable",
    "Forbidden: updates to statefulset spec",
    "cannot change roleRef",
    "may not change",
)


class OwnedByAnotherError(Exception):
    """A child's name is taken by an object that is not ours; the message is a sentence for the user."""


@dataclass(frozen=True)
class Change:
    """One write that was needed."""

    kind: str
    name: str
    difference: Difference
    drift: bool  # somebody else had changed it

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.difference}"


class ChildWriter:
    """Applies the children of one object at a time."""

    def __init__(self, cluster: Cluster, state: ClusterState) -> None:
        self._cluster = cluster
        self._state = state

    async def find(self, snapshot: Snapshot, manifest: Manifest) -> Child | None:
        """The live child. Raises OwnedByAnotherError when the name is taken."""
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        child = snapshot.child(kind, name)
        if child is None:
            # Not among what the watches select by label: it may exist without our label.
            body = await self._cluster.find(kind, snapshot.model.namespace, name)
            child = Child.from_body(body) if body is not None else None
        if child is not None:
            check_owner(child, snapshot.model)
        return child

    async def apply(
        self, snapshot: Snapshot, manifest: Manifest, applied: dict[tuple[str, str, str], str], manager: str
    ) -> Change | None:
        """Apply if it differs. `applied` remembers what was last wanted: so drift shows."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        child = await self.find(snapshot, manifest)
        fields = child.fields.get(manager, {}) if child is not None else {}
        difference = first_difference(manifest, child.body if child else None, fields)
        slot, digest = (kind, name, manager), _digest(manifest)
        if difference is None:
            applied[slot] = digest
            return None
        known = applied.get(slot)
        drift = child is not None and (known == digest or (known is None and difference.why is Why.NOT_OURS))
        logger.info("%s/%s: applying %s %s: %s", *snapshot.model.key, kind, name, difference)
        await self._write(snapshot.model, manifest, child, manager)
        applied[slot] = digest
        instruments.WRITES.labels(kind).inc()
        return Change(kind, name, difference, drift)

    async def try_out(self, manifest: Manifest) -> None:
        """Let the API server validate without storing. Raises InvalidError.

        What is only immutable is no fault of the spec: the child is then made anew.
        """
        try:
            await self._cluster.apply(manifest, names.FIELD_MANAGER, dry_run=True)
        except InvalidError as error:
            if not _is_about_immutable(error):
                raise

    async def _write(self, model: ModelView, manifest: Manifest, child: Child | None, manager: str) -> None:
        try:
            body = await self._cluster.apply(manifest, manager)
        except InvalidError as error:
            if child is None or not _is_about_immutable(error):
                raise
            logger.info(
                "%s/%s: %s %s cannot be changed in place, making it anew", *model.key, child.kind, child.name
            )
            body = await self._recreate(manifest, child, manager)
        if child is not None and str(body["metadata"].get("resourceVersion")) == str(child.version):
            logger.warning("%s/%s: applying %s %s changed nothing", *model.key, manifest["kind"], child.name)
        self._state.wrote_child(model.key, body)

    async def _recreate(self, manifest: Manifest, child: Child, manager: str) -> Manifest:
        """Delete without what it owns, wait until it is gone, apply; its pods are adopted again."""
        kind = kind_of(manifest)
        await self._cluster.delete(kind, child.namespace, child.name, uid=child.uid, orphan=True)
        waited_s = 0.0
        while await self._cluster.find(kind, child.namespace, child.name) is not None:
            if waited_s >= _GONE_WITHIN_S:
                raise ConflictError(f"{child.kind} {child.namespace}/{child.name} is being deleted")
            await asyncio.sleep(0.2)
            waited_s += 0.2
        replicas = child.body.get("spec", {}).get("replicas")
        if replicas is not None and "spec" in manifest:
            # Otherwise it would start with one replica, until the scaler's next write.
            manifest = {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}
        return await self._cluster.apply(manifest, manager)


def check_owner(child: Child, model: ModelView) -> None:
    """Raises unless the child is ours: controlled by this object, or orphaned with its label."""
    if child.owner_uid == model.uid:
        return
    if child.owner_uid is not None and child.owner == f"{names.KIND} {model.name}":
        raise ConflictError(
            f"{child.kind} {child.name} belongs to an earlier {model.name} that is being deleted"
        )
    labels = child.body["metadata"].get("labels") or {}
    if child.owner_uid is None and labels.get(names.LABEL_MODEL) == model.name:
        return
    holder = f"is controlled by {child.owner}" if child.owner else "exists and was not made by this operator"
    remedy = "delete or rename it, or give the DisaggregatedModel another name"
    raise OwnedByAnotherError(f"{child.kind} {child.name} {holder}; {remedy}")


def _is_about_immutable(error: InvalidError) -> bool:
    return any(sign in str(error) for sign in _IMMUTABLE_SIGNS)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
