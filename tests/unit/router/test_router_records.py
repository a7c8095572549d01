"""Records of requests: attainment, windows, percentiles, histograms."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from phasesplit.api.routing import LatencyClass
from phasesplit_router.fleet import Phase
from phasesplit_router.histograms import Histogram, HistogramCollector
from phasesplit_router.records import Ledger, Record, percentile

KIND = LatencyClass(name="kind", ttft_s=1.0, tpot_s=0.1)


def record(**fields: object) -> Record:
    made = Record("id", KIND, 10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


RECORDS = {
    "both met": (
        {"first_sent_s": 10.5, "last_sent_s": 11.3, "num_tokens": 10, "finish_reason": "stop"},
        True,
    ),
    "late first token": (
        {"first_sent_s": 11.5, "last_sent_s": 11.6, "num_tokens": 9, "finish_reason": "stop"},
        False,
    ),
    "slow tokens": (
        {"first_sent_s": 10.5, "last_sent_s": 12.5, "num_tokens": 11, "finish_reason": "stop"},
        False,
    ),
    "one token has no TPOT": (
        {"first_sent_s": 10.5, "last_sent_s": 10.5, "num_tokens": 1, "finish_reason": "stop"},
        True,
    ),
    "failed": ({"first_sent_s": 10.5, "last_sent_s": 10.6, "num_tokens": 2, "failed": True}, False),
    "refused": ({"rejected": "queue_full"}, False),
}


@pytest.mark.parametrize("name", RECORDS)
def test_attainment(name: str) -> None:
    fields, attained = RECORDS[name]
    assert record(**fields).is_attained is attained


def test_times_of_a_request() -> None:
    made = record(first_sent_s=10.5, second_sent_s=10.8, last_sent_s=12.5, num_tokens=5, finish_reason="stop")
    made.waits_s = {Phase.PREFILL: 0.1, Phase.DECODE: 0.2}
    trace = made.trace()
    assert (trace.ttft_s, trace.e2e_s, trace.tpot_s) == (0.5, 2.5, 0.5)
    assert trace.second_token_gap_s == pytest.approx(0.3)
    assert trace.queue_s == pytest.approx(0.3)


def test_the_window_forgets_and_the_ring_is_bounded() -> None:
    ledger = Ledger(0.0)
    for number in range(1200):
        made = record(first_sent_s=10.5, last_sent_s=11.0, num_tokens=6, finish_reason="stop")
        made.request_id = f"r{number}"
        ledger.arrived("kind", float(number) / 100)
        ledger.ended(made, float(number) / 100)
    assert ledger.find_trace("r0") is None
    assert ledger.find_trace("r300") is not None
    last = ledger.find_trace("last")
    assert last is not None
    assert last.request_id == "r1199"
    (report,) = ledger.class_reports([KIND], {"kind": 0.25}, 12.0)
    assert (report.attained, report.finished, report.queue_s) == (1200, 1200, 0.25)
    assert report.arrival_rate_per_s == pytest.approx(100)
    assert report.ttft_p95_s == 0.5
    (report,) = ledger.class_reports([KIND], {}, 1000.0)
    assert (report.finished, report.ttft_p50_s) == (0, None)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 95) == 95
    assert percentile(values, 99) == 99
    assert percentile([7.0], 95) == 7.0
    assert percentile([], 95) is None


def test_a_new_bound_keeps_the_counts_monotone() -> None:
    histogram = Histogram("h", "help", ("a",), [1.0, 2.0])
    for value in (0.5, 1.5, 1.7, 5.0):
        histogram.observe(("x",), value)
    histogram.add_bound(1.6)
    histogram.add_bound(1.6)
    histogram.observe(("x",), 1.6, times=2)
    registry = CollectorRegistry()
    registry.register(HistogramCollector([histogram]))
    lines = generate_latest(registry).decode().splitlines()
    counts = [float(line.split(" ")[-1]) for line in lines if line.startswith("h_bucket")]
    assert counts == [1, 3, 5, 6]
    assert [line for line in lines if line.startswith("h_count")] == ['h_count{a="x"} 6.0']
    assert float(next(line for line in lines if line.startswith("h_sum")).split(" ")[-1]) == pytest.approx(
        11.9
    )
