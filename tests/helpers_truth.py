"""One trace, sent for real and simulated: the parts that benchmarks of real serving share.

Sends to any OpenAI endpoint by its base URL; knows nothing of who serves there. Lengths of the simulated
trace are those that the endpoint itself counted.
"""

import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from phasesplit.api.reports import StepProfile
from phasesplit.planner.simulation_types import Arrival as SimulatedArrival
from phasesplit.planner.simulation_types import SimulationResult
from phasesplit_bench.arrivals import Arrival, make_prompt
from phasesplit_bench.client import Result, Target, send
from phasesplit_bench.summary import quantile

ROOT = Path(__file__).resolve().parents[1]
PERCENTS = (50, 90)
Range = tuple[int, int]
T = TypeVar("T")

# Of a made-up device, slow enough that two cores carry four of them and that what HTTP and a busy machine
# add is small beside a step: 200 ms fixed, 670 prompt tokens per second beside it.
DEVICE = StepProfile(
    base_s=0.2,
    per_prefill_token_s=1.5e-3,
    per_prefill_context_s=4e-7,
    per_decode_sequence_s=0.02,
    per_decode_context_s=5e-6,
    num_samples=1000,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What arrives: how often, and from which ranges of lengths, drawn with equal chance."""

    rate_per_s: float
    requests: int
    prompt_tokens: tuple[Range, ...]
    output_tokens: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantile of one latency, measured and simulated."""

    name: str
    measured_s: float
    simulated_s: float

    @property
    def deviation(self) -> float:
        """Of the simulated from the measured value, as a share."""
        return abs(self.simulated_s / self.measured_s - 1) if self.measured_s > 0 else float("inf")


def poisson_trace(shape: Shape, seed: int, tokens_per_word: float, text: str = "") -> list[Arrival]:
    """Open-loop arrivals from time 0 on; the same seed makes the same times and lengths.

    `text` tells runs on the same workers apart: a prompt sent twice would be found in the prefix cache.
    """
    source, words_source = random.Random(seed), random.Random(f"{seed} {text}")
    trace: list[Arrival] = []
    at_s = 0.0
    for index in range(shape.requests):
        at_s += source.expovariate(shape.rate_per_s)
        prompt_tokens = source.randint(*source.choice(shape.prompt_tokens))
        output_tokens = source.randint(*source.choice(shape.output_tokens))
        words = max(6, round(prompt_tokens / tokens_per_word))
        trace.append(Arrival(index, at_s, make_prompt(words, words_source), output_tokens))
    return trace


async def send_trace(target: Target, trace: Sequence[Arrival]) -> list[Result]:
    """Send each request at its time, whether or not earlier ones are done; results in order."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        begin_s = time.monotonic()

        async def one(arrival: Arrival) -> Result:
            await asyncio.sleep(max(0.0, begin_s + arrival.at_s - time.monotonic()))
            start_s = time.monotonic() - begin_s
            return await send(session, target, arrival, start_s=start_s, late_s=start_s - arrival.at_s)

        return list(await asyncio.gather(*(one(arrival) for arrival in trace)))


async def count_tokens_per_word(target: Target) -> float:
    """How many tokens the endpoint makes of a word, from two prompts of different length."""
    source = random.Random(time.time())
    trace = [Arrival(index, 0.0, make_prompt(words, source), 1) for index, words in enumerate((50, 250))]
    short, long = await send_trace(target, trace)
    for result in (short, long):
        if not result.is_finished:
            raise RuntimeError(f"{target.url} did not answer a first request: {result.error}")
    return (long.prompt_tokens - short.prompt_tokens) / 200


def simulated_trace(results: Sequence[Result]) -> tuple[SimulatedArrival, ...]:
    """What was really sent and answered, when and how long, for the simulator, in the order of time."""
    return tuple(
        SimulatedArrival(result.start_s, result.prompt_tokens, result.output_tokens)
        for result in sorted(results, key=lambda result: result.start_s)
        if result.is_finished
    )


def compare_latencies(results: Sequence[Result], simulated: SimulationResult) -> list[Compared]:
    """Quantiles of TTFT and TPOT, measured at the client against simulated."""
    rows = []
    for name in ("ttft_s", "tpot_s"):
        measured = [value for item in results if item.is_finished and (value := getattr(item, name))]
        expected = [value for value in getattr(simulated, name) if value > 0]
        for percent in PERCENTS:
            label = f"{name.removesuffix('_s').upper()} p{percent}"
            real, model = quantile(measured, percent), quantile(expected, percent)
            rows.append(Compared(label, real or 0.0, model or 0.0))
    return rows


def run_until_told(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that leaves no process behind when it is told to end."""

    async def run() -> T:
        task = asyncio.ensure_future(main)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    return asyncio.run(run())


def describe_machine() -> str:
    """Processor, cores, and how busy the machine is with anything."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def last_line(bench: str, results: Sequence[dict[str, object]]) -> str:
    """The line that every benchmark ends with."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
    return json.dumps(
        {
            "bench": bench,
            "commit": commit.stdout.strip(),
            "machine": describe_machine(),
            "results": list(results),
        }
    )
