"""A router and workers as processes of this machine, paced like devices, for benchmarks.

One set of workers serves both modes: only the routing table differs.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers_ports import free_port
from helpers_router import RouterProcess
from helpers_worker_processes import ADMIN_TOKEN, MODEL, TRANSFER_KEY, WorkerProcess
from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode
from phasesplit_bench.client import Target

ROOT = Path(__file__).resolve().parents[1]
KV_CACHE_BYTES = 64 << 20
DISTURBED = 0.1  # a run whose processes waited more than this says little of what devices would do


class Site:
    """Running workers and their router."""

    def __init__(self, workers: Sequence[WorkerProcess], router: RouterProcess) -> None:
        self.workers = list(workers)
        self.router = router
        self._version = 0

    @property
    def target(self) -> Target:
        """Where to send requests."""
        return Target(url=self.router.url, model=MODEL, timeout_s=300)

    async def serve(self, prefill: int | None, classes: tuple[LatencyClass, ...]) -> None:
        """From now on `prefill` workers read prompts and the others decode; None: all do both."""
        self._version += 1
        split = prefill is not None
        roles = {
            worker.name: (Role.PREFILL if index < (prefill or 0) else Role.DECODE)
            if split
            else Role.COLOCATED
            for index, worker in enumerate(self.workers)
        }
        table = RoutingTable(
            version=self._version,
            namespace="ns",
            name="obj",
            model=MODEL,
            mode=ServedMode.SPLIT if split else ServedMode.COLOCATED,
            roles=roles,
            classes=classes,
        )
        self.router.route(table, [endpoint_of(worker) for worker in self.workers])
        if self.router.process is None:
            await self.router.start()
        await self.router.wait_pods({worker.name for worker in self.workers}, 120)
        await self.router.wait_version(self._version)

    async def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until nothing is in flight."""
        await self.router.wait_idle(timeout_s)

    async def profiles(self) -> list[StepProfile]:
        """What each worker says a step takes, in the order of the workers."""
        found = {item.pod: item.profile for item in (await self.router.report()).workers}
        return [profile for worker in self.workers if (profile := found[worker.name]) is not None]

    async def link_bytes_per_s(self) -> float:
        """Bandwidth as the transfers themselves measured it; infinite while there were none."""
        samples = [item.bytes_per_s for item in (await self.router.report()).links if item.busy_s > 0]
        return sorted(samples)[len(samples) // 2] if samples else float("inf")

    async def kv_bytes_per_token(self) -> float:
        """Of the model that is served."""
        models = [item.model for item in (await self.router.report()).workers if item.model]
        return float(models[0].kv_layout.bytes_per_token)

    def waited_s(self) -> float:
        """Seconds that threads of workers and router have waited for a processor, where Linux counts them."""
        pids = [worker.process.pid for worker in self.workers]
        if self.router.process is not None:
            pids.append(self.router.process.pid)
        total_ns = 0
        for pid in pids:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # the thread has just ended
                    total_ns += int(path.read_text().split()[1])
        return total_ns / 1e9

    def cpu_s(self) -> float:
        """CPU seconds that workers and router have used."""
        spent = [psutil.Process(worker.process.pid).cpu_times() for worker in self.workers]
        return self.router.cpu_s() + sum(times.user + times.system for times in spent)


def endpoint_of(worker: WorkerProcess) -> dict[str, object]:
    """A worker as the routing file names it."""
    return {
        "pod": worker.name,
        "node": f"node-of-{worker.name}",
        "pool": worker.name.split("-")[1],
        "host": "127.0.0.1",
        "port": worker.port,
        "transfer_port": worker.transfer_port,
    }


@dataclass(frozen=True, slots=True)
class Effort:
    """What a run cost the machine, and what the machine's other work cost the run."""

    cpu_share: float  # of all cores, used by workers and router
    machine_share: float  # of all cores, used by anything
    waited_share: float  # of the time, in which the average process waited for a processor

    def __str__(self) -> str:
        disturbed = " (DISTURBED)" if self.waited_share > DISTURBED else ""
        return (
            f"workers and router used {self.cpu_share:.0%} of the cores, the machine "
            f"{self.machine_share:.0%}; each waited for a processor {self.waited_share:.0%} of the time"
            f"{disturbed}"
        )


class EffortMeter:
    """Counts from its making on."""

    def __init__(self, site: Site) -> None:
        self._site = site
        psutil.cpu_percent()
        self._cpu_s, self._waited_s, self._started_s = site.cpu_s(), site.waited_s(), time.monotonic()

    def read(self) -> Effort:
        """Since the beginning."""
        site, seconds = self._site, time.monotonic() - self._started_s
        return Effort(
            cpu_share=(site.cpu_s() - self._cpu_s) / seconds / (psutil.cpu_count() or 1),
            machine_share=psutil.cpu_percent() / 100,
            waited_share=(site.waited_s() - self._waited_s) / seconds / (len(site.workers) + 1),
        )


@asynccontextmanager
async def running_site(count: int, *, pace: StepProfile | None, model: Path) -> AsyncIterator[Site]:
    """A site of `count` workers; they end with the block."""
    router = RouterProcess(admin_token=ADMIN_TOKEN, model=MODEL)
    workers: list[WorkerProcess] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phasesplit-truth-")))
        (folder / "admin-token").write_text(ADMIN_TOKEN)
        (folder / "transfer-key").write_text(TRANSFER_KEY)
        if pace is not None:
            (folder / "pace.json").write_text(pace.model_dump_json())
        stack.push_async_callback(router.stop)
        stack.callback(lambda: [end(worker) for worker in workers])
        for index in range(count):
            pool = "prefill" if index < count // 2 else "decode"
            workers.append(start_worker(folder, f"obj-{pool}-{index}", model, pace))
        for worker in workers:
            await asyncio.to_thread(worker.wait_ready)
        yield Site(workers, router)


def start_worker(folder: Path, name: str, model: Path, pace: StepProfile | None) -> WorkerProcess:
    """One worker process, not yet ready."""
    port, transfer_port = free_port(), free_port()
    log = folder / f"{name}.log"
    command = [
        sys.executable, "-m", "phasesplit_worker", "--model-path", str(model), "--model-name", MODEL,
        "--object", "tests", "--namespace", "default", "--pool", name.split("-")[1], "--host", "127.0.0.1",
        "--port", str(port), "--transfer-port", str(transfer_port),
        "--admin-token-file", str(folder / "admin-token"),
        "--transfer-key-file", str(folder / "transfer-key"),
        "--kv-cache-bytes", str(KV_CACHE_BYTES), *(("--pace", str(folder / "pace.json")) if pace else ()),
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
    return WorkerProcess(name, process, port, transfer_port, log)


def end(worker: WorkerProcess) -> None:
    """End a worker, whatever state it is in."""
    if worker.process.poll() is None:
        worker.kill()
