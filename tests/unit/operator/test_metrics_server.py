"""The operator's metrics and targets over HTTP."""

import aiohttp

from helpers_ports import free_port
from phasesplit.operator.metrics_server import serve_metrics


async def test_serves_metrics_and_targets() -> None:
    port, groups = free_port(), [{"targets": ["10.0.0.1:8000"], "labels": {"pod": "a"}}]
    async with (
        serve_metrics(port, lambda: groups),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        async with session.get("/targets") as answer:
            assert answer.content_type == "application/json"
            assert await answer.json() == groups
        async with session.get("/metrics") as answer:
            assert "process_resident_memory_bytes" in await answer.text()


async def test_port_0_serves_nothing() -> None:
    async with serve_metrics(0, list):
        pass
