"""The trace that a router keeps is what the operator reads: by cursor, bounded, without text."""

import asyncio
import json
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from helpers_operator import make_model, make_pod
from phasesplit.api import names
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode
from phasesplit.api.traces import MAX_OPEN, MAX_ROWS, TraceBatch, TraceOutcome
from phasesplit.cluster import router_client
from phasesplit.cluster import snapshot as cluster_snapshot
from phasesplit.cluster.router_client import RouterClient, TraceCursor
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.traffic import READ_EVERY_S
from phasesplit.operator.traffic_reader import TrafficReader
from phasesplit_router import flow
from phasesplit_router.records import Record
from phasesplit_router.router import Router
from phasesplit_router.server import RouterServer
from phasesplit_router.settings import RouterSettings
from phasesplit_router.snapshot import Snapshot
from phasesplit_router.trace_ring import TraceRing

CLASSES = tuple(LatencyClass(name=name, ttft_s=2.0, tpot_s=0.1) for name in ("default", "batch"))
_numbers = count()


def ended(arrival_s: float = 100.0, **fields: object) -> Record:
    """A finished request of 50 prompt tokens and 11 answer tokens within its targets."""
    number = next(_numbers)
    made = Record(f"id-{number}", CLASSES[number % 2], arrival_s, prompt_tokens=50, cached_tokens=16)
    made.num_tokens, made.finish_reason, made.mode = 11, "stop", ServedMode.SPLIT
    made.first_sent_s, made.last_sent_s, made.text = arrival_s + 0.5, arrival_s + 1.0, "a secret"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_rows_are_read_once_each_by_cursor() -> None:
    ring = TraceRing(90.0)
    for index in range(MAX_ROWS + 5):
        ring.add(ended(100.0 + index))
    first = ring.after("", 0, 2000.0)
    assert (len(first.arrival_s), first.next, first.total, first.lost) == (
        MAX_ROWS,
        MAX_ROWS,
        MAX_ROWS + 5,
        0,
    )
    second = ring.after(first.epoch, first.next, 2000.0)
    assert second.arrival_s == tuple(10.0 + MAX_ROWS + index for index in range(5))
    assert ring.after(first.epoch, second.next, 2000.0).arrival_s == ()


def test_a_slow_reader_is_told_what_it_lost_and_a_new_router_starts_anew() -> None:
    ring = TraceRing(0.0, capacity=10)
    cursor = ring.after("", 0, 0.0)
    for index in range(25):
        ring.add(ended(float(index)))
    late = ring.after(cursor.epoch, cursor.next, 30.0)
    assert (late.lost, late.arrival_s[0], late.next) == (15, 15.0, 25)
    assert ring.after("another process", 9_000, 30.0).arrival_s[0] == 15.0


def test_bytes_are_bounded_and_no_text_is_told() -> None:
    ring = TraceRing(0.0)
    for index in range(MAX_ROWS):
        ring.add(ended(1e6 + index))
    text = ring.after("", 0, 2e6).model_dump_json()
    assert len(text) < 100 * MAX_ROWS
    assert "secret" not in text
    assert "id-" not in text


def test_outcomes_and_expected_lengths_of_what_did_not_finish() -> None:
    ring = TraceRing(0.0)
    expected = {"expected_prompt_tokens": 70, "expected_output_tokens": 30}
    refused = {"prompt_tokens": 0, "num_tokens": 0, "finish_reason": None, "rejected": "prefill_queue"}
    ring.add(ended(**expected))
    ring.add(ended(**expected, **refused))
    ring.add(ended(**expected, failed=True))
    ring.add(ended(**expected, abandoned=True, num_tokens=40))
    ring.add(ended(invalid=True))
    rows = ring.after("", 0, 200.0)
    assert rows.outcome == (
        TraceOutcome.FINISHED,
        TraceOutcome.REJECTED,
        TraceOutcome.FAILED,
        TraceOutcome.ABANDONED,
    )
    assert rows.prompt_tokens == (50, 70, 50, 50)
    assert rows.output_tokens == (11, 30, 30, 40)
    assert rows.attained == (True, False, False, False)
    assert (rows.split[0], rows.ttft_s[0], rows.e2e_s[0]) == (True, 0.5, 1.0)


def test_a_batch_whose_columns_disagree_is_refused() -> None:
    known = {"epoch": "e", "now_s": 1, "next": 1, "total": 1, "classes": ["default"]}
    with pytest.raises(ValueError, match="all must be as long"):
        TraceBatch.model_validate({**known, "arrival_s": [0.5]})
    with pytest.raises(ValueError, match="all must be as long as open_arrival_s"):
        TraceBatch.model_validate({**known, "open_total": 1, "open_arrival_s": [0.5]})
    with pytest.raises(ValueError, match="open_total is None"):
        TraceBatch.model_validate(
            {
                **known,
                "open_arrival_s": [0.5],
                "open_class_index": [0],
                "open_prompt_tokens": [1],
                "open_cached_tokens": [None],
                "open_output_tokens": [0],
            }
        )


def arrived(number: int, **fields: object) -> Record:
    """A request that has come."""
    made = Record(f"open-{number}", CLASSES[number % 2], 100.0 + number, expected_prompt_tokens=70)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_what_has_not_ended_is_told_with_every_answer() -> None:
    ring = TraceRing(90.0)
    waiting, answered = arrived(0), arrived(1, prompt_tokens=64, cached_tokens=16, num_tokens=5)
    for record in (waiting, answered):
        ring.begin(record)
    ring.add(ended(100.5))
    for _ in range(2):
        found = ring.after("", 0, 105.0)
        names = [found.classes[index] for index in found.open_class_index]
        assert (found.open_total, found.open_arrival_s, names) == (2, (10.0, 11.0), ["default", "batch"])
        assert found.open_prompt_tokens == (70, 64)
        assert found.open_cached_tokens == (None, 16)
        assert found.open_output_tokens == (0, 5)
    ring.add(waiting)
    found = ring.after(found.epoch, found.next, 105.0)
    assert (found.open_total, found.open_arrival_s, len(found.arrival_s)) == (1, (11.0,), 1)
    answered.invalid = True
    ring.add(answered)
    assert ring.after("", 0, 105.0).open_total == 0


def test_of_very_many_in_flight_the_newest_are_told() -> None:
    ring = TraceRing(0.0)
    for number in range(MAX_OPEN + 10):
        ring.begin(arrived(number))
    found = ring.after("", 0, 1e5)
    assert (found.open_total, len(found.open_arrival_s)) == (MAX_OPEN + 10, MAX_OPEN)
    assert (found.open_arrival_s[0], found.open_arrival_s[-1]) == (110.0, 100.0 + MAX_OPEN + 9)


def test_an_answer_of_an_older_router_is_read() -> None:
    ring = TraceRing(0.0)
    ring.add(ended())
    ring.begin(arrived(0))
    answer = json.loads(ring.after("", 0, 200.0).model_dump_json())
    older = {name: value for name, value in answer.items() if not name.startswith("open_")}
    found = TraceBatch.model_validate(older)
    assert (found.open_total, found.open_arrival_s, len(found.arrival_s)) == (None, (), 1)


async def test_a_rising_load_is_seen_before_any_of_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is there, so every request waits in the router's queue and fails in the end."""
    monkeypatch.setattr(flow, "NEW_PATIENCE_S", 4.0)  # longer than the looks take on a busy machine
    router = Router(RouterSettings(object_name="chat", namespace="ns", admin_token="t"))
    router.take_snapshot(Snapshot(table=RoutingTable(model="m", classes=CLASSES)))
    runner = web.AppRunner(RouterServer(router).app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    monkeypatch.setattr(router_client.names, "ROUTER_API_PORT", port)
    pods = cluster_snapshot.Snapshot(make_model(), {}, (make_pod("r", ready=True, podIP="127.0.0.1"),), ())
    memory, now = ObjectMemory("uid"), [1000.0]
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        async with aiohttp.ClientSession() as session:
            client = RouterClient(session)
            reader = TrafficReader(client, lambda: now[0])

            async def ask() -> int:
                async with session.post(url, json={"model": "m", "prompt": "x" * 400}) as response:
                    return response.status

            async def seen() -> int:
                now[0] += READ_EVERY_S
                memory.answers = tuple(await client.read_all({"r": "127.0.0.1"}, "t"))
                await reader.read(pods, memory, "t")
                return len(memory.traffic.arrivals(CLASSES, now[0]))

            assert await seen() == 0
            tasks: list[asyncio.Task[int]] = []
            for wave in (5, 20):
                tasks += [asyncio.create_task(ask()) for _ in range(wave)]
                async with asyncio.timeout(5):
                    while router.in_flight < len(tasks):  # noqa: ASYNC110  requests come over a socket
                        await asyncio.sleep(0.005)
                assert await seen() == len(tasks)
            assert router.trace_ring.total == 0
            assert memory.traffic.arrivals(CLASSES, now[0])[-1].prompt_tokens > 50
            assert set(await asyncio.gather(*tasks)) == {503}
            assert await seen() == len(tasks)  # ended now, and each still counts once
            assert router.trace_ring.total == len(tasks)
    finally:
        await runner.cleanup()
        await router.close()


async def test_operator_reads_what_the_router_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(RouterSettings(object_name="chat", namespace="ns", admin_token="t"))
    for _ in range(3):
        router.trace_ring.add(ended())
    runner = web.AppRunner(RouterServer(router).app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setattr(router_client.names, "ROUTER_API_PORT", port)
    try:
        async with aiohttp.ClientSession() as session:
            client = RouterClient(session)
            batch = await client.read_trace("router-0", "127.0.0.1", "t", TraceCursor())
            assert batch is not None
            assert len(batch.arrival_s) == 3
            again = await client.read_trace(
                "router-0", "127.0.0.1", "t", TraceCursor(batch.epoch, batch.next)
            )
            assert again is not None
            assert again.arrival_s == ()
            assert await client.read_trace("router-0", "127.0.0.1", "wrong", TraceCursor()) is None
            (answer,) = await client.read_all({"router-0": "127.0.0.1"}, "t")
            assert answer.report is not None
            assert answer.report.traced_total == 3
            url = f"http://127.0.0.1:{port}{names.PATH_ROUTER_TRACE}?after=-1"
            async with session.get(url, headers={"Authorization": "Bearer t"}) as response:
                assert response.status == 400
                assert "no cursor" in json.dumps(await response.json())
    finally:
        await runner.cleanup()
        await router.close()
