"""Admission, quarantine, retries, records, histograms, slices: small pure parts of the router."""

import json
import random
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import LinkSample, ModelFacts, StepProfile, WorkerReport, WorkerState
from phasesplit.api.routing import LatencyClass, LinkEstimate, RoutingTable, WhenInfeasible
from phasesplit_http.errors import ApiError
from phasesplit_router import predict
from phasesplit_router.admission import Outlook, refuse
from phasesplit_router.fleet import Phase
from phasesplit_router.histograms import Histogram, HistogramCollector
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.records import Ledger, Record, percentile
from phasesplit_router.request import Endpoint, clean_request_id, parse_request
from phasesplit_router.retry import RetryBudget, backoff_s
from phasesplit_router.snapshot import Address, Snapshot, addresses_of_slices
from phasesplit_router.workers import MAX_DECODES, SLOW_START_FIRST, WorkerBook

STRICT = LatencyClass(name="strict", ttft_s=1.0, tpot_s=0.1, when_infeasible=WhenInfeasible.REJECT)
KIND = LatencyClass(name="kind", ttft_s=1.0, tpot_s=0.1)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


# Admission


def outlook(**fields: float | bool) -> Outlook:
    known = {
        "is_measured": True,
        "prefill_wait_s": 0.0,
        "decode_wait_s": 0.0,
        "own_prefill_s": 0.2,
        "num_queued": 0,
        "max_queued": 10,
    }
    return Outlook(**(known | fields))  # type: ignore[arg-type]


ADMISSION = {
    "idle": (KIND, outlook(), ""),
    "waits but in time": (KIND, outlook(prefill_wait_s=0.7), ""),
    "waits too long for prefill": (KIND, outlook(prefill_wait_s=0.9), "prefill_queue"),
    "waits too long for decode": (KIND, outlook(decode_wait_s=5.0), "decode_queue"),
    "the waits overlap": (KIND, outlook(prefill_wait_s=0.7, decode_wait_s=0.7), ""),
    "infeasible, served": (KIND, outlook(own_prefill_s=2.0), ""),
    "infeasible, refused": (STRICT, outlook(own_prefill_s=2.0), "infeasible"),
    "infeasible, served even when it waits": (KIND, outlook(own_prefill_s=2.0, prefill_wait_s=9.0), ""),
    "nothing measured": (STRICT, outlook(is_measured=False, own_prefill_s=9.0, prefill_wait_s=9.0), ""),
    "queue full": (KIND, outlook(is_measured=False, num_queued=10), "queue_full"),
}


@pytest.mark.parametrize("name", ADMISSION)
def test_admission(name: str) -> None:
    latency_class, expectation, reason = ADMISSION[name]
    error = refuse(latency_class, expectation)
    assert (error.reason if error else "") == reason
    if error:
        assert error.status == 429
        assert 1 <= int(error.headers()["Retry-After"]) <= 60
        assert error.body()["error"]["type"] == "rate_limit_error"


# Prediction


def test_exposed_transfer() -> None:
    assert predict.exposed_transfer_s(1e9, None, 1.0) == 0
    assert predict.exposed_transfer_s(1e6, 1e9, 1.0) < 0.001
    assert predict.exposed_transfer_s(1e9, 1e8, 1.0) == pytest.approx(9.1)


def test_measured_needs_samples() -> None:
    profile = StepProfile(num_samples=100)
    assert predict.is_measured(profile)
    assert not predict.is_measured(None)
    assert not predict.is_measured(profile.model_copy(update={"guessed": True}))
    assert not predict.is_measured(profile.model_copy(update={"num_samples": 3}))


def test_bytes_per_token_are_learned() -> None:
    lengths = predict.TextLength()
    assert lengths.prompt_tokens(400) == 100
    for _ in range(100):
        lengths.learn(prompt_bytes=3000, prompt_tokens=1000, output_tokens=10)
    assert lengths.prompt_tokens(300) == 100
    assert lengths.expected_output_tokens(20) == 20
    lengths.learn(prompt_bytes=0, prompt_tokens=0, output_tokens=0)
    assert lengths.prompt_tokens(0) == 1


# Quarantine


def test_a_pair_is_left_alone_after_repeats_and_longer_each_time() -> None:
    quarantine = Quarantine()
    assert not quarantine.failed("p", "d", 0)
    assert not quarantine.failed("p", "d", 1)
    assert quarantine.active(1) == frozenset()
    assert quarantine.failed("p", "d", 2)
    assert quarantine.active(3) == {("p", "d")}
    assert quarantine.active(7.1) == frozenset()
    assert quarantine.failed("p", "d", 8)  # on probation: once is enough, and it lasts twice as long
    assert quarantine.active(17.9) == {("p", "d")}
    assert quarantine.active(18.1) == frozenset()
    quarantine.succeeded("p", "d")
    assert not quarantine.failed("p", "d", 20)


def test_failures_far_apart_do_not_add_up() -> None:
    quarantine = Quarantine()
    assert not any(quarantine.failed("p", "d", 100.0 * number) for number in range(10))


def test_pairs_of_gone_pods_are_forgotten() -> None:
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.failed("p", "d", 0)
    quarantine.keep_only(frozenset({"p"}))
    assert quarantine.active(1) == frozenset()


# Retries


def test_a_burst_of_replays_passes_and_a_storm_is_slowed() -> None:
    budget = RetryBudget(per_second=10, burst=64, _left=64)
    assert [budget.take(0.0) for _ in range(64)] == [0.0] * 64
    waits = [budget.take(0.0) for _ in range(20)]
    assert waits == pytest.approx([number / 10 for number in range(1, 21)])
    assert budget.take(100.0) == 0.0


def test_backoff_is_jittered_and_bounded() -> None:
    draw = random.Random(1)
    assert all(0.01 <= backoff_s(1, draw) <= 0.05 for _ in range(100))
    assert all(backoff_s(9, draw) <= 2.0 for _ in range(100))


# Records


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


# Histograms


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


# Requests


TABLE = RoutingTable(model="m", classes=(KIND, STRICT))


def parse(body: object, endpoint: Endpoint = Endpoint.CHAT, asked: str | None = None):  # type: ignore[no-untyped-def]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(raw, endpoint, TABLE, request_id="id", asked_class=asked, random_seed=5)


def test_a_parsed_request_becomes_a_streamed_leg() -> None:
    body = {"messages": [{"role": "user", "content": "häuser"}], "max_tokens": 9, "max_completion_tokens": 4}
    request = parse(body, asked="strict")
    leg = json.loads(request.leg_body + b"}")
    assert leg["stream"] is True
    assert leg["stream_options"] == {"include_usage": True}
    assert leg["model"] == "m"
    assert (request.max_tokens, request.seed, request.latency_class) == (4, 5, STRICT)
    assert request.prompt_bytes == 16 + 7
    assert parse(body | {"seed": -3}).seed == -3
    assert parse(body).latency_class == KIND


PROMPTS = [("abcd", 4), ([1, 2, 3], 12), (["abc"], 3), ([[1, 2]], 8)]


@pytest.mark.parametrize(("prompt", "num_bytes"), PROMPTS)
def test_prompt_forms(prompt: object, num_bytes: int) -> None:
    assert parse({"prompt": prompt}, Endpoint.COMPLETION).prompt_bytes == num_bytes


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], None, 5])
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse({"prompt": prompt}, Endpoint.COMPLETION)
    assert caught.value.param == "prompt"


def test_request_ids_are_cleaned() -> None:
    assert clean_request_id("abc-1.2:3_x") == "abc-1.2:3_x"
    for bad in (None, "", "a b", "x" * 101, "a\n", "ü", "../x"):
        assert clean_request_id(bad) is None


# EndpointSlices


def test_slices_become_addresses() -> None:
    def endpoint(pod: str, ip: str, **conditions: bool) -> dict[str, object]:
        return {
            "addresses": [ip],
            "nodeName": "n1",
            "targetRef": {"kind": "Pod", "name": pod},
            "conditions": conditions,
        }

    slices = [
        {
            "metadata": {"name": "s1", "labels": {"kubernetes.io/service-name": "o-prefill"}},
            "ports": [{"name": "api", "port": 8001}, {"name": "transfer", "port": 8101}],
            "endpoints": [
                endpoint("o-prefill-0", "10.0.0.1", ready=True, serving=True, terminating=False),
                # A Service that publishes not-ready addresses says ready=True for every pod.
                endpoint("o-prefill-1", "10.0.0.2", ready=True, serving=False, terminating=False),
                {"addresses": [], "targetRef": {"name": "x"}},
                {"addresses": ["10.0.0.9"]},
            ],
        },
        {
            "metadata": {"name": "s2", "labels": {"kubernetes.io/service-name": "o-decode"}},
            "ports": None,
            "endpoints": [endpoint("o-decode-0", "fd00::1", ready=False, serving=True, terminating=True)],
        },
        {
            "metadata": {"name": "s3", "labels": {"kubernetes.io/service-name": "other"}},
            "endpoints": [endpoint("z", "10.0.0.7")],
        },
    ]
    found = addresses_of_slices(slices, {"o-prefill": Pool.PREFILL, "o-decode": Pool.DECODE})
    assert found == (
        Address("o-decode-0", "n1", Pool.DECODE, "fd00::1", ready=True, terminating=True),
        Address("o-prefill-0", "n1", Pool.PREFILL, "10.0.0.1", 8001, 8101),
        Address("o-prefill-1", "n1", Pool.PREFILL, "10.0.0.2", 8001, 8101, ready=False),
    )
    assert found[0].url == "http://[fd00::1]:8000"


# Workers


def report(pod: str = "a", **fields: object) -> WorkerReport:
    facts = ModelFacts(name="m", fingerprint="f", weights_bytes=1, kv_layout=LAYOUT, max_model_length=100)
    known: dict[str, object] = {
        "pod": pod,
        "node": "n",
        "pool": Pool.DECODE,
        "role": Role.DECODE,
        "role_version": 1,
        "state": WorkerState.READY,
        "engine_id": "e",
        "model": facts,
        "kv_total_blocks": 100,
    }
    return WorkerReport.model_validate(known | fields)


@dataclass(eq=False)
class SomeLeg:
    """A leg as workers see it."""

    had_token: bool
    last_byte_s: float

    def abort(self, message: str) -> None:
        """Not used here."""


def book_of(*pods: str, **fields: object) -> WorkerBook:
    book = WorkerBook()
    addresses = tuple(Address(pod, "n", Pool.DECODE, "h", **fields) for pod in pods)  # type: ignore[arg-type]
    book.apply(Snapshot(TABLE, addresses), 0.0)
    return book


def test_only_ready_workers_get_traffic() -> None:
    assert len(book_of("a").views(0.0)) == 1
    assert book_of("a", ready=False).views(0.0) == ()
    assert book_of("a", terminating=True).views(0.0) == ()
    for state in (WorkerState.LOADING, WorkerState.DRAINING, WorkerState.FAILED):
        book = book_of("a")
        book.workers["a"].take_report(report(state=state), 0.0)
        assert book.views(0.0) == ()


def test_one_slow_poll_does_not_stop_traffic_but_a_refusal_does() -> None:
    book = book_of("a")
    worker = book.workers["a"]
    worker.poll_failed("timed out", 0.0, refused=False)
    assert len(book.views(0.0)) == 1
    worker.poll_failed("refused", 0.0, refused=True)
    assert book.views(0.0) == ()
    worker.take_report(report(), 1.0)
    assert len(book.views(1.0)) == 1


def test_failed_legs_keep_traffic_away_for_a_while() -> None:
    book = book_of("a", "b")
    first, second = book.workers["a"], book.workers["b"]
    first.leg_failed(0.0)
    assert [view.pod for view in book.views(0.4)] == ["b"]
    assert len(book.views(0.6)) == 2
    first.leg_failed(1.0)
    assert [view.pod for view in book.views(1.9)] == ["b"]
    # The last worker of a role is used all the same, unless it is down.
    second.leg_failed(1.5)
    assert len(book.views(1.9)) == 2
    first.leg_succeeded()
    assert [view.pod for view in book.views(1.9)] == ["a"]


def test_slow_polls_do_not_count_while_tokens_come() -> None:
    book = book_of("a")
    worker = book.workers["a"]
    worker.legs.add(SomeLeg(had_token=True, last_byte_s=8.0))
    for _ in range(10):
        worker.poll_failed("timed out", 10.0, refused=False)
    assert len(book.views(10.0)) == 1
    worker.poll_failed("timed out", 20.0, refused=False)
    assert book.views(20.0) == ()


def test_a_declared_pace_counts_as_measured() -> None:
    book = book_of("a")
    declared = StepProfile(per_prefill_token_s=0.001)
    book.workers["a"].take_report(report(profile=declared), 0.0)
    assert book.views(0.0)[0].profile is None
    book.workers["a"].take_report(report(profile=declared, paced=True), 0.0)
    assert predict.is_measured(book.views(0.0)[0].profile)


def test_new_workers_start_slowly_but_not_those_found_at_start() -> None:
    book = book_of("a")
    assert book.views(0.0)[0].max_decodes == MAX_DECODES
    book.apply(Snapshot(TABLE, tuple(Address(pod, "n", Pool.DECODE, "h") for pod in "ab")), 100.0)
    limits = {view.pod: view.max_decodes for view in book.views(100.0)}
    assert limits == {"a": MAX_DECODES, "b": SLOW_START_FIRST}
    assert book.views(105.0)[1].max_decodes == SLOW_START_FIRST + MAX_DECODES // 2
    assert book.views(110.0)[1].max_decodes == MAX_DECODES


def test_a_pod_at_a_new_address_is_a_new_worker() -> None:
    book = book_of("a")
    old = book.workers["a"]
    added, gone = book.apply(Snapshot(TABLE, (Address("a", "n", Pool.DECODE, "h2"),)), 1.0)
    assert [worker.address.host for worker in added] == ["h2"]
    assert gone == [old]


def test_load_is_counted_and_given_back() -> None:
    book = book_of("a")
    worker = book.workers["a"]
    worker.take_report(report(kv_used_blocks=10), 0.0)
    worker.begin_prefill(100, 0)
    worker.begin_decode(50, 0.1)
    worker.begin_decode(50, 0.05)
    view = book.views(0.0)[0]
    assert (view.num_prefills, view.num_decodes, view.context_tokens, view.tightest_tpot_s) == (
        1,
        2,
        100,
        0.05,
    )
    assert view.kv_free_tokens == int(1600 * 0.95) - 160
    worker.end_decode(50, 0.05)
    assert book.views(0.0)[0].tightest_tpot_s == 0.1
    worker.end_decode(50, 0.1)
    worker.end_prefill(100, 0)
    view = book.views(0.0)[0]
    assert (view.num_prefills, view.num_decodes, view.context_tokens) == (0, 0, 0)


def test_measured_links_replace_believed_ones_while_fresh() -> None:
    table = TABLE.model_copy(update={"links": (LinkEstimate(from_node="x", to_node="y", bytes_per_s=5.0),)})
    book = WorkerBook()
    book.apply(Snapshot(table, (Address("a", "n", Pool.DECODE, "h"),)), 0.0)
    assert book.links(0.0) == {("x", "y"): 5.0}
    sample = LinkSample(
        from_node="x",
        to_node="y",
        from_pod="p",
        to_pod="a",
        transport="TCP",
        bytes=100,
        busy_s=2.0,
        age_s=1.0,
    )
    book.workers["a"].take_report(report(links=[sample]), 10.0)
    assert book.links(10.0) == {("x", "y"): 50.0}
    assert book.links(500.0) == {("x", "y"): 5.0}
