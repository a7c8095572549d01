"""A worker over fake parts, served on a real socket."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import ClientSession, web

from helpers_worker_server import (
    ADMIN_TOKEN,
    CountingEngine,
    RecordingTransfer,
    config,
    make_parts,
    wait_until,
)
from phasesplit_worker.server.app import build_app, build_runner
from phasesplit_worker.server.auth import AdminAuth
from phasesplit_worker.server.worker import Worker


@dataclass
class Served:
    """A running worker and a client."""

    worker: Worker
    engine: CountingEngine
    transfer: RecordingTransfer
    url: str
    session: ClientSession

    @property
    def admin(self) -> dict[str, str]:
        """Headers of a router or operator."""
        return {"Authorization": f"Bearer {ADMIN_TOKEN}"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    parts = make_parts()
    worker = Worker(config(), AdminAuth(ADMIN_TOKEN), "engine-1", lambda *_: parts)
    runner = build_runner(build_app(worker))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    worker.start()
    await wait_until(lambda: worker.state == "ready")
    port = site._server.sockets[0].getsockname()[1]
    async with ClientSession() as session:
        yield Served(worker, parts.engine, parts.transfer, f"http://127.0.0.1:{port}", session)
    await worker.stop()
    await runner.cleanup()
