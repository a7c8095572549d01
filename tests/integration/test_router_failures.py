"""The router process when workers die, stall, refuse or fail transfers, and when clients leave."""

import asyncio
import json
import time

import aiohttp
import pytest

from helpers_fake_worker import DEFAULT_LENGTH, expected_text
from helpers_router import Site, colocated_table, running_site, split_table, wait_until
from phasesplit.api.reports import WorkerState

pytestmark = pytest.mark.integration
QUESTION = "Tell me of the sea."
ANSWER = expected_text(f"user:{QUESTION}")


async def test_a_dead_decode_worker_is_replaced_at_every_token() -> None:
    async with running_site(decodes=2) as site:
        router = site.router
        for position in range(1, DEFAULT_LENGTH):
            for worker in site.decodes:
                worker.die_at, worker.deaths_left = position, 0
            # Whichever is chosen dies once; the other one has no deaths left to give.
            chosen = site.decodes[position % 2]
            chosen.deaths_left = 1
            other = site.decodes[(position + 1) % 2]
            site.router.route(split_table(100 + 2 * position), [*site.prefills, chosen])
            await router.wait_version(100 + 2 * position)
            stream = asyncio.create_task(
                router.stream(router.chat_body(QUESTION, stream_options={"include_usage": True}))
            )
            site.router.route(split_table(101 + 2 * position), [*site.prefills, chosen, other])
            seen = await stream
            assert seen.text == ANSWER, position
            assert (seen.roles, seen.finish_reasons, seen.done, seen.error) == (1, ["length"], True, None)
            assert seen.usage is not None
            assert (seen.usage["prompt_tokens"], seen.usage["completion_tokens"]) == (6, 8)
        report = await router.report()
        assert report.migrations_total == DEFAULT_LENGTH - 1
        assert report.local_prefills_total == {"replay": DEFAULT_LENGTH - 1}
        assert report.failed_total == 0


async def test_a_killed_decode_process_loses_no_stream() -> None:
    async with running_site(decodes=2) as site:
        router = site.router
        for worker in site.decodes:
            worker.token_s = 0.05
        streams = [asyncio.create_task(router.stream(router.chat_body(QUESTION))) for _ in range(20)]
        await asyncio.sleep(0.25)
        await site.decodes[0].kill()
        for seen in await asyncio.gather(*streams):
            assert (seen.text, seen.done, seen.error) == (ANSWER, True, None)
        await router.wait_idle()
        assert site.running() == 0


async def test_a_dead_prefill_worker_before_the_first_token() -> None:
    async with running_site(prefills=2) as site:
        dying = site.prefills[0]
        dying.die_at, dying.deaths_left = 0, 1
        for seen in await site.ask_until(lambda: dying.deaths_left == 0, site.router.chat_body(QUESTION)):
            assert (seen.text, seen.roles, seen.done) == (ANSWER, 1, True)
        assert (await site.router.report()).migrations_total == 0


async def test_the_same_pod_may_go_on_after_its_restart() -> None:
    async with running_site(table=colocated_table(), prefills=0) as site:
        router, worker = site.router, site.decodes[0]
        worker.token_s = 0.05
        stream = asyncio.create_task(router.stream(router.chat_body(QUESTION)))
        await asyncio.sleep(0.2)
        await worker.kill()
        await asyncio.sleep(0.5)
        await worker.start(worker.port)
        seen = await stream
        assert (seen.text, seen.finish_reasons, seen.done) == (ANSWER, ["length"], True)


async def test_without_a_way_to_go_on_the_stream_ends_with_an_error_event() -> None:
    async with running_site() as site:
        router = site.router
        site.prefills[0].die_at = site.decodes[0].die_at = 3
        seen = await router.stream(router.chat_body(QUESTION))
        assert seen.text == expected_text(f"user:{QUESTION}", 3)
        assert not seen.done
        assert seen.error is not None
        assert "5 attempts failed" in seen.error["message"]
        assert site.legs() == 6
        status, answer, _ = await router.post(router.chat_body(QUESTION))
        assert status == 502
        assert answer["error"]["code"] == "worker_lost"
        assert (await router.report()).failed_total == 2


async def test_busy_and_failing_workers_are_passed_over() -> None:
    async with running_site(prefills=2, decodes=2) as site:
        busy, failing = site.prefills[0], site.decodes[1]
        busy.refuse_status, failing.refuse_status = 503, 500
        body = site.router.chat_body(QUESTION)
        for seen in await site.ask_until(lambda: min(busy.refusals, failing.refusals) > 0, body):
            assert (seen.text, seen.done) == (ANSWER, True)


async def test_a_stalled_stream_is_continued_elsewhere() -> None:
    async with running_site(decodes=2, flags=("--stall-s", "0.3")) as site:
        router = site.router
        site.decodes[0].stall_at = site.decodes[1].stall_at = 3
        stream = asyncio.create_task(router.stream(router.chat_body(QUESTION)))
        await asyncio.sleep(0.5)
        stalled = next(worker for worker in site.decodes if worker.running)
        other = next(worker for worker in site.decodes if worker is not stalled)
        other.stall_at = None
        seen = await stream
        assert (seen.text, seen.done) == (ANSWER, True)
        assert stalled.running == set()


async def test_a_pod_that_leaves_the_endpoints_and_still_answers_finishes() -> None:
    async with running_site(decodes=2) as site:
        router = site.router
        for worker in site.decodes:
            worker.token_s = 0.1
        stream = asyncio.create_task(router.stream(router.chat_body(QUESTION)))
        await asyncio.sleep(0.3)
        serving = next(worker for worker in site.decodes if worker.running)
        router.route(split_table(2), [worker for worker in site.workers if worker is not serving])
        seen = await stream
        assert (seen.text, (await router.report()).migrations_total) == (ANSWER, 0)


async def test_draining_and_terminating_workers_get_nothing_new() -> None:
    async with running_site(decodes=3) as site:
        site.decodes[0].state = WorkerState.DRAINING
        terminating = site.decodes[1].endpoint() | {"terminating": True}
        site.router.route(split_table(2), [site.prefills[0], site.decodes[0], terminating, site.decodes[2]])
        await site.router.wait_version(2)

        async def known() -> bool:
            return "draining" in {worker.state for worker in (await site.router.report()).workers}

        await wait_until(known)
        for _ in range(5):
            await site.router.stream(site.router.chat_body(QUESTION))
        assert [len(worker.legs) for worker in site.decodes] == [0, 0, 5]


async def test_a_pair_that_keeps_failing_is_left_alone() -> None:
    async with running_site(prefills=1, decodes=2) as site:
        router = site.router
        bad, good = site.decodes
        bad.recompute_reason = "checksum"
        for seen in await site.ask_until(lambda: len(bad.legs) == 3, router.chat_body(QUESTION)):
            assert seen.text == ANSWER
        assert (await router.report()).quarantined_pairs == ["obj-prefill-0,obj-decode-0"]
        before = len(good.legs)
        streams = (router.stream(router.chat_body(QUESTION)) for _ in range(12))
        assert {seen.text for seen in await asyncio.gather(*streams)} == {ANSWER}
        assert (len(bad.legs), len(good.legs)) == (3, before + 12)


async def test_with_every_pair_quarantined_the_decode_workers_prefill() -> None:
    async with running_site() as site:
        site.decodes[0].recompute_reason = "timeout"
        for _ in range(5):
            assert (await site.router.stream(site.router.chat_body(QUESTION))).text == ANSWER
        assert (await site.router.report()).local_prefills_total == {"quarantined": 2}


async def _leave(site: Site, after_tokens: int) -> float:
    """Read some tokens of a slow stream, then leave. Returns when."""
    body = {**site.router.chat_body(QUESTION, max_tokens=1000), "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(site.router.url + "/v1/chat/completions", data=json.dumps(body))
        for _ in range(2 * after_tokens):
            await response.content.readline()
        response.close()
    return time.monotonic()


@pytest.mark.parametrize("after_tokens", [1, 4])
async def test_leaving_cancels_both_legs_within_100_ms(after_tokens: int) -> None:
    async with running_site() as site:
        site.decodes[0].token_s = 0.02
        if after_tokens == 1:
            site.decodes[0].stall_at = 1
        took_s = []
        for _ in range(5):  # the best of some: other programs share this machine
            site.decodes[0].cancelled.clear()
            left_s = await _leave(site, after_tokens)
            await site.wait_freed(site.decodes[0])
            took_s.append(time.monotonic() - left_s)
            await site.router.wait_idle()
            request_id = site.prefills[0].legs[-1].request_id
            assert site.decodes[0].cancelled == [request_id]
        assert min(took_s) < 0.1
        assert (await site.router.report()).failed_total == 0


async def test_leaving_during_prefill_frees_the_prefill_worker() -> None:
    async with running_site() as site:
        site.prefills[0].prefill_s = 30
        took_s = []

        async def started() -> bool:
            return bool(site.prefills[0].running)

        for _ in range(5):
            site.prefills[0].cancelled.clear()
            task = asyncio.create_task(site.router.stream(site.router.chat_body(QUESTION)))
            await wait_until(started)
            task.cancel()
            left_s = time.monotonic()
            await site.wait_freed(site.prefills[0])
            took_s.append(time.monotonic() - left_s)
        assert min(took_s) < 0.1


async def test_a_thousand_disconnects_leave_nothing_in_flight() -> None:
    async with running_site(prefills=2, decodes=2) as site:
        for worker in site.decodes:
            worker.token_s = 0.02
        for worker in site.prefills:
            worker.prefill_s = 0.005
        body = json.dumps({**site.router.chat_body(QUESTION, max_tokens=500), "stream": True}).encode()

        async def leave(session: aiohttp.ClientSession, number: int) -> None:
            try:
                async with asyncio.timeout(0.02 + 0.01 * (number % 20)):
                    async with session.post(site.router.url + "/v1/chat/completions", data=body) as response:
                        async for _ in response.content:
                            pass
            except TimeoutError:
                pass

        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            for start in range(0, 1000, 50):
                await asyncio.gather(*(leave(session, start + number) for number in range(50)))
        await site.router.wait_idle(20)
        report = await site.router.report()
        assert (report.in_flight, report.queued) == (0, 0)

        async def nothing_runs() -> bool:
            return site.running() == 0 and not site.cluster.held

        await wait_until(nothing_runs)
        seen = await site.router.stream(site.router.chat_body(QUESTION))
        assert seen.text == ANSWER
