"""The trace that a router keeps is what the operator reads: by cursor, bounded, without text."""

import json
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from phasesplit.api import names
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.traces import MAX_ROWS, TraceBatch, TraceOutcome
from phasesplit.cluster import router_client
from phasesplit.cluster.router_client import RouterClient, TraceCursor
from phasesplit_router.records import Record
from phasesplit_router.router import Router
from phasesplit_router.server import RouterServer
from phasesplit_router.settings import RouterSettings
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
