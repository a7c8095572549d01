"""A real router process in front of scripted workers, and a client that reads its streams."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from helpers_fake_worker import ADMIN_TOKEN, MODEL, FakeCluster, FakeWorker
from helpers_ports import free_port
from phasesplit.api.names import Pool
from phasesplit.api.reports import KVTrace, RouterReport
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0  # imports on a busy machine
CLASSES = (
    LatencyClass(name="interactive", priority=100, ttft_s=2.0, tpot_s=0.2),
    LatencyClass(name="batch", priority=0, ttft_s=60.0, tpot_s=2.0),
)


def split_table(version: int = 1, **changes: Any) -> RoutingTable:
    """A split table with prefill pods in the prefill role and decode pods in the decode role."""
    fields: dict[str, Any] = {
        "version": version,
        "namespace": "ns",
        "name": "obj",
        "model": MODEL,
        "mode": ServedMode.SPLIT,
        "default_roles": {"prefill": "prefill", "decode": "decode"},
        "classes": CLASSES,
    }
    return RoutingTable(**(fields | changes))


def colocated_table(version: int = 1, **changes: Any) -> RoutingTable:
    """A table under which every worker does everything."""
    roles = {"prefill": "colocated", "decode": "colocated"}
    return split_table(version, **({"mode": ServedMode.COLOCATED, "default_roles": roles} | changes))


async def wait_until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30) -> None:
    """Ask again and again until something holds."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110  it happens in another process
            await asyncio.sleep(0.03)


@dataclass
class Streamed:
    """A stream as the client saw it."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    roles: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False
    error: dict[str, Any] | None = None


class RouterProcess:
    """`phasesplit-router` as a child process, with a routing file or a kubeconfig."""

    def __init__(
        self,
        *flags: str,
        kubeconfig: Path | None = None,
        admin_token: str = ADMIN_TOKEN,
        model: str = MODEL,
    ) -> None:
        self._flags = flags
        self._admin = {"Authorization": f"Bearer {admin_token}"}
        self._admin_token = admin_token
        self.model = model
        self._kubeconfig = kubeconfig
        self._folder = tempfile.TemporaryDirectory(prefix="phasesplit-router-")
        self.folder = Path(self._folder.name)
        self.routing_file = self.folder / "routing.json"
        self.log_file = self.folder / "log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """A client session for tests."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def route(self, table: RoutingTable, workers: Iterable[FakeWorker | dict[str, Any]]) -> None:
        """Write the routing file, all at once."""
        endpoints = [worker if isinstance(worker, dict) else worker.endpoint() for worker in workers]
        text = json.dumps({"table": table.model_dump(mode="json"), "endpoints": endpoints})
        temporary = self.routing_file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.routing_file)

    async def start(self) -> "RouterProcess":
        """Start and wait until it is ready."""
        token = self.folder / "token"
        token.write_text(self._admin_token + "\n")
        path = os.pathsep.join(str(ROOT / folder) for folder in ("worker", "operator"))
        with self.log_file.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "phasesplit_router",
                *("--object", "obj", "--namespace", "ns", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--admin-token-file", str(token)),
                *(() if self._kubeconfig else ("--routing-file", str(self.routing_file))),
                *self._flags,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "KUBECONFIG": str(self._kubeconfig or "")},
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    async with self.session.get(self.url + "/ready") as response:
                        if response.status == 200:
                            return self
                except aiohttp.ClientError:
                    pass
                assert self.process.returncode is None, self.log()
                await asyncio.sleep(0.05)

    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text(errors="replace")

    def rss_bytes(self) -> int:
        """Its resident memory."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def terminate(self) -> None:
        """SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    async def stop(self) -> None:
        """End it, whatever state it is in."""
        if self._session is not None:
            await self._session.close()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self._folder.cleanup()

    # Client

    async def report(self) -> RouterReport:
        """The status endpoint."""
        async with self.session.get(self.url + "/v1/phasesplit/status", headers=self._admin) as response:
            assert response.status == 200, await response.text()
            return RouterReport.model_validate_json(await response.read())

    async def trace(self, request_id: str) -> KVTrace:
        """One request's trace."""
        async with self.session.get(f"{self.url}/v1/kv/{request_id}", headers=self._admin) as response:
            assert response.status == 200, await response.text()
            return KVTrace.model_validate_json(await response.read())

    async def wait_polled(self, workers: Iterable[FakeWorker], timeout_s: float = 30) -> None:
        """Until the router knows each of these workers."""
        await self.wait_pods({worker.pod for worker in workers}, timeout_s)

    async def wait_pods(self, pods: set[str], timeout_s: float = 30) -> None:
        """Until the router knows each of these pods."""

        async def known() -> bool:
            return pods <= {item.pod for item in (await self.report()).workers}

        await wait_until(known, timeout_s)

    async def wait_version(self, version: int, timeout_s: float = 30) -> None:
        """Until the router serves by a table of this version."""

        async def served() -> bool:
            return (await self.report()).table_version >= version

        await wait_until(served, timeout_s)

    async def wait_idle(self, timeout_s: float = 30) -> None:
        """Until nothing is in flight."""

        async def idle() -> bool:
            return not (await self.report()).in_flight

        await wait_until(idle, timeout_s)

    def chat_body(self, prompt: str, **changes: Any) -> dict[str, Any]:
        """A chat request."""
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}]} | changes

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """A request with a whole answer."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=names) as response:
            return response.status, json.loads(await response.read()), dict(response.headers)

    async def stream(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", timeout_s: float = 90, **headers: str
    ) -> Streamed:
        """A request with a streamed answer, read to its end."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            asyncio.timeout(timeout_s),
            self.session.post(self.url + path, json={**body, "stream": True}, headers=names) as response,
        ):
            seen = Streamed(response.status, dict(response.headers))
            if response.status != 200:
                seen.error = (await response.json())["error"]
                return seen
            async for line in response.content:
                if line.startswith(b"data: "):
                    take_event(seen, line[6:].strip())
            return seen


def take_event(seen: Streamed, data: bytes) -> None:
    """Take one event of a stream in, checking what must hold for every stream."""
    assert not seen.done, "an event after [DONE]"
    if data == b"[DONE]":
        seen.done = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = event["error"]
        return
    assert "token_ids" not in json.dumps(event)
    assert not event["object"].startswith("phasesplit.")
    seen.chunks.append(event)
    if event.get("usage"):
        seen.usage = event["usage"]
    for choice in event["choices"]:
        delta = choice.get("delta", {})
        seen.roles += "role" in delta
        seen.text += (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        if choice.get("finish_reason"):
            seen.finish_reasons.append(choice["finish_reason"])


@dataclass
class Site:
    """A router and its workers."""

    router: RouterProcess
    cluster: FakeCluster
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]

    @property
    def workers(self) -> list[FakeWorker]:
        """All of them."""
        return [*self.prefills, *self.decodes]

    def legs(self) -> int:
        """Legs started so far, on all workers."""
        return sum(len(worker.legs) for worker in self.workers)

    def running(self) -> int:
        """Legs running now, on all workers."""
        return sum(len(worker.running) for worker in self.workers)

    async def ask_until(
        self, holds: Callable[[], bool], body: dict[str, Any], *, at_most: int = 200
    ) -> list[Streamed]:
        """Ask again and again until something holds: which of equal workers gets a request is a draw."""
        seen: list[Streamed] = []
        while not holds():
            assert len(seen) < at_most, f"not after {at_most} requests"
            seen.append(await self.router.stream(body))
        return seen

    async def wait_freed(self, worker: FakeWorker) -> None:
        """Until nothing runs and this worker was told to drop something."""
        while self.running() or not worker.cancelled:  # noqa: ASYNC110  measured in milliseconds
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_site(
    prefills: int = 1, decodes: int = 1, table: RoutingTable | None = None, flags: tuple[str, ...] = ()
) -> AsyncIterator[Site]:
    """A router process in front of scripted workers, all of them polled."""
    cluster = FakeCluster()
    site = Site(
        RouterProcess(*flags),
        cluster,
        [
            await FakeWorker(cluster, f"obj-prefill-{index}", Pool.PREFILL, node="left").start()
            for index in range(prefills)
        ],
        [
            await FakeWorker(cluster, f"obj-decode-{index}", Pool.DECODE, node="right").start()
            for index in range(decodes)
        ],
    )
    try:
        site.router.route(table or split_table(), site.workers)
        await site.router.start()
        await site.router.wait_polled(site.workers)
        yield site
        crash = "unexpected error" in site.router.log() or "Traceback" in site.router.log()
        assert not crash, site.router.log()
    finally:
        await site.router.stop()
        for worker in site.workers:
            await worker.stop()
