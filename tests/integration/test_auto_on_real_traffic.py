"""From a router's ring to the decision: read by cursor, replayed in a process, decided on, shown."""

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from helpers_operator import make_model, make_pod
from helpers_tick import BusyObject
from helpers_traces import random_trace
from phasesplit.api.routing import LatencyClass
from phasesplit.cluster import router_client
from phasesplit.cluster.router_client import RouterClient
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.replays import ReplayRunner
from phasesplit.operator.traffic_reader import TrafficReader
from phasesplit_router.records import Record
from phasesplit_router.router import Router
from phasesplit_router.server import RouterServer
from phasesplit_router.settings import RouterSettings

pytestmark = pytest.mark.integration

TARGETS = LatencyClass(name="default", ttft_s=8.0, tpot_s=0.04)


def fill_ring(router: Router, rate_per_s: float) -> int:
    """Requests of the last minutes."""
    trace = random_trace(5, rate_per_s, 300, 4000, 200)
    started_s = time.monotonic() - trace[-1].at_s - 20
    router.trace_ring = type(router.trace_ring)(started_s)
    for number, arrival in enumerate(trace):
        record = Record(f"r{number}", TARGETS, started_s + arrival.at_s, prompt_tokens=arrival.prompt_tokens)
        record.num_tokens, record.finish_reason = arrival.output_tokens, "stop"
        record.first_sent_s, record.last_sent_s = record.arrival_s + 1, record.arrival_s + 9
        router.trace_ring.add(record)
    return len(trace)


async def test_the_decision_rests_on_what_the_router_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(RouterSettings(object_name="chat", namespace="ns", admin_token="t"))
    count = fill_ring(router, 2.6)
    runner = web.AppRunner(RouterServer(router).app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(router_client.names, "ROUTER_API_PORT", runner.addresses[0][1])
    busy = BusyObject(8)
    pods = (make_pod("router", ready=True, podIP="127.0.0.1"),)
    snapshot = Snapshot(make_model(), {}, pods, ())
    clock = lambda: busy.now_s  # noqa: E731
    replays = ReplayRunner(lambda _: None, deadline_s=100)
    try:
        given = busy.tick().mode_input
        async with aiohttp.ClientSession() as session:
            client = RouterClient(session)
            (answer,) = await client.read_all({"router": "127.0.0.1"}, "t")
            assert answer.report is not None
            live = answer.report.model_copy(update={"in_flight": 5})
            busy.memory.answers = (router_client.RouterAnswer("router", live),)
            reader = TrafficReader(client, clock)
            await reader.read(snapshot, busy.memory, "t")
            await reader.read(snapshot, busy.memory, "t")  # too soon: nothing is asked
        assert len(busy.memory.traffic) == count
        replays.consider(("ns", "chat"), busy.memory, given)
        async with asyncio.timeout(100):
            while replays.is_busy:  # noqa: ASYNC110  it happens in another process
                await asyncio.sleep(0.05)
        assert busy.memory.replay_error == ""
        decisions = busy.tick()
        assert decisions.mode.replay is not None
        assert decisions.mode.replay.outcome.requests > count / 2
        assert "replayed" in decisions.mode.beneficial_message
    finally:
        await replays.close()
        await runner.cleanup()
        await router.close()
