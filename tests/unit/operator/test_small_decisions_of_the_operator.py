"""Accepting a spec, lifting gates, telling news, restoring memory: the operator's small pure parts."""

from dataclasses import replace
from typing import Any

import pytest

from helpers_operator import make_child, make_model
from phasesplit.api.conditions import Reason
from phasesplit.api.names import HOSTNAME_LABEL, PLACEMENT_GATE, Pool, Role
from phasesplit.api.routing import ServedMode
from phasesplit.cluster.errors import ConflictError
from phasesplit.operator.accept import choose_spec
from phasesplit.operator.apply import OwnedByAnotherError, check_owner
from phasesplit.operator.mode_restore import restore_mode
from phasesplit.operator.placement_binding import find_stuck, plan_releases, release_patch
from phasesplit.operator.transitions import condition_notices, role_notices
from phasesplit.planner.facts import NodeFacts, PodFacts
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.scaling_types import ScalingDecision, ScalingMemory

GOOD = {"model": {"source": {"path": "/models/m"}}, "mode": "Colocated"}
BAD = {"model": {"source": {}}}


def revision(number: int, mode: str) -> Any:
    spec = {**GOOD, "mode": mode}
    return make_child("ControllerRevision", f"chat-{number}", revision=number, data={"spec": spec})


def test_a_valid_spec_is_taken_as_it_is() -> None:
    chosen = choose_spec(make_model(GOOD), [revision(1, "Split")])
    assert chosen.is_current
    assert chosen.spec is not None and chosen.spec.mode == "Colocated"


def test_instead_of_an_invalid_spec_the_newest_accepted_one_is_taken() -> None:
    chosen = choose_spec(make_model(BAD), [revision(2, "Split"), revision(10, "Auto"), revision(1, "Split")])
    assert not chosen.is_current
    assert chosen.spec is not None and chosen.spec.mode == "Auto"
    assert chosen.acceptance.serving_older
    assert "spec.model.source has 0 sources" in chosen.acceptance.message


def test_without_any_accepted_spec_nothing_is_served() -> None:
    broken = make_child("ControllerRevision", "chat-0", revision=1, data={"spec": {"no": "model"}})
    chosen = choose_spec(make_model(BAD), [broken])
    assert chosen.spec is None
    assert chosen.acceptance.reason is Reason.INVALID


def test_our_child_and_an_orphan_with_our_label_may_be_written() -> None:
    check_owner(make_child("ConfigMap", "c"), make_model())
    check_owner(make_child("ConfigMap", "c", owner=None), make_model())


def test_a_child_of_somebody_else_may_not() -> None:
    foreign = make_child("ConfigMap", "c", owner=None, metadata={"labels": {}})
    with pytest.raises(OwnedByAnotherError, match="ConfigMap c exists and was not made by this operator"):
        check_owner(foreign, make_model())


def test_a_child_of_an_earlier_object_of_the_same_name_is_waited_for() -> None:
    with pytest.raises(ConflictError, match="earlier chat"):
        check_owner(make_child("ConfigMap", "c", owner="another uid"), make_model())


def plan(**nodes: tuple[str | None, ...]) -> PlacementPlan:
    return PlacementPlan(
        nodes={Pool(pool): names for pool, names in nodes.items()},
        wire_s=0,
        bound_wire_s=0,
        reason=Reason.PLACED,
        message="",
        eligible={},
    )


def gated(name: str, pool: Pool = Pool.DECODE, **changes: Any) -> PodFacts:
    return PodFacts(name, pool, int(name[-1]), **{"gated": True, **changes})


NODES = [NodeFacts("n1", {HOSTNAME_LABEL: "host-1"}), NodeFacts("n2", {})]


def test_a_gated_pod_is_pinned_by_the_nodes_own_hostname_and_released_at_once() -> None:
    (release,) = plan_releases([gated("d0")], plan(decode=("n1",)), NODES, {})
    assert release.patch == {"spec": {"schedulingGates": None, "nodeSelector": {HOSTNAME_LABEL: "host-1"}}}
    assert release.node == "n1"


def test_a_pod_that_fits_nowhere_is_released_without_a_pin() -> None:
    for chosen in (plan(decode=(None,)), plan(decode=()), plan(decode=("n2",))):
        (release,) = plan_releases([gated("d0")], chosen, NODES, {})
        assert release.patch == {"spec": {"schedulingGates": None}}
        assert release.node is None


def test_pods_without_a_gate_and_those_that_go_are_left_alone() -> None:
    pods = [gated("d0", gated=False), gated("d1", terminating=True)]
    assert plan_releases(pods, plan(decode=("n1", "n1")), NODES, {}) == ()


def test_gates_of_others_stay() -> None:
    gates = [{"name": PLACEMENT_GATE}, {"name": "other/gate"}]
    assert release_patch(None, gates) == {"spec": {"schedulingGates": [{"name": "other/gate"}]}}


def test_a_pin_on_a_full_node_is_given_up_after_20_seconds() -> None:
    def pinned(seconds: float | None, **changes: Any) -> PodFacts:
        return PodFacts("d0", Pool.DECODE, 0, **{"pinned_node": "n1", "unschedulable_s": seconds, **changes})

    assert find_stuck([pinned(20)]) == ("d0",)
    assert find_stuck([pinned(19)]) == ()
    assert find_stuck([pinned(None)]) == ()
    assert find_stuck([pinned(60, node="n1")]) == ()
    assert find_stuck([pinned(60, pinned_node=None)]) == ()
    assert find_stuck([pinned(60, terminating=True)]) == ()


def status(**conditions: str) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": kind, "status": value, "reason": "Settled", "message": "m"}
            for kind, value in conditions.items()
        ]
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"Ready": "True"}, []),
        ({}, {"Ready": "False"}, [("Warning", "Ready is False: m")]),
        ({"Ready": "False"}, {"Ready": "True"}, [("Normal", "Ready is True: m")]),
        ({"Ready": "True"}, {"Ready": "True"}, []),
        ({"Ready": "True"}, {"Ready": "Unknown"}, []),
        ({}, {"Stalled": "False"}, []),
        ({"Stalled": "False"}, {"Stalled": "True"}, [("Warning", "Stalled is True: m")]),
        ({"SLOMet": "True"}, {"SLOMet": "False"}, []),
    ],
)
def test_only_transitions_are_news(
    before: dict[str, str], after: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    found = condition_notices(status(**before), status(**after))
    assert [(notice.type, notice.note) for notice in found] == expected


SINCE = {"since": "2026-11-29T12:00:00Z"}


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("LinkDegraded", Reason.LINK_DEGRADED),
        ("Mismatch", Reason.MISMATCH),
        ("Dwell", Reason.LINK_DEGRADED),
        ("AsRequested", None),
        ("NoInterference", None),
    ],
)
def test_a_restart_remembers_why_the_split_was_left(reason: str, cause: Reason | None) -> None:
    left = {"mode": "Colocated", "decision": {"mode": "Colocated", "reason": reason, **SINCE}}
    memory = restore_mode(left, ServedMode.COLOCATED, 5000.0)
    assert memory.cause is cause
    assert memory.since_s is not None


def test_trials_outlive_a_restart_of_the_operator() -> None:
    trial = {"failures": 2, "notBefore": "2026-11-29T13:00:00Z", "message": "stopped"}
    left = {
        "mode": "Split",
        "decision": {"mode": "Split", "reason": "Trial", **SINCE},
        "evidence": {"trial": trial},
    }
    memory = restore_mode(left, ServedMode.SPLIT, 5000.0)
    assert memory.trial_interrupted
    assert (memory.trial_failures, memory.trial_message) == (2, "stopped")
    assert memory.trial_not_before_s is not None
    left["decision"] = {"mode": "Split", "reason": "SplitPays", **SINCE}
    assert not restore_mode(left, ServedMode.SPLIT, 5000.0).trial_interrupted


def test_a_first_start_that_waits_for_its_pools_is_no_fallback() -> None:
    waiting = {"decision": {"mode": "Colocated", "reason": "PoolUnavailable", **SINCE}}
    assert restore_mode(waiting, ServedMode.COLOCATED, 0).cause is None
    assert restore_mode({}, ServedMode.COLOCATED, 0).since_s is None


SWITCHED = ScalingDecision(
    replicas={},
    roles={"x-prefill-1": Role.DECODE},
    reason=Reason.ROLE_SWITCH,
    message="2 requests/s need 1 prefill and 2 decode workers",
    advice={},
    needed={},
    feasible=True,
    memory=ScalingMemory(),
)


@pytest.mark.parametrize("reason", [Reason.ROLE_SWITCH, Reason.AT_LIMIT, Reason.SETTLED])
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, {"x-prefill-1": Role.DECODE}, []),
        ({}, {"x-prefill-1": Role.DECODE}, ["x-prefill-1 serves as decode"]),
        ({"x-prefill-1": Role.DECODE}, {"x-prefill-1": Role.DECODE}, []),
        ({"x-prefill-1": Role.DECODE}, {}, ["x-prefill-1 serves as its pool says"]),
        ({"x-prefill-7": Role.DECODE}, {}, []),  # it is gone
    ],
)
def test_a_role_switch_is_told_once_per_pod(
    before: dict[str, Role] | None, after: dict[str, Role], said: list[str], reason: Reason
) -> None:
    notices = role_notices(before, after, replace(SWITCHED, reason=reason))
    assert [notice.note for notice in notices] == [f"{text}: {SWITCHED.message}" for text in said]
    assert {notice.reason for notice in notices} <= {"RoleSwitch"}
