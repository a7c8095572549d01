"""The operator's own metrics, and what a Prometheus should scrape, for as long as this copy serves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from phasesplit.api import names

PATH_TARGETS = "/targets"


@asynccontextmanager
async def serve_metrics(port: int, targets: Callable[[], list[dict[str, Any]]]) -> AsyncIterator[None]:
    """Answer `/metrics` (memory and processor time of this process) and `/targets` (HTTP discovery)."""
    if port == 0:
        yield
        return

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def discovery(_: web.Request) -> web.Response:
        return web.json_response(targets())

    app = web.Application()
    app.add_routes([web.get(names.PATH_METRICS, metrics), web.get(PATH_TARGETS, discovery)])
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104 - Prometheus runs in another pod
        yield
    finally:
        await runner.cleanup()
