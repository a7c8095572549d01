"""Real worker processes for tests, and what a router does with them: two legs, cancel, reports.

Each worker is `python -m phasesplit_worker` on free ports of this machine, its log in a file.
"""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from helpers_ports import free_port
from phasesplit.api.legs import LegReport, PrefillAccepted
from phasesplit.api.reports import WorkerReport

ROOT = Path(__file__).resolve().parents[1]
ADMIN_TOKEN = "admin-token-of-the-tests"
TRANSFER_KEY = "a transfer key of the tests, long enough"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
MODEL = "tiny"
START_TIMEOUT_S = 400.0  # importing torch on a busy machine
Json = dict[str, Any]


@dataclass
class WorkerProcess:
    """A running worker."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    transfer_port: int
    log: Path

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> "WorkerProcess":
        """Wait until it serves; fail with its log."""
        deadline = time.monotonic() + timeout_s
        while self.state() not in ("ready", "failed"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start:\n{self.log.read_text()}")
            time.sleep(0.1)
        return self

    def state(self) -> str | None:
        """What `/ready` says, None while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            return str(json.loads(connection.getresponse().read())["state"])
        except OSError:
            return None
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL, as when a node dies."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and wait for the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


class Workers:
    """Starts workers and ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[WorkerProcess] = []
        (folder / "admin-token").write_text(ADMIN_TOKEN)
        (folder / "transfer-key").write_text(TRANSFER_KEY)
        (folder / "wrong-key").write_text("another transfer key, also long enough")

    @property
    def folder(self) -> Path:
        """Where keys and logs are."""
        return self._folder

    def start(
        self, model: Path, name: str, pool: str, *flags: str, key: str = "transfer-key"
    ) -> WorkerProcess:
        """Start a worker without waiting for it. Later flags override earlier ones."""
        port, transfer_port = free_port(), free_port()
        log = self._folder / f"{name}-{port}.log"
        command = [
            sys.executable, "-m", "phasesplit_worker", "--model-path", str(model), "--model-name", MODEL,
            "--object", "tests", "--namespace", "default", "--pool", pool, "--host", "127.0.0.1",
            "--port", str(port), "--transfer-port", str(transfer_port),
            "--admin-token-file", str(self._folder / "admin-token"),
            "--transfer-key-file", str(self._folder / key),
            "--kv-cache-bytes", str(64 << 20), *flags,
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'worker'}",
            "OMP_NUM_THREADS": "1",
            "POD_NAME": name,
            "NODE_NAME": f"node-of-{name}",
            "POD_IP": "127.0.0.1",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        worker = WorkerProcess(name, process, port, transfer_port, log)
        self._running.append(worker)
        return worker

    def stop(self) -> None:
        """End what still runs."""
        for worker in self._running:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait(10)


@contextlib.contextmanager
def running_workers(folder: Path) -> Iterator[Workers]:
    """Workers that end with the block."""
    workers = Workers(folder)
    try:
        yield workers
    finally:
        workers.stop()


@dataclass
class Answer:
    """What came out of one or two legs."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Json | None = None
    accepted: PrefillAccepted | None = None
    reports: list[LegReport] = field(default_factory=list)
    is_done: bool = False
    error: Json | None = None
    # Text so far after each token, for replay: `texts[n]` belongs to the first n tokens.
    texts: list[str] = field(default_factory=lambda: [""])

    def take(self, event: Json | str) -> None:
        """Add one event of a stream."""
        if event == "[DONE]":
            self.is_done = True
        elif isinstance(event, str):
            raise AssertionError(event)
        elif event.get("object") == "phasesplit.prefill":
            self.accepted = PrefillAccepted.model_validate(event)
        elif event.get("object") == "phasesplit.leg":
            self.reports.append(LegReport.model_validate(event))
        elif "error" in event:
            self.error = event["error"]
        else:
            self._take_chunk(event)

    def _take_chunk(self, chunk: Json) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.text += text
            self.tokens += choice["token_ids"]
            self.texts += [self.text] * len(choice["token_ids"])
            self.finish_reason = choice["finish_reason"] or self.finish_reason


async def stream_events(
    session: aiohttp.ClientSession, url: str, body: Json, request_id: str | None = None
) -> AsyncIterator[Json | str]:
    """Events of one leg, as the router reads them."""
    headers = ADMIN | ({"x-request-id": request_id} if request_id else {})
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with session.post(url + path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                yield data if data == "[DONE]" else json.loads(data)


async def run_local(session: aiohttp.ClientSession, worker: WorkerProcess, body: Json) -> Answer:
    """A local leg."""
    answer = Answer()
    async for event in stream_events(session, worker.url, body):
        answer.take(event)
    return answer


async def run_two_legs(
    session: aiohttp.ClientSession,
    prefill: WorkerProcess,
    decode: WorkerProcess,
    body: Json,
    *,
    request_id: str | None = None,
    changed_params: Json | None = None,
) -> Answer:
    """Both legs, leg 2 sent right after leg 1's first event. A lost leg 1 is not an error here."""
    first, second = Answer(), Answer()
    accepted: asyncio.Future[Json] = asyncio.get_running_loop().create_future()

    async def leg_1() -> None:
        request = body | {"kv_transfer_params": {"do_remote_decode": True}}
        with contextlib.suppress(aiohttp.ClientError):
            async for event in stream_events(session, prefill.url, request, request_id):
                first.take(event)
                if first.accepted is not None and not accepted.done():
                    accepted.set_result(event["kv_transfer_params"])

    async def leg_2() -> None:
        params = (await accepted) | (changed_params or {})
        request = body | {"kv_transfer_params": params}
        async for event in stream_events(session, decode.url, request, request_id):
            second.take(event)

    tasks = [asyncio.create_task(leg_1()), asyncio.create_task(leg_2())]
    await tasks[0]
    if first.finish_reason is not None or first.accepted is None:
        tasks[1].cancel()  # the first token was the whole answer, or there never was a leg 1
        await asyncio.wait(tasks)
        return first
    await tasks[1]
    return Answer(
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        finish_reason=second.finish_reason,
        usage=second.usage,
        accepted=first.accepted,
        reports=first.reports + second.reports,
        is_done=second.is_done,
        error=second.error,
    )


async def read_report(session: aiohttp.ClientSession, worker: WorkerProcess) -> WorkerReport:
    """`GET /admin/state`."""
    async with session.get(worker.url + "/admin/state", headers=ADMIN) as response:
        return WorkerReport.model_validate(await response.json())


async def wait_for_free_blocks(
    session: aiohttp.ClientSession, *workers: WorkerProcess, timeout_s: float = 10.0
) -> None:
    """Wait until no KV block is in use and nothing runs."""
    async with asyncio.timeout(timeout_s):
        for worker in workers:
            while True:
                report = await read_report(session, worker)
                if not (report.kv_used_blocks or report.num_running or report.num_waiting):
                    break
                await asyncio.sleep(0.05)
