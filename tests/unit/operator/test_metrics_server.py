"""The operator's metrics and targets over HTTP."""

import socket

import aiohttp

from phasesplit.operator.metrics_server import serve_metrics


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
