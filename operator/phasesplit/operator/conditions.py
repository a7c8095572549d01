"""The conditions of one object, from what was decided and what is. Pure.

For kstatus: `Stalled=True` means that waiting does not help, `Reconciling=True` that it does, and
`Ready=True` that the current generation's pods serve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api.conditions import Condition, ConditionStatus, ConditionType, Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass
from phasesplit.operator.observation import Observation
from phasesplit.planner.facts import LoadFacts
from phasesplit.planner.metrics_types import MetricsVerdict
from phasesplit.planner.mode_types import ModeDecision
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.text import count_of

# Requests behind an attainment below which nothing is said about it.
MIN_FINISHED = 5


@dataclass(frozen=True)
class Acceptance:
    """Is the user's current spec the one that is served?"""

    accepted: bool
    reason: Reason = Reason.VALID
    message: str = "the spec is valid"
    serving_older: bool = False  # an earlier accepted spec is served meanwhile


@dataclass(frozen=True)
class Progress:
    """How the object gets on towards what is wanted."""

    paused: bool = False
    rollout_message: str = ""  # not empty: pods are being replaced
    stuck_s: float = 0.0  # since something last changed
    deadline_s: float = 1800.0


def build_conditions(
    generation: int,
    acceptance: Acceptance,
    observation: Observation,
    progress: Progress,
    decided: Sequence[Condition],
    *,
    serving: bool,
) -> list[Condition]:
    """All conditions but their transition times. `decided` are those that come from decisions."""
    ready, reason, message = _readiness(acceptance, observation, progress)
    stalled = _stalled(acceptance, progress, ready=ready, reason=reason, message=message)
    settled = ready or stalled is not None
    conditions = [
        _make(ConditionType.ACCEPTED, _truth(acceptance.accepted), acceptance.reason, acceptance.message),
        _available(observation, serving=serving),
        _make(ConditionType.READY, _truth(ready), reason, message),
        _make(
            ConditionType.RECONCILING,
            _truth(not settled and not progress.paused),
            Reason.PAUSED if progress.paused else Reason.SETTLED if settled else reason,
            "spec.paused is true" if progress.paused else "" if settled else message,
        ),
        stalled or _make(ConditionType.STALLED, "False", Reason.SETTLED, ""),
        *decided,
    ]
    return [condition.model_copy(update={"observed_generation": generation}) for condition in conditions]


def decided_conditions(
    plan: PlacementPlan, mode: ModeDecision, metrics: MetricsVerdict, slo: Condition
) -> list[Condition]:
    """The conditions that decisions give."""
    link = mode.link
    return [
        _make(ConditionType.PLACED, plan.condition_status, plan.reason, plan.message),
        _make(ConditionType.LINK_HEALTHY, link.status, link.reason, link.message),
        _make(ConditionType.METRICS_AVAILABLE, metrics.status, metrics.reason, metrics.message),
        slo,
        _make(
            ConditionType.SPLIT_BENEFICIAL, mode.beneficial, mode.beneficial_reason, mode.beneficial_message
        ),
    ]


def slo_condition(classes: Sequence[LatencyClass], loads: Sequence[LoadFacts]) -> Condition:
    """Does every class meet its targets for the share of requests it asks for?"""
    by_name: Mapping[str, LoadFacts] = {load.class_name: load for load in loads}
    missed, known = [], 0
    for item in classes:
        load = by_name.get(item.name)
        if load is None or load.attainment is None or load.finished < MIN_FINISHED:
            continue
        known += 1
        if load.attainment * 100 < item.percentile:
            missed.append(
                f"class {item.name}: {load.attainment * 100:.0f} % of {load.finished} requests "
                f"met the targets, {item.percentile:g} % are wanted"
            )
    if not known:
        message = "too few requests finished to tell"
        return _make(ConditionType.SLO_MET, "Unknown", Reason.NOT_ENOUGH_TRAFFIC, message)
    if missed:
        return _make(ConditionType.SLO_MET, "False", Reason.TARGET_MISSED, "; ".join(missed))
    message = f"{count_of(known, 'class').replace('classs', 'classes')} within the targets"
    return _make(ConditionType.SLO_MET, "True", Reason.TARGETS_MET, message)


def _readiness(
    acceptance: Acceptance, observation: Observation, progress: Progress
) -> tuple[bool, Reason, str]:
    """`Ready` with the reason a person should act on first."""
    waiting = [_count(observation, pool) for pool in Pool if _is_waiting(observation, pool)]
    routers = f"{observation.router_ready} of {count_of(observation.router_desired, 'router')} ready"
    router_waits = not observation.router_updated or observation.router_ready < observation.router_desired
    problem, problem_message = _first_problem(observation)
    older = "; the last accepted spec is served meanwhile" if acceptance.serving_older else ""
    obstacles = (
        (not acceptance.accepted, acceptance.reason, acceptance.message + older),
        (bool(observation.problems), problem, problem_message),
        (
            not all(pool.exists for pool in observation.pools.values()),
            Reason.CREATING,
            "the workers' StatefulSets are being created",
        ),
        (bool(progress.rollout_message), Reason.ROLLING_OUT, progress.rollout_message),
        (bool(waiting), Reason.WORKERS_STARTING, "; ".join(waiting)),
        (router_waits, Reason.ROUTER_STARTING, routers),
        (observation.ready_workers == 0, Reason.NOTHING_SERVES, "no worker is wanted, so nothing serves"),
    )
    for applies, reason, message in obstacles:
        if applies:
            return False, reason, message
    total = count_of(observation.ready_workers, "worker")
    return True, Reason.ALL_SERVING, f"{total} and {count_of(observation.router_ready, 'router')} serve"


def _first_problem(observation: Observation) -> tuple[Reason, str]:
    if not observation.problems:
        return Reason.SETTLED, ""
    first, others = observation.problems[0], len(observation.problems) - 1
    return first.reason, first.message + (f" (and {others} more)" if others else "")


def _is_waiting(observation: Observation, pool: Pool) -> bool:
    found = observation.pools[pool]
    return found.settled < found.desired


def _count(observation: Observation, pool: Pool) -> str:
    found = observation.pools[pool]
    gated = f", {found.gated} waiting for a node" if found.gated else ""
    return f"{found.settled} of {count_of(found.desired, f'{pool} worker')} ready{gated}"


def _stalled(
    acceptance: Acceptance, progress: Progress, *, ready: bool, reason: Reason, message: str
) -> Condition | None:
    if not acceptance.accepted:
        return _make(ConditionType.STALLED, "True", acceptance.reason, acceptance.message)
    if ready or progress.paused or progress.stuck_s < progress.deadline_s:
        return None
    sentence = f"nothing has changed for more than {progress.deadline_s:.0f} s ({reason}: {message})"
    return _make(ConditionType.STALLED, "True", Reason.PROGRESS_DEADLINE_EXCEEDED, sentence)


def _available(observation: Observation, *, serving: bool) -> Condition:
    if observation.ready_workers == 0:
        return _make(ConditionType.AVAILABLE, "False", Reason.NOTHING_SERVES, "no worker is ready")
    if observation.router_ready == 0:
        return _make(ConditionType.AVAILABLE, "False", Reason.NOTHING_SERVES, "no router is ready")
    if not serving:
        message = "the split cannot serve and spec.fallback is Never"
        return _make(ConditionType.AVAILABLE, "False", Reason.NOTHING_SERVES, message)
    return _make(ConditionType.AVAILABLE, "True", Reason.SERVING, "requests are served")


def _make(kind: ConditionType, status: ConditionStatus, reason: Reason, message: str) -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message[:2048])


def _truth(value: bool) -> ConditionStatus:
    return "True" if value else "False"
