"""From one snapshot and what is remembered to all decisions of a pass. Pure: the planner decides.

Here its inputs are put together and its answers fitted into one desired state.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from phasesplit.api import names
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode, TrialTable
from phasesplit.api.v1alpha1 import Binding, Mode
from phasesplit.operator import metrics, table
from phasesplit.operator.facts import (
    bound_nodes,
    has_rules_between_pods,
    read_nodes,
    read_pods,
)
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.mode_facts import Facts, best_profiles, build_mode_input
from phasesplit.operator.observation import Observation
from phasesplit.operator.placing import Placer, PlacingInput, tell_shortage
from phasesplit.operator.situation import Decisions, Situation
from phasesplit.operator.sizing import least_workers, scale_within_room, to_bounds
from phasesplit.planner.facts import NodeFacts, PodFacts, WorkerFacts
from phasesplit.planner.metrics_health import judge_metrics
from phasesplit.planner.metrics_types import MetricsInput, MetricsVerdict, Permission
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ModeDecision, ModeInput
from phasesplit.planner.placement import binding_for
from phasesplit.planner.placement_types import PlacementPlan, PoolRequest
from phasesplit.planner.reading import to_pool_request
from phasesplit.planner.replay_schedule import tuned_step_s
from phasesplit.planner.scaling_types import ScalingDecision, ScalingInput

_CAUSES = frozenset({Reason.LINK_DEGRADED, Reason.POOL_UNAVAILABLE, Reason.MISMATCH, Reason.COLOCATED_BETTER})


def decide(given: Situation, memory: ObjectMemory, placer: Placer) -> Decisions:
    """All decisions of one pass; the planner's memories are kept in `memory`."""
    spec, observation = given.spec, given.observation
    classes = table.latency_classes(spec)
    reports = [answer.report for answer in memory.answers if answer.report is not None]
    verdict = _judge(given, memory, classes)
    loads = metrics.to_loads(reports, verdict, metrics.window_s(given.metrics.scrape_interval_s))
    links = memory.links.facts(given.now_s)
    workers = _workers(given, observation)
    pods = read_pods(given.snapshot.worker_pods(), observation.reports, given.now_s)
    nodes = _nodes(given, memory)
    kv_bytes = max((worker.kv_bytes_per_token for worker in workers), default=0) or None
    plan, room = placer.place(
        given.snapshot.model.key,
        PlacingInput(
            pools={pool: _pool_request(given, pool, pods) for pool in Pool},
            least={pool: least_workers(spec, pool) for pool in Pool},
            largest={pool: spec.pool(pool).replicas.max for pool in Pool},
            nodes=nodes,
            links=links,
            levels=tuple(level.node_label for level in spec.placement.levels),
            loads=loads,
            kv_bytes_per_token=kv_bytes,
        ),
    )
    memory.transfers.note_ready(_readiness(observation), given.now_s)
    facts = Facts(plan, classes, loads, links, workers, nodes, kv_bytes, busy=bool(memory.flowing))
    mode_input = build_mode_input(given, memory, facts)
    mode = decide_mode(mode_input)
    if not spec.paused:  # what is decided meanwhile is not served: a trial must not count on it
        memory.mode = mode.memory
    scaling = scale_within_room(
        placer,
        given.snapshot.model.key,
        ScalingInput(
            now_s=given.now_s,
            mode=mode.mode,
            pools={pool: to_bounds(given, pool, room) for pool in Pool},
            classes=classes,
            loads=loads,
            workers=workers,
            metrics=verdict,
            policy=spec.scaling.policy,
            role_switching=spec.scaling.role_switching,
            max_gpus=spec.scaling.max_gpus,
            placeable_total=room.total,
            keep_both_pools=spec.mode is not Mode.COLOCATED,
            profiles=best_profiles(workers),
            chunk_tokens=spec.colocated.max_batched_tokens,
            kv_tokens_per_worker=min((w.kv_total_tokens for w in workers if w.kv_total_tokens), default=None),
            kv_bytes_per_token=float(kv_bytes or 0),
            link_bytes_per_s=median(link.bytes_per_s for link in links) if links else None,
            down_stabilization_s=spec.scaling.down_stabilization_seconds,
            memory=memory.scaling,
            # Colocated needs are counted from rates alone.
            arrivals=memory.traffic.arrivals(classes, given.now_s) if mode.mode is ServedMode.SPLIT else (),
        ),
    )
    memory.scaling = scaling.memory
    content = _table_content(given, mode, scaling, facts, _colocated_step_s(given, memory, mode_input))
    return Decisions(
        plan=tell_shortage(plan, room) if scaling.replicas else plan,
        mode=mode,
        mode_input=mode_input,
        scaling=scaling,
        metrics=verdict,
        table=table.next_table(given.live_table, content, memory.table_version_seen),
        gated={pool: _is_gated(given, plan, pool) for pool in Pool},
        classes=classes,
        loads=loads,
        links=links,
        pods=pods,
        nodes=nodes,
        workers=workers,
    )


def _nodes(given: Situation, memory: ObjectMemory) -> tuple[NodeFacts, ...]:
    """Read anew only when a node or a pod is another one: the watches keep what has not changed."""
    pods = (*given.other_pods, *given.snapshot.worker_pods())
    source = (*given.snapshot.nodes, *pods)
    known = memory.nodes
    if (
        known is None
        or len(known[0]) != len(source)
        or any(a is not b for a, b in zip(known[0], source, strict=True))
    ):
        known = memory.nodes = (source, read_nodes(given.snapshot.nodes, pods))
    return known[1]


def _judge(given: Situation, memory: ObjectMemory, classes: tuple[LatencyClass, ...]) -> MetricsVerdict:
    ready = [pool for pool in Pool if given.observation.pools[pool].ready > 0]
    state = given.metrics
    if not state.asked:
        hold = Permission(may_grow=False, may_shrink=False)
        message = "Prometheus has not been asked yet"
        return MetricsVerdict(
            "Unknown", Reason.METRICS_MISSING, message, permissions=dict.fromkeys(Pool, hold)
        )
    return judge_metrics(
        MetricsInput(
            configured=state.configured,
            samples=metrics.to_samples(memory.metrics, classes, ready),
            error=state.error,
            error_detail=state.error_detail,
            failing_s=state.failing_s,
            scrape_interval_s=state.scrape_interval_s,
            router_flowing=memory.flowing,
            router_idle_s=memory.idle_s,
        )
    )


def _workers(given: Situation, observation: Observation) -> tuple[WorkerFacts, ...]:
    """Workers that exist as pods; a report of a pod that is gone is history.

    A worker's role is what the live table says: its own report may be older than the last switch.
    """
    ready = _readiness(observation)
    facts = [
        WorkerFacts.from_report(report) for pod, report in sorted(observation.reports.items()) if pod in ready
    ]
    return tuple(_with_live_role(fact, given.live_table) for fact in facts if fact.ready and ready[fact.pod])


def _readiness(observation: Observation) -> dict[str, bool]:
    return {pod.name: pod.ready and not pod.terminating for pod in observation.rollout}


def _with_live_role(fact: WorkerFacts, live: RoutingTable | None) -> WorkerFacts:
    return fact if live is None else replace(fact, role=live.role_of(fact.pod, fact.pool))


def _wanted(given: Situation, pool: Pool) -> int:
    found = given.observation.pools[pool]
    return found.desired if found.exists else max(1, given.spec.pool(pool).replicas.min)


def _pool_request(given: Situation, pool: Pool, pods: Sequence[PodFacts]) -> PoolRequest:
    prefix = f"{names.pool_name(given.snapshot.model.name, pool)}-"
    allowed = {
        int(pod.removeprefix(prefix)): nodes
        for pod, nodes in given.allowed_nodes.items()
        if pod.startswith(prefix) and pod.removeprefix(prefix).isdigit()
    }
    return to_pool_request(
        pool,
        given.spec.pool(pool),
        given.pod_specs[pool],
        _wanted(given, pool),
        existing=bound_nodes(pods, pool),
        allowed_nodes=allowed,
    )


def _table_content(
    given: Situation,
    mode: ModeDecision,
    scaling: ScalingDecision,
    facts: Facts,
    colocated_step_s: float | None,
) -> RoutingTable:
    live, spec = given.live_table, given.spec
    model = given.snapshot.model
    pools = {pod.name: pod.pool for pod in given.observation.rollout}
    halves = mode.halves
    roles = {**scaling.roles, **dict(halves.roles if halves is not None else ())}
    reports = given.observation.reports.values()
    lengths = [report.model.max_model_length for report in reports if report.model is not None]
    longest = spec.model.max_model_length or (
        min(lengths) if lengths else live.max_model_length if live is not None else None
    )
    # Only what keeps a wanted split from being served: other reasons come and go with the load.
    told = mode.reason in _CAUSES and (mode.colocated_allowed or not mode.serving)
    reason = table.keep_sentence(live.reason if live else "", mode.reason, mode.message) if told else ""
    deadline = spec.transfer.deadline_milliseconds
    return RoutingTable(
        namespace=model.namespace,
        name=model.name,
        model=spec.model.name or model.name,
        mode=mode.mode,
        reason=reason,  # with fallback Never it also means: the split cannot serve now, answer 503
        colocated_allowed=mode.colocated_allowed,
        roles=table.exceptional_roles(roles, pools, mode.mode),
        trial=TrialTable(id=halves.id, split_share=halves.split_share) if halves else None,
        default_roles=dict(table.default_roles(mode.mode)),
        classes=facts.classes,
        max_model_length=longest,
        colocated_max_batched_tokens=spec.colocated.max_batched_tokens,
        colocated_max_step_s=colocated_step_s,
        transfer_deadline_s=deadline / 1000 if deadline is not None else None,
        links=table.merge_links(live.links if live is not None else (), facts.links, busy=facts.busy),
    )


def _colocated_step_s(given: Situation, memory: ObjectMemory, mode_input: ModeInput) -> float | None:
    """What the replay found best; a trial compares two things that stand still."""
    if memory.in_trial and given.live_table is not None:
        return given.live_table.colocated_max_step_s
    return tuned_step_s(memory.replay, mode_input)


def _is_gated(given: Situation, plan: PlacementPlan, pool: Pool) -> bool:
    wanted = given.spec.placement.binding
    if wanted is Binding.AUTOMATIC and has_rules_between_pods(given.pod_specs[pool], pool):
        return False  # a pin would defeat them: the scheduler knows them, the plan does not
    if binding_for(wanted, plan) is Binding.GATED:
        return True
    # Measured links come and go; once the exact node mattered, pods stay pinned.
    return wanted is Binding.AUTOMATIC and given.observation.pools[pool].template_gated
