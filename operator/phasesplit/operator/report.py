"""Tells the user: status, conditions and Events of one object, written only where they are news."""

import logging
from collections.abc import Callable

from phasesplit.api import names
from phasesplit.api.conditions import Condition, ConditionType
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.events import EventWriter, Notice
from phasesplit.cluster.snapshot import ClusterState, ModelView
from phasesplit.cluster.status_writer import Change, changed_facts, compare, is_worth_writing
from phasesplit.operator import transitions
from phasesplit.operator.accept import Chosen
from phasesplit.operator.children import Written
from phasesplit.operator.conditions import Progress, build_conditions, decided_conditions, slo_condition
from phasesplit.operator.evidence_status import ReplayNews
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.rollout import RolloutStep
from phasesplit.operator.situation import Decisions, Situation
from phasesplit.operator.status import StatusInput, build_refused_status, build_status, read_conditions
from phasesplit.operator.table import changed_fields
from phasesplit.operator.times import from_rfc3339

logger = logging.getLogger(__name__)


class Reporter:
    """Writes the status of one object at a time, and the news about it."""

    def __init__(
        self,
        cluster: Cluster,
        state: ClusterState,
        events: EventWriter,
        wall_clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._events = events
        self._wall_clock = wall_clock

    async def report(
        self,
        situation: Situation,
        chosen: Chosen,
        decisions: Decisions,
        memory: ObjectMemory,
        rollout: RolloutStep,
    ) -> None:
        """The status after a pass."""
        progress = _progress(memory, situation, rollout)
        status = _status(situation, chosen, decisions, memory, progress)
        await self._write_status(situation.snapshot.model, memory, status)

    async def refuse(self, model: ModelView, memory: ObjectMemory, chosen: Chosen) -> None:
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
        status = build_refused_status(model.generation, conditions, model.status, self._wall_clock())
        await self._write_status(model, memory, status)

    async def tell(
        self, model: ModelView, before: RoutingTable | None, decisions: Decisions, written: Written
    ) -> None:
        """Events about what a pass has changed."""
        notices = transitions.drift_notices([*written.children, *written.scales])
        scales = [change for change in written.scales if not change.drift]
        notices += transitions.scale_notices(scales, decisions.scaling)
        if written.table_changed:
            fields = changed_fields(before, decisions.table)
            logger.info("%s/%s: routing table %d: %s", *model.key, decisions.table.version, fields)
            switch = transitions.mode_notice(before.mode if before is not None else None, decisions.mode)
            notices += [switch] if switch is not None else []
            if switch is None:
                roles = before.roles if before is not None else None
                notices += transitions.role_notices(roles, decisions.table.roles, decisions.scaling)
        for notice in notices:
            await self._notify(model, notice)

    async def _write_status(self, model: ModelView, memory: ObjectMemory, status: Manifest) -> None:
        now_s = self._wall_clock()
        change = compare(model.status, status)
        since_s = now_s - memory.status_written_at_s
        if not is_worth_writing(change, busy=bool(memory.flowing), since_last_write_s=since_s):
            return
        body = await self._cluster.write_status(
            model.namespace, model.name, model.uid, status, manager=names.FIELD_MANAGER
        )
        memory.status_written_at_s = now_s
        self._state.wrote_status(model.key, body)
        if change is Change.FACTS:
            logger.info("%s/%s: status: %s", *model.key, changed_facts(model.status, status))
        for notice in transitions.condition_notices(model.status, status):
            await self._notify(model, notice)

    async def _notify(self, model: ModelView, notice: Notice) -> None:
        logger.info("%s/%s: %s: %s", *model.key, notice.reason, notice.note)
        await self._events.write(model.namespace, model.name, model.uid, notice)


def _progress(memory: ObjectMemory, situation: Situation, rollout: RolloutStep) -> Progress:
    signature = (situation.snapshot.model.generation, *situation.observation.progress)
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
            replay=ReplayNews(memory.replay.flips if memory.replay else (), memory.replay_error),
        ),
        model.status,
    )


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
