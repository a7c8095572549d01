"""The router process under load: priority, refusals, mode switches, draining, changes of the file."""

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from helpers_fake_worker import expected_text
from helpers_router import ROOT, Site, Streamed, colocated_table, running_site, split_table, wait_until
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import LatencyClass, WhenInfeasible

pytestmark = pytest.mark.integration
QUESTION = "How long is a while?"
ANSWER = expected_text(f"user:{QUESTION}")
# One second per 100 prompt tokens: the router can predict, the script does not take that long.
SLOW = StepProfile(base_s=0.001, per_prefill_token_s=0.01, per_decode_sequence_s=0.001, num_samples=100)


async def _give_profile(site: Site, profile: StepProfile) -> None:
    for worker in site.workers:
        worker.profile = profile
    version = 50
    site.router.route(split_table(version, classes=(await _classes(site))), site.workers)

    async def known() -> bool:
        workers = (await site.router.report()).workers
        return len(workers) == len(site.workers) and all(worker.profile == profile for worker in workers)

    await wait_until(known)


async def _classes(site: Site) -> tuple[LatencyClass, ...]:
    table = json.loads(site.router.routing_file.read_text())["table"]
    return tuple(LatencyClass.model_validate(item) for item in table["classes"])


async def test_higher_priority_goes_first() -> None:
    async with running_site() as site:
        site.prefills[0].prefill_s = 1.0
        router = site.router
        done: list[str] = []

        async def ask(name: str) -> None:
            await router.stream(router.chat_body(QUESTION, max_tokens=2), x_slo_class=name)
            done.append(name)

        tasks = [asyncio.create_task(ask("batch")) for _ in range(16)]

        async def waiting() -> bool:
            return (await router.report()).queued == 12

        await wait_until(waiting)
        tasks += [asyncio.create_task(ask("interactive")) for _ in range(4)]
        await asyncio.gather(*tasks)
        # Four batch requests were at the worker already, whose own order puts interactive ones first.
        assert done[-8:] == ["batch"] * 8
        order = [leg.internal.slo_class for leg in site.prefills[0].legs]
        assert order == ["batch"] * 4 + ["interactive"] * 4 + ["batch"] * 12
        assert site.prefills[0].most_running <= 8


async def test_a_predicted_miss_is_refused_with_a_reason_and_a_time() -> None:
    async with running_site() as site:
        await _give_profile(site, SLOW)
        router = site.router
        site.prefills[0].prefill_s = site.decodes[0].prefill_s = 1.5
        prompt = "word " * 80  # about 100 tokens, 1 s
        busy = asyncio.create_task(router.post(router.chat_body(prompt)))
        await asyncio.sleep(0.3)
        status, answer, headers = await router.post(router.chat_body(prompt))
        assert status == 429
        assert "waiting for prefill" in answer["error"]["message"]
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert int(headers["Retry-After"]) >= 1
        # The same request is welcome in a class that has the time.
        status, _, _ = await router.post(router.chat_body(prompt), x_slo_class="batch")
        assert status == 200
        assert (await busy)[0] == 200
        report = await router.report()
        assert [item.rejected for item in report.classes] == [1, 0]
        assert report.classes[0].finished == 1


async def test_an_infeasible_request_follows_its_class() -> None:
    classes = (
        LatencyClass(name="kind", ttft_s=0.5, tpot_s=1),
        LatencyClass(name="strict", ttft_s=0.5, tpot_s=1, when_infeasible=WhenInfeasible.REJECT),
    )
    async with running_site(table=split_table(classes=classes)) as site:
        await _give_profile(site, SLOW)
        prompt = "word " * 200
        seen = await site.router.stream(site.router.chat_body(prompt), x_slo_class="kind")
        assert seen.done
        status, answer, _ = await site.router.post(site.router.chat_body(prompt), x_slo_class="strict")
        assert status == 429
        assert "alone takes" in answer["error"]["message"]


async def test_a_full_queue_refuses() -> None:
    async with running_site(flags=("--max-queued", "3")) as site:
        site.prefills[0].prefill_s = 0.5
        router = site.router
        answers = await asyncio.gather(*(router.post(router.chat_body(QUESTION)) for _ in range(20)))
        statuses = [status for status, _, _ in answers]
        assert sorted(set(statuses)) == [200, 429]
        assert statuses.count(200) == 7
        assert (
            "queue is full"
            in next(answer for status, answer, _ in answers if status == 429)["error"]["message"]
        )


class Load:
    """A steady load that must not lose anything."""

    def __init__(self, site: Site, rate_per_s: float) -> None:
        self.site, self.gap_s = site, 1 / rate_per_s
        self.seen: list[Streamed] = []
        self._tasks: list[asyncio.Task[Streamed]] = []
        self._stop = False

    async def run(self) -> None:
        """Start requests until stopped, then wait for all."""
        router = self.site.router
        while not self._stop:
            self._tasks.append(asyncio.create_task(router.stream(router.chat_body(QUESTION))))
            await asyncio.sleep(self.gap_s)
        self.seen = list(await asyncio.gather(*self._tasks))

    def stop(self) -> None:
        """Start no more."""
        self._stop = True


async def test_a_mode_switch_under_load_loses_nothing() -> None:
    async with running_site(prefills=2, decodes=2) as site:
        for worker in site.workers:
            worker.token_s = worker.prefill_s = 0.02
        load = Load(site, 30)
        running = asyncio.create_task(load.run())
        times_s = []
        for version in range(2, 8):
            await asyncio.sleep(0.5)
            table = colocated_table(version) if version % 2 == 0 else split_table(version)
            site.router.route(table, site.workers)
            written_s = time.monotonic()
            await site.router.wait_version(version)
            times_s.append(time.monotonic() - written_s)
        load.stop()
        await running
        assert all((seen.status, seen.text, seen.done) == (200, ANSWER, True) for seen in load.seen)
        modes = {seen.headers["x-phasesplit-mode"] for seen in load.seen}
        assert modes == {"Split", "Colocated"}
        assert max(times_s) < 3
        report = await site.router.report()
        assert (report.failed_total, report.migrations_total) == (0, 0)


async def test_a_broken_file_leaves_the_last_table_in_force() -> None:
    async with running_site() as site:
        site.router.routing_file.write_text('{"table": {"version": "')
        await asyncio.sleep(0.4)
        assert (await site.router.stream(site.router.chat_body(QUESTION))).text == ANSWER
        assert "cannot be used" in site.router.log()
        site.router.route(split_table(9), site.workers)
        await site.router.wait_version(9)


async def test_sigterm_finishes_streams_and_takes_nothing_new() -> None:
    async with running_site(flags=("--drain-s", "10")) as site:
        router = site.router
        site.decodes[0].token_s = 0.6
        stream = asyncio.create_task(router.stream(router.chat_body(QUESTION)))
        await asyncio.sleep(0.4)
        router.terminate()
        await asyncio.sleep(0.3)
        async with router.session.get(router.url + "/ready") as response:
            assert response.status == 503
        # Whoever has not heard yet that the pod is leaving is still served.
        assert (await router.stream(router.chat_body(QUESTION, max_tokens=1))).done
        await asyncio.sleep(2.2)
        with pytest.raises(OSError):
            await _new_connection(router.port)
        seen = await stream
        assert (seen.text, seen.done) == (ANSWER, True)
        assert router.process is not None
        async with asyncio.timeout(5):
            assert await router.process.wait() == 0


async def test_the_drain_has_a_deadline() -> None:
    async with running_site(flags=("--drain-s", "0.5")) as site:
        site.decodes[0].stall_at = 2
        stream = asyncio.create_task(site.router.stream(site.router.chat_body(QUESTION)))
        await asyncio.sleep(0.3)
        site.router.terminate()
        assert site.router.process is not None
        async with asyncio.timeout(8):
            assert await site.router.process.wait() == 0
        await asyncio.gather(stream, return_exceptions=True)
        await site.wait_freed(site.decodes[0])


async def _new_connection(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    return reader


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--port", "99999"), "--port 99999"),
        (("--stall-s", "0"), "--stall-s 0"),
        (("--admin-token-file", "/nowhere/token"), "--admin-token-file /nowhere/token"),
        (("--api-keys-dir", "/nowhere"), "--api-keys-dir /nowhere"),
        ((), "set KUBECONFIG or pass --routing-file"),
    ],
)
def test_bad_flags_are_one_sentence(flags: tuple[str, ...], named: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in ("worker", "operator"))
    done = subprocess.run(
        [sys.executable, "-m", "phasesplit_router", "--object", "a", "--namespace", "b", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
