"""Bandwidth from samples, when to probe, and the window of failed transfers."""

import math

import pytest

from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import LinkSample
from phasesplit.operator.links import (
    MAX_PROBE_BYTES,
    MIN_PROBE_BYTES,
    LinkBook,
    ProbeMemory,
    plan_probe,
    probe_bytes,
)
from phasesplit.planner.facts import WorkerFacts
from phasesplit.planner.links import MAX_AGE_S

MIB = 1 << 20


def sample(
    busy_s: float, *, size: int = MIB, age_s: float = 0.0, pair: tuple[str, str] = ("a", "b")
) -> LinkSample:
    return LinkSample(
        from_node=pair[0],
        to_node=pair[1],
        from_pod="p0",
        to_pod="d0",
        transport="TCP",
        bytes=size,
        busy_s=busy_s,
        age_s=age_s,
    )


def worker(pod: str, node: str, pool: Pool) -> WorkerFacts:
    return WorkerFacts(pod, node, pool, Role.COLOCATED)


PREFILL, DECODE = worker("p0", "a", Pool.PREFILL), worker("d0", "b", Pool.DECODE)


def test_the_best_of_the_last_three_measurements_counts() -> None:
    book = LinkBook()
    book.add([sample(0.001, age_s=60)], 100)  # too old
    book.add([sample(0.1, age_s=4), sample(0.01, age_s=3), sample(0.3, age_s=2), sample(0.2)], 100)
    (fact,) = book.facts(100)
    assert math.isclose(fact.bytes_per_s, MIB / 0.01)
    assert (fact.from_node, fact.to_node, fact.age_s, fact.settled) == ("a", "b", 0, True)


def test_small_samples_are_put_together() -> None:
    book = LinkBook()
    book.add([sample(0.001 + i / 1e4, size=MIB // 4, age_s=i) for i in range(4)], 100)
    (fact,) = book.facts(100)
    assert math.isclose(fact.bytes_per_s, MIB / 0.0046)
    assert not fact.settled


def test_a_sample_reported_again_counts_once() -> None:
    book = LinkBook()
    book.add([sample(0.1, age_s=1)], 100)
    book.add([sample(0.1, age_s=3)], 102)
    book.add([sample(0.5, age_s=0)], 102)
    (fact,) = book.facts(102)
    assert not fact.settled


def test_a_link_that_looks_slower_is_measured_again_at_once_until_it_is_certain() -> None:
    book = LinkBook()
    book.add([sample(0.01 + age / 1e4, age_s=age) for age in (3, 2, 1)], 100)
    assert book.facts(100)[0].settled and not book.is_in_doubt(("a", "b"))
    for second in range(1, 3):
        book.add([sample(0.2 + second / 1000)], 100 + second)
        book.facts(100 + second)
        assert book.is_in_doubt(("a", "b"))
        last = ProbeMemory(ended_s=100 + second - 0.9, took_s=0.15)
        assert plan_probe(book, [DECODE], [PREFILL], now_s=100 + second, stale_s=10, last=last) is not None
    book.add([sample(0.204)], 103)
    (fact,) = book.facts(103)
    assert fact.settled and fact.bytes_per_s < MIB / 0.19
    assert not book.is_in_doubt(("a", "b"))


def test_a_link_of_a_node_whose_other_link_looks_slower_is_measured_at_once() -> None:
    book = LinkBook()
    for pair in (("a", "b"), ("b", "a"), ("c", "d")):
        book.add([sample(0.01 + age / 1e4, age_s=age, pair=pair) for age in (3, 2, 1)], 100)
    book.facts(100)
    assert not any(book.is_suspect(pair) for pair in (("a", "b"), ("b", "a"), ("c", "d")))
    book.add([sample(0.2)], 101)
    assert book.is_suspect(("a", "b"))
    assert book.is_suspect(("b", "a"))
    assert not book.is_suspect(("c", "d"))
    book.add([sample(0.0105, pair=("b", "a"))], 102)
    assert not book.is_suspect(("b", "a"))


def test_a_probe_that_waits_for_processors_takes_no_more_of_the_link() -> None:
    book = LinkBook()
    assert book.transfer_s(("a", "b"), MIB) is None
    book.add([sample(0.5, age_s=2), sample(0.01, age_s=1), sample(0.3)], 100)
    assert book.transfer_s(("a", "b"), MIB) == pytest.approx(0.01)


def test_one_slow_sample_after_a_quiet_time_is_not_believed() -> None:
    book = LinkBook()
    book.add([sample(0.01 + age / 1e4, age_s=age) for age in (3, 2, 1)], 100)
    book.facts(100)
    book.add([sample(0.2)], 200)
    (fact,) = book.facts(200)
    assert not fact.settled
    assert book.is_in_doubt(("a", "b"))


def test_tiny_samples_and_those_within_a_node_say_nothing() -> None:
    book = LinkBook()
    book.add([sample(0.1, size=1000), sample(0.1, pair=("a", "a")), sample(0.0)], 100)
    assert book.facts(100) == ()


def test_old_pairs_are_forgotten() -> None:
    book = LinkBook()
    book.add([sample(0.1)], 100)
    book.forget_old(10_000)
    assert book.facts(10_000) == ()


def test_a_fresh_link_is_not_probed_and_a_stale_one_is() -> None:
    book = LinkBook()
    book.add([sample(0.1 + age / 1e3, age_s=age) for age in (9, 5, 0)], 100)
    book.facts(100)
    assert plan_probe(book, [DECODE], [PREFILL], now_s=105, stale_s=10, last=None) is None
    probe = plan_probe(book, [DECODE], [PREFILL], now_s=111, stale_s=10, last=None)
    assert probe is not None
    assert (probe.source, probe.puller, probe.pair) == ("p0", "d0", ("a", "b"))


def test_the_pair_without_any_measurement_goes_first() -> None:
    book = LinkBook()
    book.add([sample(0.1)], 0)
    other = worker("d1", "c", Pool.DECODE)
    probe = plan_probe(book, [DECODE, other], [PREFILL], now_s=100, stale_s=10, last=None)
    assert probe is not None and probe.puller == "d1"


def test_pods_of_one_node_are_not_probed() -> None:
    beside = worker("d1", "a", Pool.DECODE)
    assert plan_probe(LinkBook(), [beside], [PREFILL], now_s=0, stale_s=10, last=None) is None


def test_probing_takes_at_most_one_percent_of_the_time() -> None:
    last = ProbeMemory(ended_s=100, took_s=0.5)
    assert plan_probe(LinkBook(), [DECODE], [PREFILL], now_s=149, stale_s=10, last=last) is None
    assert plan_probe(LinkBook(), [DECODE], [PREFILL], now_s=151, stale_s=10, last=last) is not None


@pytest.mark.parametrize("rate", [0.3e6, 0.4e6, 1e6, 5e6, 25e6, 125e6, 1e9])
def test_a_link_of_any_speed_stays_known_and_certain_while_it_is_probed_alone(rate: float) -> None:
    book, last, next_at_s, certain_since_s = LinkBook(), None, 0.0, math.inf
    for tick in range(1200):
        now_s = float(tick)
        if now_s < next_at_s:
            continue  # a probe is under way
        (fact,) = book.facts(now_s) or (None,)
        if fact is not None and fact.settled:
            certain_since_s = min(certain_since_s, now_s)
        if now_s > certain_since_s:
            assert fact is not None and fact.settled and fact.age_s < MAX_AGE_S
        probe = plan_probe(book, [DECODE], [PREFILL], now_s=now_s, stale_s=10, last=last)
        if probe is not None:
            took_s = probe.bytes / rate
            next_at_s = now_s + took_s
            book.add([sample(took_s, size=probe.bytes)], next_at_s)
            last = ProbeMemory(ended_s=next_at_s, took_s=took_s)
    assert certain_since_s < 60


def test_a_probe_is_as_large_as_the_link_carries_in_half_a_second() -> None:
    assert probe_bytes(None) == MAX_PROBE_BYTES
    assert probe_bytes(1e9) == MAX_PROBE_BYTES
    assert probe_bytes(3e6) == 1_500_000
    assert probe_bytes(1e3) == MIN_PROBE_BYTES


def test_a_failed_probe_is_repeated_small() -> None:
    last = ProbeMemory(ended_s=0, took_s=0.01, failed=True)
    probe = plan_probe(LinkBook(), [DECODE], [PREFILL], now_s=100, stale_s=10, last=last)
    assert probe is not None and probe.bytes == MIN_PROBE_BYTES
