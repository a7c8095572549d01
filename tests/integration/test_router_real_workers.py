"""The router in front of real workers with a tiny model: split = colocated = direct, token for token."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from helpers_models import tiny_model_dir
from helpers_router import RouterProcess, Streamed, colocated_table, split_table, take_event, wait_until
from helpers_worker_processes import ADMIN_TOKEN, MODEL, WorkerProcess, Workers, run_local, running_workers
from phasesplit.api.routing import LatencyClass

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
CLASSES = (LatencyClass(name="default", ttft_s=60, tpot_s=5),)
TEXT = "prefill decode pool cache token block moves naïve café the a of 42 () {} reads writes"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Where worker processes of these tests live."""
    with running_workers(tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest.fixture(scope="module")
def pool(workers: Workers) -> dict[str, WorkerProcess]:
    """One prefill and two decode workers of one tiny model."""
    directory = tiny_model_dir("llama-gqa")
    started = {
        name: workers.start(directory, name, name.split("-")[1])
        for name in ("obj-prefill-0", "obj-decode-0", "obj-decode-1")
    }
    for worker in started.values():
        worker.wait_ready(timeout_s=500)
    return started


@pytest.fixture
async def router(pool: dict[str, WorkerProcess]) -> AsyncIterator[RouterProcess]:
    """A router that knows all of them, split."""
    process = RouterProcess("--trace-text", admin_token=ADMIN_TOKEN, model=MODEL)
    try:
        route(process, pool, split=True, version=int(time.time() * 10))
        await process.start()
        await process.wait_pods(set(pool))
        yield process
        assert "Traceback" not in process.log(), process.log()
    finally:
        await process.stop()


def route(process: RouterProcess, pool: dict[str, WorkerProcess], *, split: bool, version: int) -> None:
    """Put a table in force. Versions grow from test to test, since the workers stay."""
    table = (split_table if split else colocated_table)(version, model=MODEL, classes=CLASSES)
    endpoints = [
        {
            "pod": name,
            "node": f"node-of-{name}",
            "pool": name.split("-")[1],
            "host": "127.0.0.1",
            "port": worker.port,
            "transfer_port": worker.transfer_port,
        }
        for name, worker in pool.items()
    ]
    process.route(table, endpoints)


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    """A chat with a prompt from one word to a few hundred tokens."""
    draw = random.Random(number)
    text = " ".join(draw.choices(TEXT.split(), k=draw.choice([1, 5, 30, 120])))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return body | changes


async def no_kv_in_use(router: RouterProcess) -> None:
    """Until every block is free again."""

    async def free() -> bool:
        report = await router.report()
        return not report.in_flight and all(worker.kv_used_blocks == 0 for worker in report.workers)

    await wait_until(free, 60)


async def test_split_equals_colocated_equals_direct(
    router: RouterProcess, pool: dict[str, WorkerProcess]
) -> None:
    sampled = {"temperature": 1.0, "seed": 11}
    usage = {"stream_options": {"include_usage": True}}
    bodies = [body_of(number) for number in range(10)] + [body_of(50 + n, **sampled) for n in range(5)]
    async with aiohttp.ClientSession() as session:
        direct = [await run_local(session, pool["obj-decode-0"], body | usage) for body in bodies]
    split = [await router.stream(body | usage) for body in bodies]
    trace = await router.trace("last")
    assert trace.prefill is not None
    assert trace.decode is not None
    assert trace.decode.kv_bytes > 0
    assert trace.decode.recomputed is None
    version = (await router.report()).table_version + 1
    route(router, pool, split=False, version=version)
    await router.wait_version(version)
    colocated = await asyncio.gather(*(router.stream(body | usage) for body in bodies))
    for one, two, plain in zip(split, colocated, direct, strict=True):
        assert (one.text, one.finish_reasons) == (plain.text, [plain.finish_reason])
        assert (two.text, two.finish_reasons) == (plain.text, [plain.finish_reason])
        assert (one.headers["x-phasesplit-mode"], two.headers["x-phasesplit-mode"]) == ("Split", "Colocated")
        for seen in (one, two):
            assert plain.usage is not None
            assert seen.usage is not None
            assert seen.usage["prompt_tokens"] == plain.usage["prompt_tokens"]
            assert seen.usage["completion_tokens"] == plain.usage["completion_tokens"] == len(plain.tokens)
            assert (seen.roles, seen.done) == (1, True)
    await no_kv_in_use(router)


async def test_stop_strings_and_log_probabilities_survive_the_split(
    router: RouterProcess, pool: dict[str, WorkerProcess]
) -> None:
    async with aiohttp.ClientSession() as session:
        plain = await run_local(session, pool["obj-decode-0"], body_of(3, max_tokens=40))
        middle = plain.text[len(plain.text) // 2 : len(plain.text) // 2 + 3]
        whole = body_of(3, max_tokens=40, stop=[middle], logprobs=True, top_logprobs=2)
        stopped = await run_local(session, pool["obj-decode-0"], whole)
    status, answer, _ = await router.post(whole)
    assert status == 200
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (stopped.text, "stop")
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


async def test_leaving_frees_the_kv_of_both_sides(router: RouterProcess) -> None:
    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        try:
            async with asyncio.timeout(0.01 + 0.01 * (number % 12)):
                body = body_of(number, stream=True, max_tokens=200, ignore_eos=True)
                async with session.post(router.url + "/v1/chat/completions", json=body) as response:
                    async for _ in response.content:
                        pass
        except TimeoutError:
            pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        for start in range(0, 60, 6):
            await asyncio.gather(*(leave(session, start + number) for number in range(6)))
    await no_kv_in_use(router)
    assert (await router.stream(body_of(1))).done


async def test_a_refusal_by_the_worker_reaches_the_client(router: RouterProcess) -> None:
    status, answer, _ = await router.post(body_of(1, temperature=9))
    assert status == 400
    assert "temperature" in answer["error"]["message"]
    status, answer, _ = await router.post(body_of(1, max_tokens=10**6))
    assert status == 400
    status, answer, _ = await router.post(body_of(1, nonsense=1))
    assert (status, answer["error"]["param"]) == (400, "nonsense")


async def test_a_killed_decode_worker_leaves_no_gap(
    router: RouterProcess, pool: dict[str, WorkerProcess]
) -> None:
    body = body_of(7, max_tokens=300, ignore_eos=True)
    async with aiohttp.ClientSession() as session:
        plain = await run_local(session, pool["obj-decode-0"], body)
        seen = Streamed(200)
        url = router.url + "/v1/chat/completions"
        async with session.post(url, json=body | {"stream": True}) as response:
            victim = response.headers["x-phasesplit-pair"].split(",")[1]
            async for line in response.content:
                if line.startswith(b"data: "):
                    take_event(seen, line[6:].strip())
                if len(seen.chunks) == 30:
                    pool[victim].kill()
    assert (seen.error, seen.done, seen.roles) == (None, True, 1)
    assert seen.text == plain.text
    report = await router.report()
    assert report.migrations_total == 1
    assert victim in report.unreachable
