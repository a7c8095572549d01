"""What goes wrong between the legs: dead peers, wrong keys, late pulls, cut connections, storms.

Whatever happens to the transfer, the answer is the same and no KV block stays behind.
"""

import asyncio
import contextlib
import json
import random
from pathlib import Path

import aiohttp
import pytest

from helpers_cutting_proxy import cutting_proxy
from helpers_models import tiny_model_dir
from helpers_worker_processes import (
    ADMIN,
    MODEL,
    WorkerProcess,
    Workers,
    read_report,
    run_local,
    run_two_legs,
    running_workers,
    stream_events,
    wait_for_free_blocks,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LONG = "the pool reads the cache and the decode worker writes the answer " * 12
BODY = {"model": MODEL, "prompt": LONG, "max_tokens": 20, "temperature": 0}
SLOW_STEPS = {"base_s": 0.05, "per_prefill_token_s": 0.004, "per_decode_sequence_s": 0.01}


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with running_workers(tmp_path_factory.mktemp("workers")) as running:
        (running.folder / "slow.json").write_text(json.dumps(SLOW_STEPS))
        yield running


def start_slow_prefill(workers: Workers, name: str, **kwargs: str) -> WorkerProcess:
    """A prefill worker whose prompts take seconds, so that a test can act in the middle."""
    pace = str(workers.folder / "slow.json")
    flags = ("--role", "prefill", "--pace", pace, "--kv-ttl-s", "2", "--max-batched-tokens", "32")
    return workers.start(tiny_model_dir("llama"), name, "prefill", *flags, **kwargs)


@pytest.fixture(scope="module")
def started(workers) -> dict[str, WorkerProcess]:
    """All workers of this file, started at once."""
    running = {
        "decode": workers.start(tiny_model_dir("llama"), "decode-0", "decode", "--role", "decode"),
        "slow": start_slow_prefill(workers, "prefill-slow"),
        "doomed": start_slow_prefill(workers, "prefill-doomed"),
        "stranger": start_slow_prefill(workers, "prefill-stranger", key="wrong-key"),
    }
    for worker in running.values():
        worker.wait_ready()
    return running


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def expected(session, started):
    return await run_local(session, started["decode"], BODY | {"prompt": "again " + LONG})


def body_of(number: int) -> dict:
    """Different beginnings, so that no prefix cache makes the transfer needless."""
    return BODY | {"prompt": f"{number} {LONG}"}


async def test_a_prefill_killed_in_the_middle_of_the_transfer_is_recomputed(session, started) -> None:
    decode, doomed = started["decode"], started["doomed"]

    async def kill_soon() -> None:
        await asyncio.sleep(0.3)
        doomed.kill()

    killing = asyncio.create_task(kill_soon())
    answer = await run_two_legs(session, doomed, decode, body_of(1))
    await killing
    local = await run_local(session, decode, body_of(1))
    assert answer.is_done
    assert answer.reports[-1].recomputed == "connect"
    # Leg 1 died before its token: the router starts over, here leg 2 alone says what it had made.
    assert answer.tokens[-19:] == local.tokens[1:]
    await wait_for_free_blocks(session, decode)
    report = await read_report(session, decode)
    assert report.transfer_failures_total.get("connect") == 1


async def test_a_wrong_transfer_key_is_recomputed(session, started) -> None:
    decode, stranger = started["decode"], started["stranger"]
    answer = await run_two_legs(session, stranger, decode, body_of(2))
    local = await run_local(session, decode, body_of(2))
    assert answer.reports[-1].recomputed == "auth"
    assert answer.tokens == local.tokens
    await wait_for_free_blocks(session, decode, stranger)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_engine_id": "an-earlier-start"}, "engine_id"),
        ({"remote_request_id": "nobody"}, "unknown_request"),
        ({"remote_port": 1}, "connect"),
    ],
)
async def test_stale_or_wrong_parameters_are_recomputed(session, started, change: dict, reason: str) -> None:
    decode, slow = started["decode"], started["slow"]
    # A pod that fails often is left alone for a while; each case here is a pod of its own.
    change = change | {"remote_pod": f"pod-{reason}"}
    body = body_of(3 + sum(map(ord, reason)))
    answer = await run_two_legs(session, slow, decode, body, changed_params=change)
    local = await run_local(session, decode, body)
    assert answer.reports[-1].recomputed == reason
    assert answer.tokens == local.tokens
    await wait_for_free_blocks(session, decode, slow)  # the held KV ends with its time to live


async def test_a_pull_after_the_time_to_live_is_recomputed(session, started) -> None:
    decode, slow = started["decode"], started["slow"]
    body = body_of(7)
    leg_1 = body | {"kv_transfer_params": {"do_remote_decode": True}}
    events = [event async for event in stream_events(session, slow.url, leg_1)]
    await wait_for_free_blocks(session, slow)
    leg_2 = body | {"kv_transfer_params": events[0]["kv_transfer_params"]}
    received = [event async for event in stream_events(session, decode.url, leg_2)]
    assert received[-2]["recomputed"] == "expired"
    async with session.get(slow.url + "/metrics") as response:
        text = await response.text()
    expired = next(
        line for line in text.splitlines() if line.startswith("phasesplit_kv_expired_blocks_total{")
    )
    assert float(expired.split()[-1]) > 0


async def test_a_cut_connection_is_retried_without_recompute(session, started) -> None:
    decode, slow = started["decode"], started["slow"]
    local = await run_local(session, decode, body_of(8))
    body = body_of(8) | {"prompt": f"8 {LONG}"}
    async with cutting_proxy(slow.transfer_port, 1, 60_000) as (proxy, port):
        change = {"remote_port": port, "remote_pod": "pod-behind-a-proxy"}
        fresh = body_of(9)
        answer = await run_two_legs(session, slow, decode, fresh, changed_params=change)
    plain = await run_local(session, decode, fresh)
    assert proxy.num_cut == 1
    assert proxy.num_connections >= 2
    assert answer.reports[-1].recomputed is None
    assert answer.tokens == plain.tokens
    assert local.tokens == (await run_local(session, decode, body)).tokens
    await wait_for_free_blocks(session, decode, slow)


async def test_cancel_frees_held_kv_at_once(session, started) -> None:
    slow = started["slow"]
    leg_1 = body_of(10) | {"kv_transfer_params": {"do_remote_decode": True}}
    events = [event async for event in stream_events(session, slow.url, leg_1, "to-be-cancelled")]
    assert events[-1] == "[DONE]"
    assert (await read_report(session, slow)).kv_used_blocks > 0
    async with session.get(slow.url + "/v1/kv/to-be-cancelled", headers=ADMIN) as response:
        manifest = await response.json()
    assert (manifest["state"], manifest["first_token"] is not None) == ("ready", True)
    body = {"request_id": "to-be-cancelled"}
    async with session.post(slow.url + "/admin/cancel", json=body, headers=ADMIN) as response:
        assert await response.json() == {"cancelled": True}
    await wait_for_free_blocks(session, slow, timeout_s=1.0)


async def test_a_storm_of_disconnects_leaves_nothing_behind(session, started) -> None:
    decode, slow = started["decode"], started["slow"]
    rng = random.Random(7)
    gate = asyncio.Semaphore(12)

    async def one(number: int) -> None:
        prompt = f"{number} " + LONG[: rng.choice([20, 200, 700])]
        body = BODY | {"prompt": prompt, "max_tokens": rng.choice([1, 5, 40])}
        limit_s = rng.choice([0.01, 0.05, 0.2, 0.6])
        async with gate:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(limit_s):
                    if rng.random() < 0.7:
                        await run_two_legs(session, slow, decode, body)
                    else:
                        await run_local(session, decode, body)

    await asyncio.gather(*(one(number) for number in range(150)))
    await wait_for_free_blocks(session, decode, slow, timeout_s=30.0)
    after = await run_two_legs(session, slow, decode, body_of(11))
    assert after.is_done


async def test_probes_measure_the_link_from_a_peer(session, started) -> None:
    decode, slow, stranger = started["decode"], started["slow"], started["stranger"]

    async def probe(peer: WorkerProcess) -> dict:
        body = {"host": "127.0.0.1", "port": peer.transfer_port, "pod": peer.name, "bytes": 1 << 20}
        async with session.post(decode.url + "/admin/probe", json=body, headers=ADMIN) as response:
            assert response.status == 200
            return await response.json()

    result = await probe(slow)
    assert result["sample"]["from_node"] == "node-of-prefill-slow"
    assert result["sample"]["to_node"] == "node-of-decode-0"
    assert result["sample"]["bytes"] / result["sample"]["busy_s"] > 1e6
    assert (await probe(stranger))["error"]
    links = (await read_report(session, decode)).links
    assert any(link.probe and link.from_pod == "prefill-slow" for link in links)


@pytest.fixture(scope="module")
def small(workers) -> WorkerProcess:
    """A worker whose KV cache holds only a few of the requests below."""
    flags = ("--kv-cache-bytes", str(40 * 3 * 2 * 4 * 16 * 16 * 4), "--max-model-length", "400")
    return workers.start(Path(tiny_model_dir("llama")), "decode-small", "decode", *flags)


async def test_preemption_does_not_change_the_answer(session, started, small) -> None:
    await asyncio.to_thread(small.wait_ready)
    bodies = [
        {
            "model": MODEL,
            "prompt": f"{n} " + LONG[:90],
            "max_tokens": 120,
            "temperature": 0,
            "ignore_eos": True,
        }
        for n in range(8)
    ]
    answers = await asyncio.gather(*(run_local(session, small, body) for body in bodies))
    alone = [await run_local(session, started["decode"], body) for body in bodies]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert sum(answer.reports[-1].num_preemptions for answer in answers) > 0
    await wait_for_free_blocks(session, small)
