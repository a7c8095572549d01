"""One pass over one object: snapshot, spec, facts, decisions, writes of what differs, one status write.

Stateless but for what is measured anew: where an object is on its way is read from the cluster, so a
restart loses nothing, and a pass over an unchanged cluster writes nothing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phasesplit.api import names
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable, ServedMode
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest, ScalingPolicy
from phasesplit.api.validation import find_claim_problem
from phasesplit.cluster.errors import InvalidError
from phasesplit.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION
from phasesplit.cluster.snapshot import Child, ClusterState, Key, ModelView, Snapshot
from phasesplit.cluster.usage import OtherPods
from phasesplit.cluster.volumes import VolumeReader
from phasesplit.operator.accept import Chosen, choose_spec, last_accepted, refuse
from phasesplit.operator.apply import OwnedByAnotherError
from phasesplit.operator.children import ChildrenWriter, Written
from phasesplit.operator.decide import decide
from phasesplit.operator.memory import Memories, ObjectMemory, Templates
from phasesplit.operator.observation import Observation, observe
from phasesplit.operator.placement_binding import find_stuck, plan_releases
from phasesplit.operator.placing import Placer
from phasesplit.operator.pods import PodActor
from phasesplit.operator.prober import Prober
from phasesplit.operator.replays import ReplayRunner
from phasesplit.operator.report import Reporter
from phasesplit.operator.rollout import RolloutStep, plan_rollout
from phasesplit.operator.secrets import SecretReader
from phasesplit.operator.settings import OperatorSettings
from phasesplit.operator.situation import Decisions, MetricsState, Situation
from phasesplit.operator.traffic_reader import TrafficReader
from phasesplit.resources.children import template_hash
from phasesplit.resources.context import BuildContext, ImageSettings
from phasesplit.resources.pods import build_worker_template

logger = logging.getLogger(__name__)

_REFUSED_AGAIN_S = 10.0
_TRY_AGAIN_S = 60.0
_EAGER_S, _PATIENT_S = 60.0, 8.0


@dataclass(frozen=True)
class Collaborators:
    """Everything a pass talks to."""

    state: ClusterState
    children: ChildrenWriter
    pods: PodActor
    reporter: Reporter
    secrets: SecretReader
    prober: Prober
    traffic: TrafficReader
    replays: ReplayRunner
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
        chosen = _choose(model, revisions, memory)
        if chosen.spec is None:
            return await self._refuse(model, memory, chosen)
        try:
            if memory.refused is not None and self._is_still_refused(model, memory.refused):
                return await self._serve_older(snapshot, memory, memory.refused[2])
            return await self._serve(snapshot, memory, chosen)
        except OwnedByAnotherError as error:
            return await self._refuse(model, memory, refuse(str(error), Reason.OWNED_BY_ANOTHER, None))
        except InvalidError as error:
            if not chosen.is_current:
                raise
            return await self._serve_older(snapshot, memory, str(error))

    def _is_still_refused(self, model: ModelView, refused: tuple[int, float, str]) -> bool:
        """Trying the same spec again and again would write to the API server for nothing."""
        generation, at_s, _ = refused
        return generation == model.generation and self._with.wall_clock() - at_s < _TRY_AGAIN_S

    async def _serve_older(self, snapshot: Snapshot, memory: ObjectMemory, why: str) -> float:
        """The current spec cannot be acted on: serve the last accepted one, if there is any."""
        model = snapshot.model
        if memory.refused is None or not self._is_still_refused(model, memory.refused):
            memory.refused = (model.generation, self._with.wall_clock(), why)
        refused = refuse(why, Reason.INVALID, last_accepted(snapshot.children_of(CONTROLLER_REVISION)))
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
        await self._with.traffic.read(snapshot, memory, token)
        hashes = _templates(context, memory).hashes
        managed = spec.scaling.policy is ScalingPolicy.MANAGED and not spec.paused
        observation = observe(snapshot, memory.answers, hashes, managed=managed)
        situation = await self._situation(snapshot, memory, context, observation)
        decisions = decide(situation, memory, self._with.placer)
        if chosen.is_current:
            await self._check_claim(spec, decisions, observation)
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
        await self._with.reporter.report(after, chosen, decisions, memory, rollout)
        await self._with.reporter.tell(model, situation.live_table, decisions, written)
        self._with.replays.consider(model.key, memory, decisions.mode_input)
        return self._next_pass_s(snapshot, memory, decisions, token)

    async def _situation(
        self, snapshot: Snapshot, memory: ObjectMemory, context: BuildContext, observation: Observation
    ) -> Situation:
        spec = context.spec
        placing = any(pool.bound < pool.desired or not pool.exists for pool in observation.pools.values())
        own = {pod["metadata"]["uid"] for pod in snapshot.worker_pods()}
        ours = [pod for pod in self._with.state.all_pods() if pod["metadata"]["uid"] not in own]
        live = snapshot.child(CONFIG_MAP, names.routing_name(snapshot.model.name))
        return Situation(
            now_s=self._with.wall_clock(),
            snapshot=snapshot,
            spec=spec,
            observation=observation,
            live_table=_live_table(live, memory),
            metrics=self._with.metrics(snapshot.model.key, spec),
            other_pods=(*await self._with.others.read(placing=placing), *ours),
            pod_specs=_templates(context, memory).pod_specs,
            allowed_nodes=await self._with.volumes.allowed_nodes(snapshot.worker_pods()),
        )

    async def _check_claim(
        self, spec: DisaggregatedModelSpec, decisions: Decisions, observation: Observation
    ) -> None:
        """Raises InvalidError for a claim that the chosen nodes cannot share."""
        volume = spec.model.source.volume
        if volume is None:
            return
        modes = await self._with.volumes.access_modes(decisions.table.namespace, volume.claim_name)
        planned = {node for nodes in decisions.plan.nodes.values() for node in nodes if node is not None}
        bound = {node for pool in observation.pools.values() for node in pool.nodes}
        workers = sum(len(nodes) for nodes in decisions.plan.nodes.values())
        problem = find_claim_problem(spec, modes, planned | bound, workers)
        if problem is not None:
            raise InvalidError(problem.message)

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

    async def _refuse(self, model: ModelView, memory: ObjectMemory, chosen: Chosen) -> float:
        await self._with.reporter.refuse(model, memory, chosen)
        return _REFUSED_AGAIN_S

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
            name = names.transfer_secret_name(context.name, context.uid)
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
        self._with.children.forget(key)


def _choose(model: ModelView, revisions: Sequence[Child], memory: ObjectMemory) -> Chosen:
    version = (model.generation, *sorted(child.name for child in revisions))
    if memory.chosen is None or memory.chosen[0] != version:
        memory.chosen = (version, choose_spec(model, revisions))
    return memory.chosen[1]


def _templates(context: BuildContext, memory: ObjectMemory) -> Templates:
    if memory.templates is None or memory.templates[0] != context:
        hashes = {pool: template_hash(context, pool) for pool in Pool}
        specs = {pool: build_worker_template(context, pool)["spec"] for pool in Pool}
        memory.templates = (context, Templates(hashes, specs))
    return memory.templates[1]


def _live_table(config_map: Child | None, memory: ObjectMemory) -> RoutingTable | None:
    version = config_map.version if config_map is not None else -1
    if memory.table is None or memory.table[0] != version:
        memory.table = (version, read_table(config_map.body if config_map is not None else None))
    return memory.table[1]


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
