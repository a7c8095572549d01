"""Scaling: named situations, whole histories, and what no input may bring about."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from helpers_planner import PATIENT
from helpers_planner import pool_bounds as bounds
from helpers_planner import scaling_input as situation
from helpers_planner import scaling_load as load
from helpers_planner import scaling_workers as workers
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import RoleSwitching, ScalingPolicy
from phasesplit.planner.metrics_types import MetricsVerdict, Permission
from phasesplit.planner.scaling import plan_scaling
from phasesplit.planner.scaling_clamp import repair_one_sided, shrink_to_total
from phasesplit.planner.scaling_types import ScalingDecision, ScalingInput, ScalingMemory

HOLD = Permission(may_grow=False, may_shrink=False)
OUTAGE = MetricsVerdict(
    "False",
    Reason.METRICS_OUTAGE,
    "Prometheus: connection refused; pools hold",
    permissions=dict.fromkeys(Pool, HOLD),
)


def run(given: ScalingInput, steps: Iterable[tuple[float, dict[str, object]]]) -> list[ScalingDecision]:
    """Feed a history in which what is asked for is ready at the next tick."""
    decisions = []
    for now_s, changes in steps:
        given = replace(given, now_s=now_s, **changes)
        decision = plan_scaling(given)
        decisions.append(decision)
        pools = {
            pool: replace(item, desired=decision.advice[pool], ready=decision.advice[pool])
            for pool, item in given.pools.items()
        }
        made = workers(decision.advice[Pool.PREFILL], decision.advice[Pool.DECODE])
        given = replace(given, pools=pools, workers=made, memory=decision.memory)
    return decisions


def counts(decision: ScalingDecision) -> tuple[int, int]:
    return decision.advice[Pool.PREFILL], decision.advice[Pool.DECODE]


def test_steady_light_load_is_settled() -> None:
    decision = plan_scaling(situation(0.5))
    assert counts(decision) == (1, 1)
    assert decision.reason is Reason.SETTLED
    assert decision.feasible


def test_prefill_grows_for_long_prompts_and_decode_for_long_answers() -> None:
    prompts = plan_scaling(situation(8.0, loads=(load(8.0, mean_prompt_tokens=3000, mean_output_tokens=10),)))
    answers = plan_scaling(
        situation(3.0, loads=(load(3.0, mean_prompt_tokens=200, mean_output_tokens=2000),))
    )
    assert prompts.advice[Pool.PREFILL] > prompts.advice[Pool.DECODE] == 1
    assert answers.advice[Pool.DECODE] > answers.advice[Pool.PREFILL] == 1
    assert prompts.reason is answers.reason is Reason.LOAD_UP
    assert "prefill 1 -> " in prompts.message


def test_up_at_once_down_after_the_window() -> None:
    history = run(
        situation(0.5),
        [
            (0, {}),
            (10, {"loads": (load(9.0),)}),
            (20, {"loads": (load(0.5),)}),
            (310, {}),
            (330, {}),
            (640, {}),
        ],
    )
    grown = counts(history[1])
    assert grown > (1, 1)
    assert [counts(item) for item in history[2:4]] == [grown, grown]
    assert counts(history[4]) == (1, 1)
    assert history[4].reason is Reason.LOAD_DOWN


def test_a_change_of_the_ratio_gives_up_no_pod_of_one_pool_for_the_other() -> None:
    """Prompts and answers take turns in being long: nothing goes down within the window, whatever goes up."""
    given = situation(2.0, down_stabilization_s=300.0)
    long_prompts = load(4.0, mean_prompt_tokens=4000, p95_prompt_tokens=8000, mean_output_tokens=20)
    long_answers = load(4.0, mean_prompt_tokens=50, p95_prompt_tokens=100, mean_output_tokens=1500)
    kinds = (long_prompts, long_answers)
    steps = [(1000.0 + 30 * i, {"loads": (kinds[i % 2],)}) for i in range(40)]
    before = (0, 0)
    for decision in run(given, steps):
        assert counts(decision)[0] >= before[0]
        assert counts(decision)[1] >= before[1]
        before = counts(decision)


def test_a_restarted_operator_does_not_shrink_before_it_has_seen_a_window() -> None:
    history = run(situation(0.5, 3, 3), [(0, {}), (150, {}), (290, {}), (301, {})])
    assert [counts(item) for item in history] == [(3, 3), (3, 3), (3, 3), (1, 1)]


def test_survivors_carry_the_load_at_four_fifths() -> None:
    """A load that one worker fewer could just carry does not shrink the pool: no swing between two sizes."""
    decisions = []
    for tenth in range(5, 120, 7):
        rate = tenth / 10
        up = plan_scaling(situation(rate))
        history = run(situation(rate, *counts(up)), [(0, {}), (301, {}), (602, {})])
        decisions.append((counts(up), counts(history[-1])))
    assert all(after == up for up, after in decisions)
    high = run(situation(9.0, 8, 8), [(0, {}), (301, {})])[-1]
    low = plan_scaling(situation(9.0))
    assert counts(high)[0] >= counts(low)[0]


def test_queue_beyond_the_budget_acts_at_once() -> None:
    alone = plan_scaling(situation(0.5, 2, 1, loads=(load(0.5, queue_s=5.0),)))
    assert alone.reason is Reason.QUEUE_WAIT
    assert alone.advice[Pool.PREFILL] == 3
    helped = plan_scaling(situation(0.5, 2, 2, loads=(load(0.5, queue_s=5.0),)))
    assert helped.reason is Reason.ROLE_SWITCH
    assert "queue is already too long" in helped.message


def test_role_switch_comes_before_a_replica() -> None:
    heavy = load(9.0, mean_prompt_tokens=3000, mean_output_tokens=10)
    decision = plan_scaling(situation(9.0, 3, 3, loads=(heavy,)))
    assert counts(decision) == (3, 3)
    assert decision.reason is Reason.ROLE_SWITCH
    assert list(decision.roles.values()).count(Role.PREFILL) >= 4
    assert decision.roles["m-decode-2"] is Role.PREFILL
    fixed = plan_scaling(situation(9.0, 3, 3, loads=(heavy,), role_switching=RoleSwitching.DISABLED))
    assert fixed.advice[Pool.PREFILL] > 3
    assert fixed.roles["m-decode-2"] is Role.DECODE


def test_helpers_return_when_their_pool_suffices_with_margin() -> None:
    decision = plan_scaling(situation(0.5, 3, 3, workers=workers(3, 3, helping=1)))
    assert decision.roles["m-decode-2"] is Role.DECODE


def test_roles_rest_between_two_rearrangements() -> None:
    memory = ScalingMemory(roles_changed_at_s=990.0)
    decision = plan_scaling(situation(0.5, 3, 3, workers=workers(3, 3, helping=1), memory=memory))
    assert decision.roles["m-decode-2"] is Role.PREFILL


def test_pending_pods_are_capacity_on_its_way() -> None:
    heavy = load(8.0, mean_prompt_tokens=3000, mean_output_tokens=10)
    wanted = plan_scaling(situation(8.0, loads=(heavy,))).advice[Pool.PREFILL]
    pools = {Pool.PREFILL: bounds(Pool.PREFILL, wanted, ready=1), Pool.DECODE: bounds(Pool.DECODE, 1)}
    decision = plan_scaling(situation(8.0, loads=(heavy,), pools=pools))
    assert decision.advice[Pool.PREFILL] == wanted


def test_a_pending_decode_pod_does_not_keep_prefill_from_growing() -> None:
    heavy = load(8.0, mean_prompt_tokens=3000, mean_output_tokens=10)
    pools = {Pool.PREFILL: bounds(Pool.PREFILL, 1), Pool.DECODE: bounds(Pool.DECODE, 2, ready=1)}
    assert plan_scaling(situation(8.0, loads=(heavy,), pools=pools)).advice[Pool.PREFILL] > 1


def test_colocated_counts_both_pools() -> None:
    decision = plan_scaling(situation(12.0, mode=ServedMode.COLOCATED))
    assert sum(decision.advice.values()) >= 3
    assert set(decision.roles.values()) == {Role.COLOCATED}
    assert set(decision.needed) == {Role.COLOCATED}


def test_outage_holds_and_names_the_cause() -> None:
    decision = plan_scaling(situation(9.0, 2, 2, metrics=OUTAGE))
    assert counts(decision) == (2, 2)
    assert decision.reason is Reason.HOLD
    assert "connection refused" in decision.message


def test_one_blind_pool_holds_while_the_other_grows() -> None:
    half = MetricsVerdict(
        "Unknown",
        Reason.METRICS_MISSING,
        "x",
        permissions={Pool.PREFILL: Permission(may_grow=True, may_shrink=False), Pool.DECODE: HOLD},
    )
    busy = load(12.0, mean_prompt_tokens=3000, mean_output_tokens=600)
    decision = plan_scaling(situation(12.0, loads=(busy,), metrics=half))
    assert decision.advice[Pool.PREFILL] > 1
    assert decision.advice[Pool.DECODE] == 1


def test_idle_goes_to_min_after_the_window() -> None:
    idle = MetricsVerdict("True", Reason.METRICS_OK, "nothing flows", idle=True)
    history = run(situation(0.0, 4, 4, loads=(), metrics=idle), [(0, {}), (200, {}), (301, {})])
    assert [counts(item) for item in history] == [(4, 4), (4, 4), (1, 1)]


def test_nothing_measured_holds() -> None:
    assert plan_scaling(situation(9.0, 2, 2, profiles={})).reason is Reason.HOLD
    assert counts(plan_scaling(situation(9.0, 2, 2, loads=()))) == (2, 2)


@pytest.mark.parametrize("policy", [ScalingPolicy.EXTERNAL, ScalingPolicy.OFF])
def test_other_policies_write_no_replicas_but_advise(policy: ScalingPolicy) -> None:
    decision = plan_scaling(situation(9.0, policy=policy))
    assert decision.replicas == {}
    assert sum(decision.advice.values()) > 2


def test_infeasible_target_is_said_and_does_not_ask_for_the_world() -> None:
    hard = (LatencyClass(name="default", ttft_s=0.05, tpot_s=0.05),)
    decision = plan_scaling(situation(2.0, classes=hard))
    assert not decision.feasible
    assert "cannot be met by any number of workers" in decision.message
    assert sum(decision.advice.values()) <= 4


def test_limit_of_gpus_keeps_the_ratio_and_says_so() -> None:
    pools = {pool: bounds(pool, 1, gpus_per_worker=1) for pool in Pool}
    busy = load(20.0, mean_prompt_tokens=2500, mean_output_tokens=200)
    decision = plan_scaling(situation(20.0, loads=(busy,), pools=pools, max_gpus=4))
    assert sum(decision.advice.values()) == 4
    assert decision.reason is Reason.AT_LIMIT
    assert "maxGPUs 4" in decision.message


def test_one_gpu_leaves_one_decode_worker() -> None:
    pools = {pool: bounds(pool, 1, gpus_per_worker=1) for pool in Pool}
    assert counts(plan_scaling(situation(0.5, pools=pools, placeable_total=1))) == (0, 1)


CLAMPS = {
    "fits": ((2, 3), 5, (2, 3)),
    "halved": ((4, 4), 4, (2, 2)),
    "seven to one": ((7, 1), 4, (3, 1)),
    "one to seven": ((1, 7), 4, (1, 3)),
    "two to one in two": ((6, 3), 2, (1, 1)),
    "two left": ((3, 1), 2, (1, 1)),
    "one left serves colocated": ((3, 1), 1, (0, 1)),
    "none left": ((3, 1), 0, (0, 0)),
    "no prefill wanted": ((0, 3), 2, (0, 2)),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_clamp_keeps_the_ratio(name: str) -> None:
    (prefill, decode), most, expected = CLAMPS[name]
    clamped = shrink_to_total({Pool.PREFILL: prefill, Pool.DECODE: decode}, most)
    assert (clamped[Pool.PREFILL], clamped[Pool.DECODE]) == expected


@PATIENT
@for_all(st.integers(0, 40), st.integers(0, 40), st.integers(0, 80))
def test_clamp_never_raises_a_pool_and_fills_the_room(prefill: int, decode: int, most: int) -> None:
    clamped = shrink_to_total({Pool.PREFILL: prefill, Pool.DECODE: decode}, most)
    assert clamped[Pool.PREFILL] <= prefill
    assert clamped[Pool.DECODE] <= decode
    assert sum(clamped.values()) == min(most, prefill + decode)
    if prefill and decode and most >= 2:
        assert min(clamped.values()) >= 1


@PATIENT
@for_all(st.integers(0, 9), st.integers(0, 9))
def test_repair_leaves_no_pool_that_only_prefills(prefill: int, decode: int) -> None:
    repaired = repair_one_sided({Pool.PREFILL: prefill, Pool.DECODE: decode})
    assert sum(repaired.values()) == prefill + decode
    assert repaired[Pool.DECODE] > 0 or sum(repaired.values()) == 0


situations = st.builds(
    lambda rate, prefill, decode, prefill_ready, decode_ready, mode, switching, most, queue: replace(
        situation(
            rate,
            pools={
                Pool.PREFILL: bounds(Pool.PREFILL, prefill, min(prefill, prefill_ready)),
                Pool.DECODE: bounds(Pool.DECODE, decode, min(decode, decode_ready)),
            },
            loads=(load(rate, queue_s=queue),),
            workers=workers(min(prefill, prefill_ready), min(decode, decode_ready)),
            mode=mode,
            role_switching=switching,
        ),
        placeable_total=most,
    ),
    st.floats(0, 50),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from(ServedMode),
    st.sampled_from(RoleSwitching),
    st.none() | st.integers(1, 16),
    st.none() | st.floats(0, 10),
)


@settings(PATIENT, max_examples=60)
@for_all(situations)
def test_bounds_roles_and_repeatability(given: ScalingInput) -> None:
    decision = plan_scaling(given)
    assert decision == plan_scaling(given)
    for pool in Pool:
        assert 0 <= decision.advice[pool] <= given.pools[pool].max
    assert decision.advice[Pool.DECODE] >= 1
    if given.placeable_total is not None:
        assert sum(decision.advice.values()) <= max(given.placeable_total, 1)
    assert set(decision.roles) == {worker.pod for worker in given.workers}
    both_pools = len({worker.pool for worker in given.workers}) == 2
    if given.mode is ServedMode.SPLIT and both_pools:
        assert {Role.PREFILL, Role.DECODE} <= set(decision.roles.values())
    assert decision.message
    assert all(
        math.isfinite(value) for value in (decision.memory.ttft_correction, decision.memory.tpot_correction)
    )


@settings(PATIENT, max_examples=25)
@for_all(st.floats(0.1, 20), st.floats(1.05, 3))
def test_more_load_never_needs_fewer_workers(rate: float, factor: float) -> None:
    small, large = plan_scaling(situation(rate)), plan_scaling(situation(rate * factor))
    assert all(large.needed[role] >= small.needed[role] for role in small.needed)


def test_corrections_move_slowly_and_stay_bounded() -> None:
    slow = load(0.5, ttft_p50_s=30.0, tpot_p50_s=3.0)
    memory, seen = ScalingMemory(), []
    for tick in range(200):
        memory = plan_scaling(situation(0.5, loads=(slow,), now_s=1000.0 + 10 * tick, memory=memory)).memory
        seen.append(memory.ttft_correction)
    assert seen[0] == pytest.approx(1.1)
    assert all(later >= earlier for earlier, later in itertools.pairwise(seen))
    assert seen[-1] == pytest.approx(2.0, abs=1e-3)
    assert len(memory.points) < 100
