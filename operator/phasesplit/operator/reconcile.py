"""One pass over one object: snapshot, spec, facts, decisions, writes of what differs, one status write.

Stateless but for what is measured anew: where an object is on its way is read from the cluster, so a
restart loses nothing, and a pass over an unchanged cluster writes nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from phasesplit.api import names
from phasesplit.api.conditions import Condition, ConditionType, Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable, ServedMode
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest, ScalingPolicy
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import InvalidError
from phasesplit.cluster.events import EventWriter, Notice
from phasesplit.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION
from phasesplit.cluster.snapshot import ClusterState, Key, ModelView, Snapshot
from phasesplit.cluster.status_writer import compare, is_worth_writing
from phasesplit.cluster.usage import OtherPods
from phasesplit.cluster.volumes import VolumeReader
from phasesplit.operator import transitions
from phasesplit.operator.accept import Chosen, choose_spec, last_accepted, refuse
from phasesplit.operator.apply import OwnedByAnotherError
from phasesplit.operator.children import ChildrenWriter, Written
from phasesplit.operator.conditions import Progress, build_conditions, decided_conditions, slo_condition
from phasesplit.operator.decide import Decisions, MetricsState, Situation, decide
from phasesplit.operator.memory import Memories, ObjectMemory
from phasesplit.operator.observation import Observation, observe
from phasesplit.operator.placement_binding import find_stuck, plan_releases
from phasesplit.operator.placing import Placer
from phasesplit.operator.pods import PodActor
from phasesplit.operator.prober import Prober
from phasesplit.operator.rollout import RolloutStep, plan_rollout
from phasesplit.operator.secrets import SecretReader
from phasesplit.operator.settings import OperatorSettings
from phasesplit.operator.status import (
    StatusInput,
    build_refused_status,
    build_status,
    from_rfc3339,
    read_conditions,
)
from phasesplit.operator.table import changed_fields
from phasesplit.resources.children import template_hash
from phasesplit.resources.context import BuildContext, ImageSettings
from phasesplit.resources.pods import build_worker_template

logger = logging.getLogger(__name__)

_REFUSED_AGAIN_S = 30.0
_EAGER_S, _PATIENT_S = 60.0, 8.0


@dataclass(frozen=True)
class Collaborators:
    """Everything a pass talks to."""

    cluster: Cluster
    state: ClusterState
    children: ChildrenWriter
    pods: PodActor
    events: EventWriter
    secrets: SecretReader
    prober: Prober
    others: OtherPods
    volumes: VolumeReader
    memories: Memories
    placer: Placer
    metrics: Callable[[Key, DisaggregatedModelSpec], MetricsState]
    wall_clock: Callable[[], float]


class Reconciler:
    """Passes over objects, one at a time per object."""

    def __init__(
        self,
        with_: Collaborators,
        settings: OperatorSettings,
        images: ImageSettings,
        *,
        has_nvidia_runtime_class: bool = False,
    ) -> None:
        self._with = with_
        self._settings = settings
        self._images = images
        self._has_nvidia_runtime_class = has_nvidia_runtime_class

    async def process(self, key: Key) -> float | None:
        """One pass; returns after how many seconds the object wants the next one."""
        model = self._with.state.model(key)
        if model is None or model.deleting:
            # Children go by their owner references; writing now could bring one back.
            self._forget(key)
            return None
        memory = self._with.memories.of(key, model.uid)
        snapshot = self._with.state.snapshot(model)
        revisions = snapshot.children_of(CONTROLLER_REVISION)
        chosen = choose_spec(model, revisions)
        if chosen.spec is None:
            return await self._refuse(model, memory, chosen)
        try:
            return await self._serve(snapshot, memory, chosen)
        except OwnedByAnotherError as error:
            return await self._refuse(model, memory, refuse(str(error), Reason.OWNED_BY_ANOTHER, None))
        except InvalidError as error:
            if not chosen.is_current:
                raise
            refused = refuse(str(error), Reason.INVALID, last_accepted(revisions))
            if refused.spec is None:
                return await self._refuse(model, memory, refused)
            return await self._serve(snapshot, memory, refused)

    async def _serve(self, snapshot: Snapshot, memory: ObjectMemory, chosen: Chosen) -> float:
        spec, model = chosen.spec, snapshot.model
        if spec is None:
            raise ValueError("a spec is needed to serve")
        context = self._context(model, spec)
        if not spec.paused:
            await self._with.children.check(snapshot, context, chosen.is_current)
        token = await self._admin_token(snapshot, context, paused=spec.paused)
        await self._with.prober.read_routers(snapshot, memory, token)
        hashes = {pool: template_hash(context, pool) for pool in Pool}
        managed = spec.scaling.policy is ScalingPolicy.MANAGED and not spec.paused
        observation = observe(snapshot, memory.answers, hashes, managed=managed)
        situation = await self._situation(snapshot, spec, context, observation)
        decisions = decide(situation, memory, self._with.placer)
        written = Written()
        rollout = RolloutStep()
        if not spec.paused:
            written = await self._with.children.write(snapshot, context, decisions, memory, observation)
            rollout = await self._act_on_pods(snapshot, decisions, observation)
            if chosen.is_current:
                await self._with.children.remember_accepted(snapshot, context, memory)
        # What was just written is part of what the status is about.
        snapshot = self._with.state.snapshot(model)
        observation = observe(snapshot, memory.answers, hashes, managed=managed)
        after = replace(situation, snapshot=snapshot, observation=observation)
        progress = self._progress(memory, observation, situation, rollout)
        status = self._status(after, chosen, decisions, memory, progress)
        await self._write_status(model, memory, status)
        await self._tell(model, situation.live_table, decisions, written)
        return self._next_pass_s(snapshot, memory, decisions, token)

    async def _situation(
        self,
        snapshot: Snapshot,
        spec: DisaggregatedModelSpec,
        context: BuildContext,
        observation: Observation,
    ) -> Situation:
        placing = any(pool.bound < pool.desired or not pool.exists for pool in observation.pools.values())
        own = {pod["metadata"]["uid"] for pod in snapshot.worker_pods()}
        ours = [pod for pod in self._with.state.all_pods() if pod["metadata"]["uid"] not in own]
        live = snapshot.child(CONFIG_MAP, names.routing_name(snapshot.model.name))
        specs: dict[Pool, Manifest] = {pool: build_worker_template(context, pool)["spec"] for pool in Pool}
        return Situation(
            now_s=self._with.wall_clock(),
            snapshot=snapshot,
            spec=spec,
            observation=observation,
            live_table=read_table(live.body if live is not None else None),
            metrics=self._with.metrics(snapshot.model.key, spec),
            other_pods=(*await self._with.others.read(placing=placing), *ours),
            pod_specs=specs,
            allowed_nodes=await self._with.volumes.allowed_nodes(snapshot.worker_pods()),
        )

    async def _act_on_pods(
        self, snapshot: Snapshot, decisions: Decisions, observation: Observation
    ) -> RolloutStep:
        key, pods = snapshot.model.key, snapshot.worker_pods()
        gates = {str(pod["metadata"]["name"]): pod["spec"].get("schedulingGates") or () for pod in pods}
        releases = plan_releases(decisions.pods, decisions.plan, decisions.nodes, gates)
        await self._with.pods.release(key, pods, releases)
        stuck = find_stuck(decisions.pods)
        await self._with.pods.delete(key, pods, stuck, "pinned to a node that has no room any more")
        desired = {pool: found.desired for pool, found in observation.pools.items()}
        step = plan_rollout(observation.rollout, desired)
        await self._with.pods.delete(key, pods, step.delete, step.message)
        return step

    def _progress(
        self, memory: ObjectMemory, observation: Observation, situation: Situation, rollout: RolloutStep
    ) -> Progress:
        signature = (situation.snapshot.model.generation, *observation.progress)
        if memory.progress_at_s is None:
            memory.progress, memory.progress_at_s = signature, _waiting_since(situation)
        elif memory.progress != signature:
            memory.progress, memory.progress_at_s = signature, situation.now_s
        return Progress(
            paused=situation.spec.paused,
            rollout_message=rollout.message,
            stuck_s=situation.now_s - memory.progress_at_s,
            deadline_s=situation.spec.rollout.progress_deadline_seconds,
        )

    def _status(
        self,
        situation: Situation,
        chosen: Chosen,
        decisions: Decisions,
        memory: ObjectMemory,
        progress: Progress,
    ) -> Manifest:
        observation = situation.observation
        serves = observation.ready_workers > 0 and observation.router_ready > 0
        decided = decided_conditions(
            decisions.plan,
            decisions.mode,
            decisions.metrics,
            slo_condition(decisions.classes, decisions.loads),
        )
        model = situation.snapshot.model
        if not situation.metrics.asked:
            decided = _keep(decided, ConditionType.METRICS_AVAILABLE, model.status)
        conditions = build_conditions(
            model.generation,
            chosen.acceptance,
            observation,
            progress,
            decided,
            serving=decisions.mode.serving,
        )
        ready = next(item for item in conditions if item.type is ConditionType.READY)
        memory.settled = ready.status == "True"
        table = situation.live_table if situation.spec.paused else decisions.table
        return build_status(
            StatusInput(
                now_s=situation.now_s,
                generation=model.generation,
                spec=situation.spec,
                observation=observation,
                mode=decisions.mode,
                scaling=decisions.scaling,
                plan=decisions.plan,
                conditions=conditions,
                loads=decisions.loads,
                links=decisions.links,
                transport=memory.links.transport(),
                served=table.mode if serves and table is not None else None,
            ),
            model.status,
        )

    async def _refuse(self, model: ModelView, memory: ObjectMemory, chosen: Chosen) -> float:
        """Nothing can be served from this spec: say so, touch nothing."""
        acceptance = chosen.acceptance
        conditions = [
            Condition(
                type=kind,
                status=status,
                reason=acceptance.reason,
                message=acceptance.message,
                observed_generation=model.generation,
            )
            for kind, status in (
                (ConditionType.ACCEPTED, "False"),
                (ConditionType.READY, "False"),
                (ConditionType.STALLED, "True"),
                (ConditionType.RECONCILING, "False"),
            )
        ]
        status = build_refused_status(model.generation, conditions, model.status, self._with.wall_clock())
        await self._write_status(model, memory, status)
        return _REFUSED_AGAIN_S

    async def _write_status(self, model: ModelView, memory: ObjectMemory, status: Manifest) -> None:
        now_s = self._with.wall_clock()
        change = compare(model.status, status)
        since_s = now_s - memory.status_written_at_s
        if not is_worth_writing(change, busy=bool(memory.flowing), since_last_write_s=since_s):
            return
        body = await self._with.cluster.write_status(
            model.namespace, model.name, model.uid, status, manager=names.FIELD_MANAGER
        )
        memory.status_written_at_s = now_s
        self._with.state.wrote_status(model.key, body)
        for notice in transitions.condition_notices(model.status, status):
            await self._notify(model, notice)

    async def _tell(
        self, model: ModelView, before: RoutingTable | None, decisions: Decisions, written: Written
    ) -> None:
        notices = transitions.drift_notices([*written.children, *written.scales])
        scales = [change for change in written.scales if not change.drift]
        notices += transitions.scale_notices(scales, decisions.scaling)
        if written.table_changed:
            fields = changed_fields(before, decisions.table)
            logger.info("%s/%s: routing table %d: %s", *model.key, decisions.table.version, fields)
            switch = transitions.mode_notice(before.mode if before is not None else None, decisions.mode)
            notices += [switch] if switch is not None else []
        for notice in notices:
            await self._notify(model, notice)

    async def _notify(self, model: ModelView, notice: Notice) -> None:
        logger.info("%s/%s: %s: %s", *model.key, notice.reason, notice.note)
        await self._with.events.write(model.namespace, model.name, model.uid, notice)

    def _next_pass_s(
        self, snapshot: Snapshot, memory: ObjectMemory, decisions: Decisions, token: str
    ) -> float:
        settings = self._settings
        split = decisions.table.mode is ServedMode.SPLIT
        waiting = decisions.mode.memory.cause is not None
        stale_s = settings.probe_seconds if split or waiting else 3 * settings.probe_seconds
        self._with.prober.probe_stale_links(
            snapshot, memory, token, workers=decisions.workers, stale_s=stale_s
        )
        if memory.flowing:
            return settings.tick_seconds
        if not memory.settled:
            # Changes of pods wake the object anyway; only reports of workers have to be asked for.
            waited_s = self._with.wall_clock() - (memory.progress_at_s or 0.0)
            return settings.tick_seconds if waited_s < _EAGER_S else _PATIENT_S
        across = {worker.node for worker in decisions.workers}
        if len(across) > 1 and (split or waiting):
            return min(settings.idle_seconds, settings.probe_seconds)
        return settings.idle_seconds

    async def _admin_token(self, snapshot: Snapshot, context: BuildContext, *, paused: bool) -> str:
        if paused:
            name = names.transfer_secret_name(context.name)
            found = await self._with.secrets.value(context.namespace, name, names.SECRET_KEY_ADMIN)
            return found or ""
        return await self._with.secrets.ensure_own(context, snapshot.model)

    def _context(self, model: ModelView, spec: DisaggregatedModelSpec) -> BuildContext:
        return BuildContext(
            name=model.name,
            namespace=model.namespace,
            uid=model.uid,
            generation=model.generation,
            spec=spec,
            settings=self._images,
            has_nvidia_runtime_class=self._has_nvidia_runtime_class,
        )

    def _forget(self, key: Key) -> None:
        self._with.state.forget(key)
        self._with.memories.forget(key)
        self._with.placer.forget(key)
        self._with.secrets.forget(key)


def read_table(config_map: Manifest | None) -> RoutingTable | None:
    """The table in a ConfigMap; None if there is none that can be read."""
    text = ((config_map or {}).get("data") or {}).get(names.ROUTING_KEY)
    if not text:
        return None
    try:
        return RoutingTable.model_validate_json(text)
    except ValueError:
        logger.warning("the live routing table cannot be read; it is written anew")
        return None


def _keep(decided: list[Condition], kind: ConditionType, status: Manifest) -> list[Condition]:
    """The condition as it was written last, where this copy knows nothing newer yet."""
    before = {condition.type: condition for condition in read_conditions(status)}
    return [before.get(kind, item) if item.type is kind else item for item in decided]


def _waiting_since(situation: Situation) -> float:
    """After a restart of the operator: since when the object has been on its way."""
    for condition in read_conditions(situation.snapshot.model.status):
        if condition.type is ConditionType.RECONCILING and condition.status == "True":
            since_s = from_rfc3339(condition.last_transition_time)
            return since_s if since_s is not None else situation.now_s
    return situation.now_s
