"""Runs arrivals against a target, open or closed loop. Every wait has an end.

results = await run_load(target, plan, on_result=print)
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from phasesplit_bench.arrivals import Arrival, Length, back_to_back, poisson
from phasesplit_bench.client import Result, Target, send


class BenchError(Exception):
    """A run that cannot start; the message is one sentence for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much load for how long."""

    duration_s: float
    rate_per_s: float | None = None  # open loop
    concurrency: int | None = None  # closed loop
    prompt_tokens: Length = field(default_factory=lambda: Length(256, 256))
    output_tokens: Length = field(default_factory=lambda: Length(64, 64))
    seed: int = 0


async def find_model(url: str, api_key: str | None = None) -> str:
    """The first model that the endpoint serves."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + "/v1/models", headers=headers) as response,
        ):
            if response.status != 200:
                raise BenchError(f"{url}/v1/models answered with status {response.status}; pass --model.")
            models = (await response.json())["data"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{url}/v1/models cannot be read ({error or 'timed out'}); is the address right?"
        ) from error
    if not models:
        raise BenchError(f"{url} serves no model yet; wait until it is ready, or pass --model.")
    return str(models[0]["id"])


async def run_load(
    target: Target, plan: Plan, *, on_result: Callable[[Result], None] | None = None
) -> list[Result]:
    """Run to the end of the plan and of its last request. Cancelling keeps what `on_result` got."""
    results: list[Result] = []

    def take(result: Result) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        if plan.rate_per_s is not None:
            await _open_loop(session, target, plan, plan.rate_per_s, take)
        else:
            await _closed_loop(session, target, plan, plan.concurrency or 1, take)
    results.sort(key=lambda result: result.index)
    return results


async def _open_loop(
    session: aiohttp.ClientSession,
    target: Target,
    plan: Plan,
    rate_per_s: float,
    take: Callable[[Result], None],
) -> None:
    begin_s = time.monotonic()
    source = random.Random(plan.seed)

    async def one(arrival: Arrival) -> None:
        start_s = time.monotonic() - begin_s
        take(await send(session, target, arrival, start_s=start_s, late_s=start_s - arrival.at_s))

    async with asyncio.TaskGroup() as tasks:
        for arrival in poisson(rate_per_s, plan.duration_s, plan.prompt_tokens, plan.output_tokens, source):
            wait_s = begin_s + arrival.at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(one(arrival))


async def _closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    plan: Plan,
    concurrency: int,
    take: Callable[[Result], None],
) -> None:
    begin_s = time.monotonic()
    arrivals = back_to_back(plan.prompt_tokens, plan.output_tokens, random.Random(plan.seed))

    async def one_after_another() -> None:
        while (start_s := time.monotonic() - begin_s) < plan.duration_s:
            result = await send(session, target, next(arrivals), start_s=start_s, late_s=0.0)
            take(result)
            if not result.is_finished:
                await asyncio.sleep(0.1)  # refused at once: do not turn into a storm

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(one_after_another())
