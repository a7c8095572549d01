"""Facts are written at once, numbers seldom and only under load, so that idle means no writes."""

from typing import Any

import pytest

from phasesplit.cluster.status_writer import Change, changed_facts, compare, is_worth_writing, quantise

BASE: dict[str, Any] = {
    "mode": "Split",
    "decision": {"mode": "Split", "reason": "AsRequested", "message": "fine"},
    "measures": {"ttftMilliseconds": 310},
    "links": {"transport": "TCP", "medianBytesPerSecond": 1.1e8, "measuredAt": "2026-11-29T12:00:00Z"},
    "pools": [{"name": "prefill", "ready": 1, "desired": 1}],
    "conditions": [{"type": "Ready", "status": "True", "reason": "AllServing", "message": "2 workers"}],
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**BASE, **fields}


NUMBERS = {
    "a measure": changed(measures={"ttftMilliseconds": 320}),
    "a measure appears": changed(measures={"ttftMilliseconds": 310, "tpotMilliseconds": 40}),
    "a link": changed(links={"transport": "TCP", "medianBytesPerSecond": 9e7, "measuredAt": "later"}),
    "a sentence": changed(decision={"mode": "Split", "reason": "AsRequested", "message": "still fine"}),
}
FACTS = {
    "a mode": changed(mode="Colocated"),
    "a reason": changed(decision={"mode": "Split", "reason": "Dwell", "message": "fine"}),
    "a count": changed(pools=[{"name": "prefill", "ready": 0, "desired": 1}]),
    "a condition": changed(
        conditions=[{"type": "Ready", "status": "False", "reason": "CrashLoopBackOff", "message": ""}]
    ),
    "the first status": {},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_wait(name: str) -> None:
    change = compare(BASE, NUMBERS[name])
    assert change is Change.NUMBERS
    assert not is_worth_writing(change, busy=False, since_last_write_s=1e9)
    assert not is_worth_writing(change, busy=True, since_last_write_s=29)
    assert is_worth_writing(change, busy=True, since_last_write_s=30)


@pytest.mark.parametrize("name", FACTS)
def test_facts_do_not(name: str) -> None:
    change = compare(BASE, FACTS[name])
    assert change is Change.FACTS
    assert is_worth_writing(change, busy=False, since_last_write_s=0)


def test_the_log_names_what_changed() -> None:
    told = {name: changed_facts(BASE, after) for name, after in {**NUMBERS, **FACTS}.items()}
    assert told == {
        **dict.fromkeys(NUMBERS, ""),
        "a mode": "mode",
        "a reason": "decision",
        "a count": "pools",
        "a condition": "Ready",
        "the first status": "decision, links, mode, pools, Ready",
    }


def test_equal_is_never_written() -> None:
    assert compare(BASE, changed()) is Change.NONE
    assert not is_worth_writing(Change.NONE, busy=True, since_last_write_s=1e9)


def test_numbers_keep_two_digits() -> None:
    assert quantise(0.03149) == 0.031
    assert quantise(1234.0) == 1200
    assert quantise(1.1e8) == 110_000_000
    assert quantise(None) is None
    assert quantise(0.0) == 0
