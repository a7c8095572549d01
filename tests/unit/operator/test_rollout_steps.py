"""One pod at a time over both pools; broken pods at once. Then the invariants of whole rollouts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.api.names import Pool
from phasesplit.operator.rollout import RolloutPod, plan_rollout


def pod(name: str, *, ready: bool = True, outdated: bool = True, terminating: bool = False) -> RolloutPod:
    """`p0` is the first pod of the prefill pool."""
    pool = Pool.PREFILL if name[0] == "p" else Pool.DECODE
    return RolloutPod(name, pool, int(name[1:]), ready, terminating, outdated)


ONE_EACH = {Pool.PREFILL: 1, Pool.DECODE: 1}
TWO_EACH = {Pool.PREFILL: 2, Pool.DECODE: 2}

TABLE = {
    "nothing outdated": ([pod("p0", outdated=False), pod("d0", outdated=False)], ONE_EACH, ()),
    "one of each: prefill first, decode serves meanwhile": ([pod("p0"), pod("d0")], ONE_EACH, ("p0",)),
    "wait for the one that is being replaced": (
        [pod("p0", ready=False, outdated=False), pod("d0")],
        ONE_EACH,
        (),
    ),
    "wait for the one that ends": ([pod("p0", terminating=True), pod("d0")], ONE_EACH, ()),
    "wait for the one that does not exist yet": ([pod("d0")], ONE_EACH, ()),
    "then the other": ([pod("p0", outdated=False), pod("d0")], ONE_EACH, ("d0",)),
    "the highest ordinal of the larger pool": (
        [pod("p0"), pod("d0"), pod("d1")],
        {Pool.PREFILL: 1, Pool.DECODE: 2},
        ("d1",),
    ),
    "broken and outdated: at once, however many": (
        [pod("p0", ready=False), pod("p1", ready=False), pod("d0"), pod("d1")],
        TWO_EACH,
        ("p0", "p1"),
    ),
    "broken with the new template: the rollout stops, the old ones serve": (
        [pod("p0", ready=False, outdated=False), pod("p1"), pod("d0"), pod("d1")],
        TWO_EACH,
        (),
    ),
    "the only worker of all: unavoidable": ([pod("d0")], {Pool.PREFILL: 0, Pool.DECODE: 1}, ("d0",)),
    "beyond the desired number: not ours to delete": (
        [pod("p0", outdated=False), pod("d0", outdated=False), pod("d1")],
        ONE_EACH,
        (),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_next_step(name: str) -> None:
    pods, desired, expected = TABLE[name]
    assert plan_rollout(pods, desired).delete == expected


def test_the_gap_of_a_single_worker_is_said() -> None:
    step = plan_rollout([pod("d0")], {Pool.PREFILL: 0, Pool.DECODE: 1})
    assert "the only worker" in step.message


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 63))
@settings(max_examples=60, deadline=None)
def test_a_rollout_ends_and_never_takes_two_serving_pods(prefill: int, decode: int, outdated: int) -> None:
    desired = {Pool.PREFILL: prefill, Pool.DECODE: decode}
    names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
    pods = {name: pod(name, outdated=bool(outdated >> n & 1)) for n, name in enumerate(names)}
    for _ in range(2 * len(names) + 1):
        step = plan_rollout(list(pods.values()), desired)
        if not step.delete:
            break
        assert len(step.delete) == 1
        serving = sum(1 for item in pods.values() if item.ready)
        assert serving == len(names), "all others serve before the next one goes"
        for name in step.delete:
            pods[name] = replace(pods[name], outdated=False)
    assert not any(item.outdated for item in pods.values())
