"""The status of one object, assembled from observation and decisions. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phasesplit.api.conditions import Condition, merge_conditions
from phasesplit.api.names import Pool
from phasesplit.api.reports import WorkerReport
from phasesplit.api.routing import ServedMode
from phasesplit.api.status import (
    ClassStatus,
    DecisionStatus,
    DisaggregatedModelStatus,
    LinksStatus,
    MeasuresStatus,
    NodePair,
    PlacementStatus,
    PoolStatus,
    ScalingStatus,
)
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest, ScalingPolicy
from phasesplit.cluster.status_writer import quantise, without_empty
from phasesplit.operator.evidence_status import ReplayNews, build_evidence
from phasesplit.operator.observation import Observation
from phasesplit.operator.times import to_rfc3339
from phasesplit.planner.facts import LinkFacts, LoadFacts
from phasesplit.planner.mode_types import ModeDecision
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.scaling_types import ScalingDecision


@dataclass(frozen=True)
class StatusInput:
    """Everything the status is made from."""

    now_s: float
    generation: int
    spec: DisaggregatedModelSpec
    observation: Observation
    mode: ModeDecision
    scaling: ScalingDecision
    plan: PlacementPlan
    conditions: Sequence[Condition]
    loads: Sequence[LoadFacts]
    links: Sequence[LinkFacts]
    transport: str
    served: ServedMode | None  # None: nothing serves yet
    replay: ReplayNews = field(default_factory=ReplayNews)


def build_status(given: StatusInput, old: Manifest) -> Manifest:
    """The status as it is written; `old` gives the transition times."""
    status = DisaggregatedModelStatus(
        observed_generation=given.generation,
        mode=given.served or _served_before(old),
        decision=DecisionStatus(
            mode=given.mode.mode,
            reason=given.mode.reason,
            message=given.mode.message[:2048],
            since=_decision_since(given, old),
        ),
        evidence=build_evidence(given.mode, given.replay, given.now_s),
        measures=_measures(given),
        pools=[_pool(given, pool) for pool in Pool],
        links=_links(given),
        slo=[_class(item.name, given.loads) for item in given.spec.slo],
        placement=_placement(given.plan),
        scaling=ScalingStatus(reason=given.scaling.reason, message=given.scaling.message[:2048]),
        conditions=list(merge_conditions(read_conditions(old), given.conditions, to_rfc3339(given.now_s))),
    )
    return without_empty(status.to_manifest())


def build_refused_status(
    generation: int, conditions: Sequence[Condition], old: Manifest, now_s: float
) -> Manifest:
    """The status when nothing can be decided: the old one with new conditions."""
    kept = {key: value for key, value in old.items() if key not in ("conditions", "observedGeneration")}
    known = {condition.type for condition in conditions}
    previous = read_conditions(old)
    both = [*conditions, *(condition for condition in previous if condition.type not in known)]
    merged = merge_conditions(previous, both, to_rfc3339(now_s))
    fresh = DisaggregatedModelStatus(observed_generation=generation, conditions=list(merged)).to_manifest()
    return without_empty({**kept, **without_empty(fresh)})


def read_conditions(status: Manifest) -> list[Condition]:
    """Conditions of a status as it was read; those that an other version wrote are left out."""
    found = []
    for item in status.get("conditions") or ():
        try:
            found.append(Condition.model_validate(item))
        except ValueError:
            continue
    return found


def _served_before(old: Manifest) -> ServedMode | None:
    value = old.get("mode")
    return ServedMode(value) if value in set(ServedMode) else None


def _decision_since(given: StatusInput, old: Manifest) -> str:
    """Since when this mode has been decided for: the planner's time, kept as it was written."""
    before = old.get("decision") or {}
    # A paused object is not switched: the same decision is made again and again.
    again = given.spec.paused or not given.mode.changed
    if before.get("mode") == given.mode.mode and before.get("since") and again:
        return str(before["since"])
    return to_rfc3339(given.mode.since_s)


def _pool(given: StatusInput, pool: Pool) -> PoolStatus:
    found = given.observation.pools[pool]
    advice = given.scaling.advice.get(pool)
    advised = given.spec.scaling.policy is not ScalingPolicy.MANAGED
    return PoolStatus(
        name=pool,
        desired=found.desired,
        recommended=advice if advised else None,
        ready=found.ready,
        updated=found.updated,
        gpus=found.bound * given.spec.pool(pool).gpu.count,
        nodes=list(found.nodes[:64]),
        summary=f"{found.ready}/{found.desired}",
    )


def _class(name: str, loads: Sequence[LoadFacts]) -> ClassStatus:
    load = next((load for load in loads if load.class_name == name), None)
    if load is None:
        return ClassStatus(name=name)
    return ClassStatus(
        name=name,
        attainment_percent=quantise(_times(load.attainment, 100)),
        ttft_milliseconds=quantise(_times(load.ttft_p95_s, 1000)),
        tpot_milliseconds=quantise(_times(load.tpot_p95_s, 1000)),
    )


def _measures(given: StatusInput) -> MeasuresStatus | None:
    loads = [load for load in given.loads if load.arrival_rate_per_s > 0 or load.finished > 0]
    facts = next((report.model for report in given.observation.reports.values() if report.model), None)
    rate = sum(load.arrival_rate_per_s for load in loads)
    prompt_rate = sum(load.arrival_rate_per_s * load.mean_prompt_tokens for load in loads)
    kv_bytes = None
    if facts is not None and rate > 0:
        kv_bytes = prompt_rate / rate * facts.kv_layout.bytes_per_token
    speeds = [link.bytes_per_s for link in given.links if link.bytes_per_s > 0]
    split = given.mode.mode is ServedMode.SPLIT
    transfer_ms = kv_bytes / median(speeds) * 1000 if kv_bytes and speeds and split else None
    measures = MeasuresStatus(
        prompt_tokens_per_second=quantise(prompt_rate) if rate > 0 else None,
        ttft_milliseconds=_worst_ms([load.ttft_p95_s for load in loads]),
        tpot_milliseconds=_worst_ms([load.tpot_p95_s for load in loads]),
        attainment_percent=quantise(
            min((load.attainment * 100 for load in loads if load.attainment is not None), default=None)
        ),
        kv_bytes_per_request=quantise(kv_bytes),
        transfer_milliseconds=quantise(transfer_ms),
        queue_milliseconds=_worst_ms([load.queue_s for load in loads]),
        duplicated_weight_bytes=quantise(_duplicated_bytes(given.observation.reports)),
    )
    return measures if measures.model_dump(exclude_none=True) else None


def _duplicated_bytes(reports: Mapping[str, WorkerReport]) -> float | None:
    """Weights of the second pool: the first would be needed anyway."""
    by_pool = {pool: [r for r in reports.values() if r.pool is pool and r.model] for pool in Pool}
    counts = [len(found) for found in by_pool.values()]
    known = [report.model.weights_bytes for report in reports.values() if report.model]
    return float(min(counts) * median(known)) if known and min(counts) > 0 else None


def _links(given: StatusInput) -> LinksStatus | None:
    fresh = [link for link in given.links if link.bytes_per_s > 0]
    if not fresh:
        return None
    worst = min(fresh, key=lambda link: link.bytes_per_s)
    newest_s = given.now_s - min(link.age_s for link in fresh)
    return LinksStatus(
        transport=given.transport,
        median_bytes_per_second=quantise(median(link.bytes_per_s for link in fresh)),
        worst_bytes_per_second=quantise(worst.bytes_per_s),
        worst_pair=NodePair(from_node=worst.from_node, to_node=worst.to_node),
        measured_at=to_rfc3339(newest_s),
    )


def _placement(plan: PlacementPlan) -> PlacementStatus:
    cost = plan.wire_s / plan.bound_wire_s if plan.bound_wire_s > 0 else 1.0
    notes = "; ".join((plan.message, *plan.notes))
    return PlacementStatus(cost=quantise(cost, 3), bound=1.0, message=notes[:2048])


def _worst_ms(values: Sequence[float | None]) -> float | None:
    return quantise(_times(max((value for value in values if value is not None), default=None), 1000))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
