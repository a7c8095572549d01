"""All children of one object in one pass: checked, applied where they differ, scaled, remembered."""

from dataclasses import dataclass, field, replace

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest, ScalingPolicy
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, SERVICE, STATEFUL_SET
from phasesplit.cluster.snapshot import ClusterState, Key, Snapshot
from phasesplit.operator.apply import Change, ChildWriter
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import Observation
from phasesplit.operator.situation import Decisions
from phasesplit.resources.children import (
    build_accepted_revision,
    build_children,
    build_scale,
    keep_template,
)
from phasesplit.resources.context import BuildContext

# Kinds whose content the user's spec can make invalid in ways that only the API server knows.
_DRY_RUN_KINDS = frozenset({STATEFUL_SET.kind, DEPLOYMENT.kind, SERVICE.kind})


@dataclass(frozen=True)
class Written:
    """What a pass changed."""

    children: list[Change] = field(default_factory=list)
    scales: list[Change] = field(default_factory=list)
    table_changed: bool = False


@dataclass(frozen=True)
class _Built:
    """Children of one object as they were built last, and from what."""

    context: BuildContext
    table: RoutingTable
    manifests: tuple[Manifest, ...]


class ChildrenWriter:
    """Writes the children of one object.

    At rest a pass finds the same manifests and the same versions of the live objects as the one before,
    and compares nothing.
    """

    def __init__(self, cluster: Cluster, state: ClusterState) -> None:
        self._cluster = cluster
        self._state = state
        self._child = ChildWriter(cluster, state)
        self._built: dict[Key, _Built] = {}
        self._equal: dict[tuple[Key, str, str], tuple[Manifest, int]] = {}  # manifest and live version

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._built.pop(key, None)
        for known in [known for known in self._equal if known[0] == key]:
            del self._equal[known]

    async def check(self, snapshot: Snapshot, context: BuildContext, is_current: bool) -> None:
        """Before anything is written: nobody else holds a name, and the API server takes a new spec.

        Raises OwnedByAnotherError or InvalidError. A spec that was accepted before is not tried again.
        """
        known = self._built.get(snapshot.model.key)
        same = known is not None and known.context.spec == context.spec
        children = known.manifests if known is not None and same else self._build(context, RoutingTable())
        for manifest in children:
            await self._child.find(snapshot, manifest)
        revision = build_accepted_revision(context)
        if not is_current or snapshot.child(CONTROLLER_REVISION, revision["metadata"]["name"]) is not None:
            return
        for manifest in children:
            if manifest["kind"] in _DRY_RUN_KINDS:
                await self._child.try_out(manifest)

    async def write(
        self,
        snapshot: Snapshot,
        context: BuildContext,
        decisions: Decisions,
        memory: ObjectMemory,
        observation: Observation,
    ) -> Written:
        """Apply what differs."""
        written = Written()
        key = snapshot.model.key
        for manifest in self._build_once(key, replace(context, gated=decisions.gated), decisions.table):
            which = (key, manifest["kind"], manifest["metadata"]["name"])
            live = snapshot.children.get(which[1:])
            known = self._equal.get(which)
            if known is not None and live is not None and known[0] is manifest and known[1] == live.version:
                continue
            prepared = self._prepare(snapshot, manifest, decisions, observation, context)
            change = await self._child.apply(snapshot, prepared, memory.applied, names.FIELD_MANAGER)
            if change is not None:
                written.children.append(change)
            elif live is not None:
                self._equal[which] = (manifest, live.version)
        for pool in Pool:
            replicas = self._replicas(pool, context, decisions, observation)
            if replicas is None:
                continue
            scale = build_scale(context, pool, replicas)
            current = snapshot if not written.children else self._state.snapshot(snapshot.model)
            change = await self._child.apply(current, scale, memory.applied, names.SCALER_FIELD_MANAGER)
            if change is not None and observation.pools[pool].exists:
                written.scales.append(change)
        table_changed = any(change.kind == CONFIG_MAP.kind for change in written.children)
        return replace(written, table_changed=table_changed)

    async def remember_accepted(
        self, snapshot: Snapshot, context: BuildContext, memory: ObjectMemory
    ) -> None:
        """Keep the accepted spec; older ones go once it is there."""
        live = snapshot.children_of(CONTROLLER_REVISION)
        if len(live) == 1 and memory.remembered is not None:
            spec, version = memory.remembered
            if spec is context.spec and version == live[0].version:
                return
        revision = build_accepted_revision(context)
        change = await self._child.apply(snapshot, revision, memory.applied, names.FIELD_MANAGER)
        if change is None and len(live) == 1:
            memory.remembered = (context.spec, live[0].version)
        for child in live:
            if child.name != revision["metadata"]["name"] and child.owner_uid == snapshot.model.uid:
                await self._cluster.delete(CONTROLLER_REVISION, child.namespace, child.name, uid=child.uid)
                self._state.deleted_child(snapshot.model.key, child)

    def _build_once(self, key: Key, context: BuildContext, table: RoutingTable) -> tuple[Manifest, ...]:
        """The very same manifests for the same context and table."""
        known = self._built.get(key)
        if known is None or known.table is not table or known.context != context:
            known = self._built[key] = _Built(context, table, self._build(context, table))
        return known.manifests

    @staticmethod
    def _build(context: BuildContext, table: RoutingTable) -> tuple[Manifest, ...]:
        """The routing table first: it acts within a second."""
        manifests = build_children(context, table)
        return tuple(sorted(manifests, key=lambda manifest: bool(manifest["kind"] != CONFIG_MAP.kind)))

    def _prepare(
        self,
        snapshot: Snapshot,
        manifest: Manifest,
        decisions: Decisions,
        observation: Observation,
        context: BuildContext,
    ) -> Manifest:
        if manifest["kind"] not in (STATEFUL_SET.kind, DEPLOYMENT.kind):
            return manifest
        child = snapshot.children.get((manifest["kind"], manifest["metadata"]["name"]))
        if child is not None:
            return keep_template(manifest, child.owned())
        if manifest["kind"] == STATEFUL_SET.kind:
            # Born with the right number; the scaler takes the field over in the same pass.
            pool = next(p for p in Pool if names.pool_name(context.name, p) == manifest["metadata"]["name"])
            replicas = self._replicas(pool, context, decisions, observation)
            if replicas is not None:
                return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}
        return manifest

    @staticmethod
    def _replicas(
        pool: Pool, context: BuildContext, decisions: Decisions, observation: Observation
    ) -> int | None:
        """What the scaler writes; None: it does not."""
        policy = context.spec.scaling.policy
        if policy is ScalingPolicy.MANAGED:
            return decisions.scaling.replicas.get(pool)
        # Somebody else decides from now on, but the first number has to come from somewhere.
        return None if observation.pools[pool].exists else max(1, context.spec.pool(pool).replicas.min)
