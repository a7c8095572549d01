"""What the router knows of each worker: readiness, load, slow start, links."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from helpers_worker_reports import report
from phasesplit.api.names import Pool
from phasesplit.api.reports import LinkSample, StepProfile, WorkerState
from phasesplit.api.routing import LatencyClass, LinkEstimate, RoutingTable, WhenInfeasible
from phasesplit_router import file_watch, predict
from phasesplit_router.file_watch import FileWatch, read_routing_file
from phasesplit_router.snapshot import Address, Snapshot, addresses_of_slices
from phasesplit_router.workers import MAX_DECODES, SLOW_START_FIRST, WorkerBook

STRICT = LatencyClass(name="strict", ttft_s=1.0, tpot_s=0.1, when_infeasible=WhenInfeasible.REJECT)
KIND = LatencyClass(name="kind", ttft_s=1.0, tpot_s=0.1)


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


TABLE = RoutingTable(model="m", classes=(KIND, STRICT))


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


def test_pods_that_never_answered_wait_behind_those_that_did() -> None:
    book = book_of("ghost", "a", "other ghost")
    assert len(book.views(0.0)) == 3  # nothing is known yet
    book.workers["a"].take_report(report(), 0.0)
    assert [view.pod for view in book.views(0.0)] == ["a"]
    # Better a pod that may not exist than one that has just failed.
    book.workers["a"].leg_failed(0.0)
    assert [view.pod for view in book.views(0.1)] == ["ghost", "other ghost"]


ROUTING_FILE = {
    "table": {"model": "m"},
    "endpoints": [{"pod": "a", "pool": "decode"}, {"pod": "b", "pool": "decode"}],
}
BAD_FILES = {
    "a pod twice": {"endpoints": [{"pod": "a", "pool": "decode"}, {"pod": "a", "pool": "prefill"}]},
    "no classes": {"table": {"model": "m", "classes": []}},
    "no table": {"table": None},
    "a port beyond": {"endpoints": [{"pod": "a", "pool": "decode", "port": 70000}]},
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_routing_file_that_cannot_be_served_is_refused_whole(case: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(ROUTING_FILE))
    assert len(read_routing_file(path).addresses) == 2
    path.write_text(json.dumps(ROUTING_FILE | BAD_FILES[case]))
    with pytest.raises(ValidationError):
        read_routing_file(path)


async def test_what_is_wrong_with_a_routing_file_is_said_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_watch, "CHECK_S", 0.001)
    path = tmp_path / "routing.json"
    published = asyncio.Event()
    watch = asyncio.create_task(FileWatch(path).run(lambda _: published.set()))
    try:
        await asyncio.sleep(0.05)
        assert len(caplog.records) == 1  # there is no such file
        path.write_text("{")
        await asyncio.sleep(0.05)
        assert len(caplog.records) == 2
        path.write_text(json.dumps(ROUTING_FILE))
        await asyncio.wait_for(published.wait(), 5)
        path.unlink()
        await asyncio.sleep(0.05)
        assert len(caplog.records) == 3
    finally:
        watch.cancel()
