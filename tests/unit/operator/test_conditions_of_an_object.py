"""Conditions: what a person, kstatus and an alert read. One row per state of an object."""

from typing import Any

import pytest

from phasesplit.api.conditions import ConditionType, Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass
from phasesplit.operator.conditions import (
    Acceptance,
    Progress,
    build_conditions,
    slo_condition,
)
from phasesplit.operator.health import PodProblem
from phasesplit.operator.observation import Observation, PoolObservation
from phasesplit.planner.facts import LoadFacts


def observation(ready: int = 1, **changes: Any) -> Observation:
    pools = {
        pool: PoolObservation(pool, desired=1, exists=True, ready=ready, updated=1, settled=ready, present=1)
        for pool in Pool
    }
    known: dict[str, Any] = {
        "pools": pools,
        "router_desired": 1,
        "router_ready": 1,
        "router_updated": True,
    }
    return Observation(**{**known, **changes})


NEW = observation(
    pools={pool: PoolObservation(pool) for pool in Pool},
    router_desired=0,
    router_ready=0,
    router_updated=False,
)
BROKEN = observation(0, problems=(PodProblem("chat-decode-0", Reason.IMAGE_PULL, "chat-decode-0: no image"),))
REFUSED = Acceptance(False, Reason.INVALID, "spec.x is y; use z", serving_older=True)

# name -> acceptance, observation, progress, (Ready status and reason, Reconciling, Stalled, Available)
STATES: dict[str, tuple[Acceptance, Observation, Progress, tuple[str, Reason, str, str, str]]] = {
    "new": (Acceptance(True), NEW, Progress(), ("False", Reason.CREATING, "True", "False", "False")),
    "starting": (
        Acceptance(True),
        observation(0),
        Progress(),
        ("False", Reason.WORKERS_STARTING, "True", "False", "False"),
    ),
    "router starting": (
        Acceptance(True),
        observation(router_ready=0, router_updated=False),
        Progress(),
        ("False", Reason.ROUTER_STARTING, "True", "False", "False"),
    ),
    "serving": (
        Acceptance(True),
        observation(),
        Progress(),
        ("True", Reason.ALL_SERVING, "False", "False", "True"),
    ),
    "broken pod": (
        Acceptance(True),
        BROKEN,
        Progress(),
        ("False", Reason.IMAGE_PULL, "True", "False", "False"),
    ),
    "broken for long": (
        Acceptance(True),
        BROKEN,
        Progress(stuck_s=1800),
        ("False", Reason.IMAGE_PULL, "False", "True", "False"),
    ),
    "rolling out": (
        Acceptance(True),
        observation(),
        Progress(rollout_message="replacing chat-prefill-0"),
        ("False", Reason.ROLLING_OUT, "True", "False", "True"),
    ),
    "refused, the old spec serves": (
        REFUSED,
        observation(),
        Progress(),
        ("False", Reason.INVALID, "False", "True", "True"),
    ),
    "paused while starting": (
        Acceptance(True),
        observation(0),
        Progress(paused=True, stuck_s=9999),
        ("False", Reason.WORKERS_STARTING, "False", "False", "False"),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    acceptance, seen, progress, expected = STATES[name]
    conditions = {
        item.type: item for item in build_conditions(7, acceptance, seen, progress, [], serving=True)
    }
    ready = conditions[ConditionType.READY]
    assert (
        ready.status,
        ready.reason,
        conditions[ConditionType.RECONCILING].status,
        conditions[ConditionType.STALLED].status,
        conditions[ConditionType.AVAILABLE].status,
    ) == expected
    assert all(item.observed_generation == 7 for item in conditions.values())


def test_reconciling_and_stalled_are_never_both_true() -> None:
    for acceptance, seen, progress, _ in STATES.values():
        found = {c.type: c.status for c in build_conditions(1, acceptance, seen, progress, [], serving=True)}
        assert not (found[ConditionType.RECONCILING] == found[ConditionType.STALLED] == "True")


def test_nothing_is_available_when_the_split_cannot_serve_and_may_not_fall_back() -> None:
    found = {
        item.type: item
        for item in build_conditions(1, Acceptance(True), observation(), Progress(), [], serving=False)
    }
    assert found[ConditionType.AVAILABLE].status == "False"
    assert "fallback is Never" in found[ConditionType.AVAILABLE].message


CLASSES = (
    LatencyClass(name="fast", ttft_s=0.5, tpot_s=0.1, percentile=95),
    LatencyClass(name="slow", ttft_s=5, tpot_s=1, percentile=90),
)


@pytest.mark.parametrize(
    ("loads", "status", "reason"),
    [
        ([], "Unknown", Reason.NOT_ENOUGH_TRAFFIC),
        ([LoadFacts("fast", attainment=0.0, finished=4)], "Unknown", Reason.NOT_ENOUGH_TRAFFIC),
        ([LoadFacts("fast", attainment=0.96, finished=50)], "True", Reason.TARGETS_MET),
        ([LoadFacts("fast", attainment=0.94, finished=50)], "False", Reason.TARGET_MISSED),
        (
            [LoadFacts("fast", attainment=0.99, finished=50), LoadFacts("slow", attainment=0.5, finished=9)],
            "False",
            Reason.TARGET_MISSED,
        ),
    ],
)
def test_targets(loads: list[LoadFacts], status: str, reason: Reason) -> None:
    found = slo_condition(CLASSES, loads)
    assert (found.status, found.reason) == (status, reason)


def test_a_missed_target_is_told_with_its_numbers() -> None:
    found = slo_condition(CLASSES, [LoadFacts("fast", attainment=0.94, finished=50)])
    assert found.message == "class fast: 94 % of 50 requests met the targets, 95 % are wanted"
