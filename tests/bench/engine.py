"""Our served engine against a served plain batched transformers loop, in turns, each on one core.

    make bench-engine          (BENCH_ROUNDS=3)

A 26M-parameter Llama in float32; every request has 512 random prompt tokens and 64 output tokens,
streamed over HTTP. Closed loop of 1, 4 and 16 clients. The loop collects what waits into one static
batch, runs it to its end with transformers' own model, cache and attention, and streams each token;
prompts of one length need no padding, which is its best case. Both servers run all the time on the
same core; only one has requests at a time. The ratio is the median over rounds of output tokens/s.
The same ratio by processor time of the servers is printed beside it: on a machine that does other
things too it says what the wall clock cannot.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from helpers_models import benchmark_model_dir
from helpers_ports import free_port

NUM_PROMPT_TOKENS = 512
NUM_OUTPUT_TOKENS = 64
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
# Clients -> (requests of one turn, least ratio).
LOADS = {1: (3, 0.75), 4: (8, 0.95), 16: (32, 0.95)}
START_TIMEOUT_S = 180
TURN_TIMEOUT_S = 900
# How long the plain loop waits for more requests once it has one.
COLLECT_S = 0.02
REPOSITORY = Path(__file__).resolve().parents[2]


class PlainLoop:
    """The opponent: one static batch at a time."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.waiting: asyncio.Queue[tuple[list[int], int, asyncio.Queue[int | None]]] = asyncio.Queue()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        await self.waiting.put((body["prompt"], body["max_tokens"], tokens))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        while (token := await tokens.get()) is not None:
            count += 1
            choice = {"index": 0, "text": self.tokenizer.decode([token]), "finish_reason": None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"completion_tokens": count}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.waiting.get()]
            await asyncio.sleep(COLLECT_S)
            while not self.waiting.empty():
                batch.append(self.waiting.get_nowait())

            def give(row_tokens: list[int | None], batch: list = batch) -> None:
                for (_, _, tokens), token in zip(batch, row_tokens, strict=True):
                    loop.call_soon_threadsafe(tokens.put_nowait, token)

            await asyncio.to_thread(self._generate, [item[0] for item in batch], batch[0][1], give)

    @torch.inference_mode()
    def _generate(
        self, prompts: list[list[int]], max_tokens: int, give: Callable[[list[int | None]], None]
    ) -> None:
        torch.set_num_threads(1)
        cache = DynamicCache(config=self.model.config)
        inputs = torch.tensor(prompts)
        for _ in range(max_tokens):
            logits = self.model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits
            inputs = logits[:, -1].argmax(dim=-1, keepdim=True)
            give(inputs[:, 0].tolist())
        give([None] * len(prompts))


async def serve_plain(directory: Path, port: int) -> None:
    """Run the opponent's server until it is killed."""
    plain = PlainLoop(directory)
    app = web.Application()
    app.router.add_post("/v1/completions", plain.complete)
    app.router.add_get("/ready", lambda _: _answer_ready())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await plain.run()


async def _answer_ready() -> web.Response:
    return web.Response(text="ready")


def start(command: list[str], log: Path, core: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / name) for name in ("tests", "worker", "operator")),
    }
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=environment)
    os.sched_setaffinity(process.pid, {core})
    return process


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def wait_ready(
    session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"a server ended early: {_tail(log)}")
        try:
            async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as response:
                if response.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(0.3)
    raise SystemExit(f"a server did not become ready in {START_TIMEOUT_S} s")


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> int:
    """One streamed completion; returns the output tokens that the server counts."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    count = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage")
                count = usage["completion_tokens"] if usage else count
    return count


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Processor time that a server has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def turn(session: aiohttp.ClientSession, url: str, clients: int, prompts: list[list[int]]) -> float:
    """Output tokens per second of a closed loop."""
    left = list(prompts)
    counts: list[int] = []

    async def client() -> None:
        while left:
            counts.append(await ask(session, url, left.pop()))

    started = time.perf_counter()
    async with asyncio.timeout(TURN_TIMEOUT_S):
        await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - started
    if counts != [NUM_OUTPUT_TOKENS] * len(prompts):
        raise SystemExit(f"{url} gave {counts} tokens instead of {NUM_OUTPUT_TOKENS} each")
    return sum(counts) / seconds


async def compare(
    urls: dict[str, str], processes: dict[str, subprocess.Popen[bytes]], session: aiohttp.ClientSession
) -> list[dict[str, object]]:
    generator = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[generator.randrange(5, 4096) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(count)]

    for url in urls.values():
        await turn(session, url, 2, prompts(2))
    results: list[dict[str, object]] = []
    for clients, (num_requests, bar) in LOADS.items():
        rates: dict[str, list[float]] = {name: [] for name in urls}
        costs: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(ROUNDS):
            batch = prompts(num_requests)
            order = list(urls) if number % 2 == 0 else list(reversed(urls))
            for name in order:
                before_s = cpu_s(processes[name])
                rates[name].append(await turn(session, urls[name], clients, batch))
                costs[name].append(cpu_s(processes[name]) - before_s)
            print(
                f"{clients} clients, round {number + 1}: "
                + ", ".join(f"{name} {values[-1]:.1f} tokens/s" for name, values in rates.items()),
                flush=True,
            )
        ratio = median_ratio(rates["ours"], rates["plain"])
        for name, values in rates.items():
            results.append(result(f"{name}_c{clients}", statistics.median(values), "tokens/s", None, None))
        results.append(result(f"ratio_c{clients}", ratio, "ratio", "plain batched transformers loop", bar))
        by_cpu = median_ratio(costs["plain"], costs["ours"])
        results.append(result(f"ratio_by_cpu_time_c{clients}", by_cpu, "ratio", "the same", None))
    return results


def median_ratio(tops: list[float], bottoms: list[float]) -> float:
    return statistics.median(top / bottom for top, bottom in zip(tops, bottoms, strict=True))


def result(name: str, value: float, unit: str, against: str | None, bar: float | None) -> dict[str, object]:
    holds = None if bar is None else value >= bar
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "against": against,
        "bar": bar,
        "holds": holds,
    }


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


async def measure() -> list[dict[str, object]]:
    directory = benchmark_model_dir()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})  # the client stays off the servers' core where there are two
    ports = {"ours": free_port(), "plain": free_port()}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    worker = [
        "-m", "phasesplit_worker", "--model-path", str(directory), "--model-name", "bench",
        "--object", "bench", "--namespace", "default", "--pool", "decode", "--host", "127.0.0.1",
        "--port", str(ports["ours"]),
        "--transfer-port", "0", "--kv-cache-bytes", str(1 << 29),
    ]  # fmt: skip
    commands = {"ours": worker, "plain": ["-m", "bench.engine", "plain", str(directory), str(ports["plain"])]}
    with tempfile.TemporaryDirectory() as scratch:
        logs = {name: Path(scratch) / f"{name}.log" for name in commands}
        processes = {name: start(command, logs[name], cores[-1]) for name, command in commands.items()}
        try:
            timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                for name, url in urls.items():
                    await wait_ready(session, url, processes[name], logs[name])
                return await compare(urls, processes, session)
        finally:
            for process in processes.values():
                process.kill()
                process.wait(timeout=30)


def main() -> None:
    if sys.argv[1:2] == ["plain"]:
        asyncio.run(serve_plain(Path(sys.argv[2]), int(sys.argv[3])))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    machine = describe_machine()
    results = asyncio.run(measure())
    report = {
        "bench": "engine",
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "results": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
