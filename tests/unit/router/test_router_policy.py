"""Where a request goes: tables of fleets and decisions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import ServedMode
from phasesplit_router.fleet import Demand, Fleet, Phase, WorkerView
from phasesplit_router.policy import Blocked, Choice, LocalReason, Unavailable, choose

FAST = StepProfile(base_s=0.002, per_prefill_token_s=1e-4, per_decode_sequence_s=1e-3, num_samples=100)
SLOW = StepProfile(base_s=0.002, per_prefill_token_s=4e-4, per_decode_sequence_s=1e-3, num_samples=100)
DEMAND = Demand(request_id="r", prompt_tokens=1000, output_tokens=100, ttft_s=1.0, tpot_s=0.1)


def prefill(name: str = "p0", **fields: object) -> WorkerView:
    return WorkerView(pod=name, node="left", role=Role.PREFILL, **fields)  # type: ignore[arg-type]


def decode(name: str = "d0", **fields: object) -> WorkerView:
    return WorkerView(pod=name, node="right", role=Role.DECODE, **fields)  # type: ignore[arg-type]


def both(name: str, **fields: object) -> WorkerView:
    return WorkerView(pod=name, node="any", role=Role.COLOCATED, **fields)  # type: ignore[arg-type]


def split(*workers: WorkerView, **fields: object) -> Fleet:
    return Fleet(mode=ServedMode.SPLIT, workers=workers, **fields)  # type: ignore[arg-type]


def colocated(*workers: WorkerView) -> Fleet:
    return Fleet(mode=ServedMode.COLOCATED, workers=workers)


def chosen(demand: Demand, fleet: Fleet) -> Choice:
    decision = choose(demand, fleet)
    assert isinstance(decision, Choice), decision
    return decision


PAIRS = {
    "unknown data: the pair": (split(prefill(), decode()), ("p0", "d0")),
    "equal measured workers: the pair": (split(prefill(profile=FAST), decode(profile=FAST)), ("p0", "d0")),
    "shorter prefill queue": (
        split(prefill("p0", prefill_queue_s=2.0), prefill("p1", prefill_queue_s=0.1), decode()),
        ("p1", "d0"),
    ),
    "faster prefill worker": (
        split(prefill("p0", profile=SLOW), prefill("p1", profile=FAST), decode()),
        ("p1", "d0"),
    ),
    "fewer sequences break the tie": (
        split(prefill(), decode("d0", num_decodes=5), decode("d1", num_decodes=2)),
        ("p0", "d1"),
    ),
    "a faster link beats fewer sequences": (
        split(
            prefill(kv_bytes_per_token=100_000),
            decode("d0", num_decodes=5),
            replace(decode("d1"), node="far"),
            links={("left", "right"): 1e10, ("left", "far"): 1e7},
        ),
        ("p0", "d0"),
    ),
    "no room at the best prefill worker": (
        split(prefill("p0", num_prefills=4), prefill("p1", prefill_queue_s=9.0), decode()),
        ("p1", "d0"),
    ),
    "fingerprints must agree": (
        split(prefill(fingerprint="new"), decode("d0", fingerprint="old"), decode("d1", fingerprint="new")),
        ("p0", "d1"),
    ),
    "a quarantined pair is avoided": (
        split(prefill(), decode("d0"), decode("d1", num_decodes=9), quarantined=frozenset({("p0", "d0")})),
        ("p0", "d1"),
    ),
    "every pair quarantined and no fallback: a pair all the same": (
        split(prefill(), decode(), quarantined=frozenset({("p0", "d0")}), colocated_allowed=False),
        ("p0", "d0"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    fleet, pair = PAIRS[name]
    choice = chosen(DEMAND, fleet)
    assert (choice.prefill, choice.decode) == pair
    assert choice.mode is ServedMode.SPLIT
    assert choice.local_reason is None


SHORT = replace(DEMAND, prompt_tokens=50)
LOCAL = {
    "short prompt, queue at the prefill worker": (
        SHORT,
        split(prefill(profile=FAST, prefill_queue_s=0.5), decode(profile=FAST)),
        LocalReason.PREFILL_QUEUE,
    ),
    "slow link": (
        DEMAND,
        split(
            prefill(profile=FAST, kv_bytes_per_token=100_000),
            decode(profile=FAST),
            links={("left", "right"): 1e7},
        ),
        LocalReason.SLOW_LINK,
    ),
    "no prefill worker": (DEMAND, split(decode()), LocalReason.NO_PREFILL_WORKER),
    "no decode worker": (DEMAND, split(prefill()), LocalReason.NO_DECODE_WORKER),
    "all pairs quarantined": (
        DEMAND,
        split(prefill(), decode(), quarantined=frozenset({("p0", "d0")})),
        LocalReason.QUARANTINED,
    ),
    "replay": (replace(DEMAND, is_replay=True), split(prefill(), decode()), LocalReason.REPLAY),
    "slower prefill worker": (
        DEMAND,
        split(prefill(profile=SLOW), decode(profile=FAST)),
        LocalReason.SHORT_PROMPT,
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local(name: str) -> None:
    demand, fleet, reason = LOCAL[name]
    choice = chosen(demand, fleet)
    assert choice.prefill is None
    assert choice.mode is ServedMode.COLOCATED
    assert choice.local_reason is reason


def test_local_prefill_never_harms_running_sequences() -> None:
    busy = decode(profile=FAST, num_decodes=4, tightest_tpot_s=0.02)
    fleet = split(prefill(profile=SLOW, prefill_queue_s=0.5), busy)
    assert chosen(DEMAND, fleet).prefill == "p0"
    assert chosen(replace(DEMAND, prompt_tokens=40), fleet).prefill is None


def test_the_share_that_decoding_takes_is_of_the_step_that_is_served() -> None:
    busy = decode(profile=FAST, num_decodes=4, tightest_tpot_s=0.02, max_step_s=0.02)
    alone_s = decode(profile=FAST).prefill_s(100)
    longer = replace(busy, max_step_s=0.08)  # tuned: decoding is a smaller share of each step
    assert alone_s < longer.prefill_s(100) < busy.prefill_s(100)
    assert replace(busy, max_step_s=float("inf")).prefill_s(100) == alone_s


def test_a_gain_that_does_not_matter_is_left_alone() -> None:
    fleet = split(prefill(profile=SLOW), decode(profile=FAST))
    assert chosen(DEMAND, fleet).prefill is None  # 0.3 s of a target of 1 s
    assert chosen(SHORT, fleet).prefill == "p0"  # milliseconds
    assert chosen(replace(DEMAND, ttft_s=10.0), fleet).prefill == "p0"


def test_local_prefill_needs_permission_and_measurement() -> None:
    forbidden = split(prefill(profile=SLOW), decode(profile=FAST), colocated_allowed=False)
    assert chosen(DEMAND, forbidden).prefill == "p0"
    guessed = FAST.model_copy(update={"guessed": True})
    assert chosen(DEMAND, split(prefill(profile=SLOW), decode(profile=guessed))).prefill == "p0"


def test_work_of_lower_priority_is_not_ahead() -> None:
    busy = prefill(
        profile=FAST,
        num_prefills=4,
        prefill_queue_s=0.9,
        prefills_by_priority=((0, 3, 0.8), (5, 1, 0.1)),
    )
    fleet = split(busy, decode())
    assert choose(DEMAND, fleet) == Blocked(Phase.PREFILL)
    urgent = chosen(replace(DEMAND, priority=9), fleet)
    assert (urgent.prefill, urgent.decode) == ("p0", "d0")
    assert urgent.ttft_s == pytest.approx(0.104)
    assert busy.wait_s(replace(DEMAND, priority=5)) == pytest.approx(0.1)
    full = replace(busy, num_prefills=8, prefills_by_priority=((0, 8, 0.9),))
    assert choose(replace(DEMAND, priority=9), split(full, decode())) == Blocked(Phase.PREFILL)


BLOCKED = {
    "prefill is full": (split(prefill(num_prefills=4), decode()), Blocked(Phase.PREFILL)),
    "decode is full": (split(prefill(), decode(num_decodes=64)), Blocked(Phase.DECODE)),
    "KV is full": (split(prefill(), decode(num_decodes=1, kv_free_tokens=500)), Blocked(Phase.DECODE)),
    "TPOT would be missed": (
        split(prefill(), decode(num_decodes=98, max_decodes=200, profile=FAST)),
        Blocked(Phase.DECODE),
    ),
    "a running sequence is stricter": (
        split(prefill(), decode(num_decodes=10, profile=FAST, tightest_tpot_s=0.01)),
        Blocked(Phase.DECODE),
    ),
    "colocated is full": (colocated(both("a", num_prefills=4)), Blocked(Phase.PREFILL)),
    "nobody": (split(), Unavailable()),
    "nobody colocated": (colocated(), Unavailable()),
    "no fallback allowed": (split(decode(), colocated_allowed=False), Unavailable()),
    "replay with another model's worker": (
        colocated(both("a", fingerprint="new")),
        Unavailable(),
    ),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_waiting(name: str) -> None:
    fleet, decision = BLOCKED[name]
    demand = replace(DEMAND, fingerprint="old") if "another model" in name else DEMAND
    assert choose(demand, fleet) == decision


def test_an_idle_worker_takes_what_can_never_meet_its_target() -> None:
    hopeless = replace(DEMAND, tpot_s=0.001)
    assert chosen(hopeless, split(prefill(), decode(profile=FAST))).decode == "d0"
    huge = replace(DEMAND, prompt_tokens=10**6)
    assert chosen(huge, split(prefill(), decode(kv_free_tokens=100))).decode == "d0"


def test_colocated_takes_the_least_loaded() -> None:
    fleet = colocated(both("a", num_decodes=3), both("b", num_decodes=1), both("c", prefill_queue_s=5.0))
    assert chosen(DEMAND, fleet).decode == "b"


def test_what_failed_before_is_avoided_while_there_is_something_else() -> None:
    demand = replace(DEMAND, avoid=frozenset({"a"}))
    assert chosen(demand, colocated(both("a"), both("b", num_decodes=30))).decode == "b"
    assert chosen(demand, colocated(both("a"))).decode == "a"


def test_ties_are_drawn_fairly_and_repeatably() -> None:
    fleet = split(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))
    draws = [chosen(replace(DEMAND, request_id=f"r{number}"), fleet) for number in range(400)]
    assert draws == [chosen(replace(DEMAND, request_id=f"r{number}"), fleet) for number in range(400)]
    counts = dict.fromkeys((("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")), 0)
    for draw in draws:
        assert draw.prefill is not None
        counts[draw.prefill, draw.decode] += 1
    assert min(counts.values()) > 60


_views = st.builds(
    WorkerView,
    pod=st.sampled_from(["a", "b", "c", "d", "e"]),
    node=st.sampled_from(["left", "right"]),
    role=st.sampled_from(list(Role)),
    fingerprint=st.sampled_from([None, "x", "y"]),
    profile=st.sampled_from([None, FAST, SLOW]),
    prefill_queue_s=st.floats(0, 10),
    num_prefills=st.integers(0, 5),
    num_decodes=st.integers(0, 70),
    kv_free_tokens=st.sampled_from([None, 0, 10_000]),
)


@given(
    st.lists(_views, max_size=5, unique_by=lambda view: view.pod),
    st.sampled_from(list(ServedMode)),
    st.booleans(),
    st.booleans(),
)
def test_every_decision_is_sound(
    workers: list[WorkerView], mode: ServedMode, allowed: bool, is_replay: bool
) -> None:
    fleet = Fleet(mode=mode, workers=tuple(workers), colocated_allowed=allowed)
    demand = replace(DEMAND, is_replay=is_replay)
    decision = choose(demand, fleet)
    by_pod = {worker.pod: worker for worker in workers}
    assert choose(demand, replace(fleet, workers=tuple(reversed(workers)))) == decision
    if isinstance(decision, Choice):
        target = by_pod[decision.decode]
        assert target.has_decode_room(demand)
        first = by_pod[decision.prefill] if decision.prefill else target
        assert first.has_prefill_room(demand)
        if decision.prefill:
            assert mode is ServedMode.SPLIT
            assert (first.role, target.role) == (Role.PREFILL, Role.DECODE)
            assert None in (first.fingerprint, target.fingerprint) or first.fingerprint == target.fingerprint
        elif mode is ServedMode.SPLIT:
            assert decision.local_reason is not None
            assert allowed or is_replay
    elif isinstance(decision, Unavailable):
        assert not workers or mode is ServedMode.SPLIT


def test_a_decode_worker_of_the_same_device_is_not_believed_to_read_faster() -> None:
    fleet = split(prefill(profile=SLOW, device="cpu"), decode(profile=FAST, device="cpu"))
    assert chosen(replace(DEMAND, ttft_s=0.2), fleet).prefill == "p0"
    reader = prefill(profile=SLOW, prefill_queue_s=5.0, device="cpu")
    queued = split(reader, decode(device="cpu", profile=FAST))
    assert chosen(DEMAND, queued).local_reason is LocalReason.PREFILL_QUEUE


def test_a_suspended_split_takes_nothing_new_and_ends_what_runs() -> None:
    fleet = replace(split(prefill(), decode()), colocated_allowed=False, split_suspended=True)
    assert isinstance(choose(DEMAND, fleet), Unavailable)
    assert chosen(replace(DEMAND, is_replay=True), fleet).prefill is None
