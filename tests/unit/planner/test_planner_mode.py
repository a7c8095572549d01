"""Mode: named situations in, one decision out; then whole histories."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from helpers_planner import GPU, LONG, MBIT, auto_object, link, pools, split_object, workers
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode
from phasesplit.planner.facts import LinkFacts
from phasesplit.planner.mode import decide_mode, effective_dwell_s
from phasesplit.planner.mode_types import ModeDecision, ModeInput, ModeMemory, TransferWindow

SPLIT_TABLE: dict[str, tuple[dict[str, object], ServedMode, Reason]] = {
    "healthy": ({}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "link shaped to 50mbit": ({"links": link(47)}, ServedMode.COLOCATED, Reason.LINK_DEGRADED),
    "link of 1gbit": ({"links": link(940)}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "link not measured": ({"links": ()}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "slow measurement is old": ({"links": link(47, age_s=500)}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "user accepts a slow link": (
        {"links": link(47), "min_bandwidth_bytes_per_s": 40 * MBIT},
        ServedMode.SPLIT,
        Reason.AS_REQUESTED,
    ),
    "user asks for a fast link": (
        {"links": link(940), "min_bandwidth_bytes_per_s": 2000 * MBIT},
        ServedMode.COLOCATED,
        Reason.LINK_DEGRADED,
    ),
    "transfers fail": (
        {"transfers": TransferWindow(40, 4, "deadline")},
        ServedMode.COLOCATED,
        Reason.LINK_DEGRADED,
    ),
    "a transfer failed": ({"transfers": TransferWindow(3, 2)}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "failures within bounds": ({"transfers": TransferWindow(100, 5)}, ServedMode.SPLIT, Reason.AS_REQUESTED),
    "decode pool gone": ({"pools": pools(1, 0)}, ServedMode.COLOCATED, Reason.POOL_UNAVAILABLE),
    "pools of different models": (
        {"workers": workers(decode_fingerprint="other")},
        ServedMode.COLOCATED,
        Reason.MISMATCH,
    ),
    "no fallback allowed": (
        {"fallback": Fallback.NEVER, "links": link(47)},
        ServedMode.SPLIT,
        Reason.LINK_DEGRADED,
    ),
    "colocated wanted": ({"wanted": Mode.COLOCATED}, ServedMode.COLOCATED, Reason.AS_REQUESTED),
}


@pytest.mark.parametrize("name", SPLIT_TABLE)
def test_decision_for_a_split_object(name: str) -> None:
    changes, mode, reason = SPLIT_TABLE[name]
    decision = decide_mode(split_object(**changes))
    assert (decision.mode, decision.reason) == (mode, reason)
    assert decision.serving == (name != "no fallback allowed")
    assert decision.colocated_allowed == (name != "no fallback allowed")
    assert decision.since_s == (1000.0 if decision.changed else 100.0)


def test_degraded_link_says_need_and_have() -> None:
    decision = decide_mode(split_object(links=link(47)))
    assert "47 Mbit/s" in decision.message
    assert decision.link.need_bytes_per_s is not None
    assert 77 * MBIT < decision.link.need_bytes_per_s < 140 * MBIT
    assert decision.evidence["linkHaveBytesPerSecond"] == pytest.approx(47 * MBIT)


def run(given: ModeInput, steps: Iterable[tuple[float, dict[str, object]]]) -> list[ModeDecision]:
    """Feed a history: at each time some facts change; mode and memory go round."""
    decisions = []
    for now_s, changes in steps:
        given = replace(given, now_s=now_s, **changes)
        decision = decide_mode(given)
        given = replace(given, served=decision.mode, memory=decision.memory)
        decisions.append(decision)
    return decisions


def test_split_starts_as_soon_as_both_pools_are_ready() -> None:
    start = split_object(served=ServedMode.COLOCATED, memory=ModeMemory(), pools=pools(0, 0))
    modes = [d.mode for d in run(start, [(0, {}), (5, {"pools": pools(1, 0)}), (9, {"pools": pools(1, 1)})])]
    assert modes == [ServedMode.COLOCATED, ServedMode.COLOCATED, ServedMode.SPLIT]


def test_return_waits_until_the_cause_is_gone_for_a_dwell() -> None:
    history = run(
        split_object(),
        [
            (1000, {"links": link(47)}),
            (1200, {"links": link(47)}),
            (1201, {"links": link(16_000)}),
            (1230, {}),
            (1240, {"links": link(47)}),
            (1250, {"links": link(16_000)}),
            (1305, {}),
            (1311, {}),
        ],
    )
    assert [d.mode for d in history] == [ServedMode.COLOCATED] * 7 + [ServedMode.SPLIT]
    assert [d.reason for d in history[2:]] == [
        Reason.DWELL,
        Reason.DWELL,
        Reason.LINK_DEGRADED,
        Reason.DWELL,
        Reason.DWELL,
        Reason.AS_REQUESTED,
    ]


def test_oscillation_doubles_the_dwell() -> None:
    given, now_s, waits = split_object(), 1000.0, []
    for _ in range(4):
        given = replace(given, now_s=now_s, links=link(47))
        decision = decide_mode(given)
        assert decision.mode is ServedMode.COLOCATED
        given = replace(given, served=decision.mode, memory=decision.memory, links=link(16_000))
        left_at_s = now_s
        while given.served is ServedMode.COLOCATED:
            now_s += 1.0
            decision = decide_mode(replace(given, now_s=now_s))
            given = replace(given, served=decision.mode, memory=decision.memory)
        waits.append(now_s - left_at_s)
        now_s += 5.0
    assert waits == [61.0, 121.0, 241.0, 481.0]


def test_dwell_shrinks_back_after_a_quiet_time() -> None:
    assert effective_dwell_s(ModeMemory(fallbacks_at_s=(0.0, 100.0)), 60.0) == 120.0
    assert effective_dwell_s(ModeMemory(fallbacks_at_s=(0.0, 100.0, 5000.0)), 60.0) == 60.0


def test_a_user_who_turns_to_split_does_not_wait() -> None:
    colocated = split_object(wanted=Mode.COLOCATED, served=ServedMode.COLOCATED)
    history = run(colocated, [(1000, {}), (1001, {"wanted": Mode.SPLIT})])
    assert [d.mode for d in history] == [ServedMode.COLOCATED, ServedMode.SPLIT]


slow_links = tuple(LinkFacts(f"p{a}", f"d{b}", 125e6) for a in range(2) for b in range(2))
AUTO_TABLE: dict[str, tuple[dict[str, object], Reason]] = {
    "long prompts, tight TPOT, fast link": ({}, Reason.SPLIT_PAYS),
    "no traffic": ({"loads": ()}, Reason.NOT_ENOUGH_TRAFFIC),
    "profile is a guess": (
        {"profiles": {Pool.PREFILL: GPU.model_copy(update={"guessed": True}), Pool.DECODE: GPU}},
        Reason.NOT_YET_MEASURED,
    ),
    "decode pool does not fit": ({"pools": pools(2, 2, placeable=False)}, Reason.NOT_ENOUGH_GPUS),
    "time-sliced GPU": ({"pools": pools(2, 2, shares_device=True)}, Reason.SHARED_GPU),
    "decode pool starting": ({"pools": pools(2, 0)}, Reason.POOL_UNAVAILABLE),
    "prefill disturbs nothing": (
        {
            "loads": (replace(LONG, mean_prompt_tokens=100, arrival_rate_per_s=0.5, attainment=1.0),),
            "classes": (LatencyClass(name="default", ttft_s=2.0, tpot_s=0.2),),
        },
        Reason.NO_INTERFERENCE,
    ),
    "interference without harm": (
        {
            "interference": 0.05,
            "loads": (replace(LONG, mean_prompt_tokens=400, arrival_rate_per_s=0.5, attainment=1.0),),
            "classes": (LatencyClass(name="default", ttft_s=2.0, tpot_s=0.2),),
        },
        Reason.TARGETS_MET,
    ),
    "tight TTFT, relaxed TPOT": (
        {"interference": 0.05, "classes": (LatencyClass(name="default", ttft_s=1.0, tpot_s=0.5),)},
        Reason.GAIN_TOO_SMALL,
    ),
    "slow link": ({"links": slow_links}, Reason.LINK_TOO_SLOW),
    "link not measured": ({"links": ()}, Reason.NOT_YET_MEASURED),
    "pools of different models": (
        {"workers": workers(prefill=2, decode=2, decode_fingerprint="other")},
        Reason.MISMATCH,
    ),
}


@pytest.mark.parametrize("name", AUTO_TABLE)
def test_adoption_list_of_auto(name: str) -> None:
    changes, reason = AUTO_TABLE[name]
    decision = decide_mode(auto_object(**changes))
    assert decision.reason is reason, decision.message
    expected = ServedMode.SPLIT if reason is Reason.SPLIT_PAYS else ServedMode.COLOCATED
    assert decision.mode is expected
    assert decision.message


def test_auto_waits_a_dwell_between_changes_and_leaves_at_once() -> None:
    history = run(
        auto_object(memory=ModeMemory(since_s=990.0)),
        [(1000, {}), (1060, {}), (1070, {"pools": pools(2, 0)}), (1071, {"pools": pools(2, 2)}), (1133, {})],
    )
    assert [d.reason for d in history] == [
        Reason.DWELL,
        Reason.SPLIT_PAYS,
        Reason.POOL_UNAVAILABLE,
        Reason.DWELL,
        Reason.SPLIT_PAYS,
    ]


def test_auto_leaves_a_split_that_no_longer_pays_after_a_dwell() -> None:
    easy = (LatencyClass(name="default", ttft_s=2.0, tpot_s=0.5),)
    given = auto_object(served=ServedMode.SPLIT, classes=easy)
    history = run(given, [(1000, {}), (1030, {}), (1061, {})])
    assert [d.reason for d in history] == [Reason.DWELL, Reason.DWELL, Reason.COLOCATED_BETTER]
    assert history[-1].mode is ServedMode.COLOCATED


def test_decision_is_a_function_of_its_input() -> None:
    given = auto_object()
    assert decide_mode(given) == decide_mode(given)
