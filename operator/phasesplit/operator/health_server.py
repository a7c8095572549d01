"""The liveness endpoint while this copy waits for the Lease or the CRD; afterwards kopf serves it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serve_waiting(port: int) -> AsyncIterator[None]:
    """Answer 200 on `/healthz` for as long as the context lasts."""
    if port == 0:
        yield
        return

    async def healthy(_: web.Request) -> web.Response:
        return web.json_response({"loop": "waiting"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthy)])
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port, reuse_port=True).start()  # noqa: S104 - kubelet probes the pod
        yield
    finally:
        await runner.cleanup()
