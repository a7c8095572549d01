"""Cost of the router: memory under load, CPU per request and per event, latency against direct.

`make bench-router`. Scripted workers run in a process of their own; direct and routed requests are
interleaved. The router runs with its Kubernetes watch, whose client is part of its memory.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from helpers_fake_worker import ADMIN_TOKEN, MODEL, FakeCluster, FakeWorker
from helpers_router import ROOT, RouterProcess, colocated_table, split_table, wait_until
from helpers_watch_api import WatchApi
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, RoutingTable

RSS_BAR_MIB = 100.0
CONCURRENCY = 32
SHORT, LONG = 8, 264
ROUNDS = 3
REQUESTS = 96
# Targets nothing can miss: the bench measures cost, not admission.
CLASSES = (LatencyClass(name="default", ttft_s=600, tpot_s=60),)
LEG_HEADERS = {
    "Authorization": f"Bearer {ADMIN_TOKEN}",
    "x-phasesplit-role": "colocated",
    "x-phasesplit-role-version": "0",
}
Result = dict[str, Any]


def result(
    name: str, value: float, unit: str, *, against: float | None = None, bar: float | None = None
) -> Result:
    """One entry of the last line; `bar` is an upper bound."""
    holds = None if bar is None else value <= bar
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "against": against,
        "bar": bar,
        "holds": holds,
    }


async def serve_workers() -> None:
    """The workers' process: prints their ports, then serves until its input ends."""
    cluster = FakeCluster()
    prefill = await FakeWorker(cluster, "obj-prefill-0", Pool.PREFILL, node="left").start()
    decode = await FakeWorker(cluster, "obj-decode-0", Pool.DECODE, node="right").start()
    print(json.dumps([prefill.endpoint(), decode.endpoint()]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def setting() -> AsyncIterator[tuple[RouterProcess, WatchApi, list[Any]]]:
    """Workers, a Kubernetes API and a router."""
    workers = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.router",
        "workers",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("tests", "operator", "worker")),
        },
    )
    assert workers.stdout is not None
    endpoints = json.loads(await workers.stdout.readline())
    api = await WatchApi().start()
    with tempfile.TemporaryDirectory() as folder:
        router = RouterProcess(kubeconfig=api.kubeconfig(Path(folder) / "kubeconfig"))
        try:
            api.put_table(split_table(classes=CLASSES))
            for endpoint in endpoints:
                api.put_endpoint(f"obj-{endpoint['pool']}", endpoint)
            await router.start()

            async def known() -> bool:
                return len((await router.report()).workers) == 2

            await wait_until(known)
            yield router, api, endpoints
        finally:
            await router.stop()
            await api.stop()
            workers.kill()
            await workers.wait()


async def one(session: aiohttp.ClientSession, url: str, tokens: int, *, direct: bool) -> tuple[float, float]:
    """A streamed request: seconds to the first and to the last byte of text."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "word " * 200}],
        "stream": True,
        "max_tokens": tokens,
    }
    if direct:
        body["phasesplit"] = {}
    headers = LEG_HEADERS | {"x-request-id": f"direct-{time.monotonic_ns()}"} if direct else {}
    begin_s = time.monotonic()
    async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        data = await response.content.readany()
        first_s = time.monotonic() - begin_s
        async for part in response.content.iter_any():
            data = data[-16:] + part
        assert data.endswith(b"data: [DONE]\n\n"), data
    return first_s, time.monotonic() - begin_s


async def many(session: aiohttp.ClientSession, url: str, tokens: int, count: int, *, direct: bool) -> None:
    """`count` requests, `CONCURRENCY` at once."""
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await one(session, url, tokens, direct=direct)

    await asyncio.gather(*(some() for _ in range(CONCURRENCY)))


async def cpu_costs(session: aiohttp.ClientSession, router: RouterProcess) -> tuple[float, float]:
    """CPU milliseconds of the router per request and per event, from short and long answers."""
    per_event, per_request = [], []
    for _ in range(ROUNDS):
        costs = []
        for tokens in (SHORT, LONG):
            before_s = router.cpu_s()
            await many(session, router.url, tokens, REQUESTS, direct=False)
            costs.append((router.cpu_s() - before_s) / REQUESTS * 1000)
        event_ms = (costs[1] - costs[0]) / (LONG - SHORT)
        per_event.append(event_ms)
        per_request.append(costs[0] - SHORT * event_ms)
    return statistics.median(per_request), statistics.median(per_event)


async def latencies(
    session: aiohttp.ClientSession, router: RouterProcess, worker_url: str
) -> dict[str, tuple[float, float]]:
    """Median seconds to first token and per token, one request at a time, interleaved."""
    seen: dict[str, list[tuple[float, float]]] = {"direct": [], "router": []}
    for _ in range(60):
        seen["direct"].append(await one(session, worker_url, 65, direct=True))
        seen["router"].append(await one(session, router.url, 65, direct=False))
    return {
        name: (
            statistics.median(first for first, _ in pairs),
            statistics.median((last - first) / 64 for first, last in pairs),
        )
        for name, pairs in seen.items()
    }


async def switch(router: RouterProcess, api: WatchApi, table: RoutingTable) -> None:
    """Put a table in force."""
    api.put_table(table)
    await router.wait_version(table.version)


async def measure() -> list[Result]:
    """All results."""
    async with (
        setting() as (router, api, endpoints),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        worker_url = f"http://127.0.0.1:{endpoints[1]['port']}"
        before_s, at_s = router.cpu_s(), time.monotonic()
        await asyncio.sleep(10)
        idle_cores = (router.cpu_s() - before_s) / (time.monotonic() - at_s)
        await many(session, router.url, SHORT, 64, direct=False)
        split_request_ms, split_event_ms = await cpu_costs(session, router)
        await switch(router, api, colocated_table(2, classes=CLASSES))
        await many(session, router.url, SHORT, 64, direct=False)
        request_ms, event_ms = await cpu_costs(session, router)
        times = await latencies(session, router, worker_url)
        rss_mib = router.rss_bytes() / 2**20
    direct, routed = times["direct"], times["router"]
    return [
        result("rss_under_load", rss_mib, "MiB", bar=RSS_BAR_MIB),
        result("cpu_at_rest", idle_cores, "cores", bar=0.05),
        result("cpu_per_request_two_legs", split_request_ms, "ms"),
        result("cpu_per_event_two_legs", split_event_ms, "ms"),
        result("cpu_per_request_one_leg", request_ms, "ms"),
        result("cpu_per_event_one_leg", event_ms, "ms"),
        result("time_to_first_token", routed[0] * 1000, "ms", against=round(direct[0] * 1000, 3)),
        result("time_per_token", routed[1] * 1000, "ms", against=round(direct[1] * 1000, 3)),
    ]


def machine() -> str:
    """What this ran on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    """Measure and print; the last line is JSON."""
    if sys.argv[1:2] == ["workers"]:
        asyncio.run(serve_workers())
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    where = machine()
    results = asyncio.run(measure())
    for item in results:
        against = "" if item["against"] is None else f"  (direct: {item['against']})"
        bar = (
            ""
            if item["bar"] is None
            else f"  bar {item['bar']}: {'holds' if item['holds'] else 'DOES NOT HOLD'}"
        )
        print(f"{item['name']:28} {item['value']:10.3f} {item['unit']}{against}{bar}")
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = {
        "bench": "router",
        "commit": commit.stdout.strip(),
        "date": date,
        "machine": where,
        "results": results,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
