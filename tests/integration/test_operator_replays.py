"""Replays in processes of their own: one at a time, ended when late, never in the way of the loop."""

import asyncio
import math
import sys
import time
from dataclasses import replace

import psutil
import pytest

from helpers_planner import auto_object
from helpers_traces import random_trace
from helpers_traffic import batch
from phasesplit.api.reports import RouterReport
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.replays import COMMAND, ReplayRunner
from phasesplit.planner import replay_schedule
from phasesplit.planner.mode_types import ModeInput
from phasesplit.planner.replay_schedule import usable

pytestmark = pytest.mark.integration

TRACE = random_trace(3, 1.3, 150, 4000, 200)
NOW_S = 1000.0
GIVEN = auto_object(now_s=NOW_S)
KEY = ("ns", "chat")


def busy_object() -> ObjectMemory:
    """An object whose router has served the trace and still serves."""
    memory = ObjectMemory("uid")
    memory.answers = (RouterAnswer("r0", RouterReport(in_flight=1)),)
    rows = batch(
        "a",
        0,
        [arrival.at_s for arrival in TRACE],
        now_s=TRACE[-1].at_s + 10,
        prompt_tokens=[arrival.prompt_tokens for arrival in TRACE],
        output_tokens=[arrival.output_tokens for arrival in TRACE],
    )
    memory.traffic.add("r0", rows, NOW_S)
    return memory


async def finished(runner: ReplayRunner, timeout_s: float = 110) -> float:
    """Wait for the replay; returns the longest time that the loop stood still."""
    longest_s, before_s = 0.0, time.monotonic()
    async with asyncio.timeout(timeout_s):
        while runner.is_busy:
            await asyncio.sleep(0.01)
            longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
    return longest_s


def later(seconds: float) -> ModeInput:
    return replace(GIVEN, now_s=NOW_S + seconds)


async def test_a_replay_answers_without_holding_up_the_loop() -> None:
    woken: list[tuple[str, str]] = []
    runner, memory = ReplayRunner(woken.append, deadline_s=100), busy_object()
    runner.consider(KEY, memory, GIVEN)
    assert runner.is_busy
    other = busy_object()
    runner.consider(("ns", "other"), other, GIVEN)  # one at a time over all objects
    assert other.replay_asked is None
    assert await finished(runner) < 2.0
    assert woken == [KEY]
    assert memory.replay_error == ""
    evidence = usable(memory.replay, later(30))
    assert evidence is not None
    assert evidence.outcome.requests == 150
    runner.consider(KEY, memory, later(30))  # the same question, fresh: nothing to do
    assert not runner.is_busy


async def test_at_rest_nothing_is_replayed() -> None:
    runner, memory = ReplayRunner(lambda _: None), busy_object()
    memory.answers = (RouterAnswer("r0", RouterReport(idle_s=500)),)
    runner.consider(KEY, memory, GIVEN)
    assert not runner.is_busy


BROKEN = {
    "late": ("import time; time.sleep(60)", "took over"),
    "no answer": ("import sys; sys.exit(3)", "status 3"),
    "nonsense": ("import sys; sys.stdin.read(); print('hello')", "not understood"),
    "closes its pipe": ("import os, time; os.close(0); time.sleep(0.3)", "replay"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_replay_that_fails_is_ended_and_reported(name: str) -> None:
    program, sentence = BROKEN[name]
    runner = ReplayRunner(lambda _: None, command=(sys.executable, "-c", program), deadline_s=4)
    memory = busy_object()
    runner.consider(KEY, memory, GIVEN)
    await finished(runner)
    assert sentence in memory.replay_error
    assert memory.replay is None
    assert not psutil.Process().children(recursive=True)


async def test_facts_that_cannot_be_are_reported_and_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replay_schedule.build_replay(GIVEN, busy_object().traffic.requests())
    assert job is not None
    odd = replace(job, hardware=replace(job.hardware, link_bytes_per_s=math.nan))
    monkeypatch.setattr(replay_schedule, "build_replay", lambda *_: odd)
    runner, memory = ReplayRunner(lambda _: None), busy_object()
    runner.consider(KEY, memory, GIVEN)
    assert not runner.is_busy
    assert "links of nan B/s" in memory.replay_error


async def test_the_answer_before_stays_when_a_later_replay_fails() -> None:
    memory = busy_object()
    good = ReplayRunner(lambda _: None, deadline_s=100)
    good.consider(KEY, memory, GIVEN)
    await finished(good)
    before = memory.replay
    bad = ReplayRunner(lambda _: None, command=(sys.executable, "-c", "raise SystemExit(1)"))
    bad.consider(KEY, memory, later(301))
    await finished(bad)
    assert memory.replay is before
    assert memory.replay_error


async def test_a_command_that_is_not_there_is_said() -> None:
    runner, memory = ReplayRunner(lambda _: None, command=("/nonexistent/python",)), busy_object()
    runner.consider(KEY, memory, GIVEN)
    await finished(runner)
    assert "could not be started" in memory.replay_error


async def test_closing_ends_the_process() -> None:
    runner = ReplayRunner(lambda _: None, command=(sys.executable, "-c", "import time; time.sleep(60)"))
    runner.consider(KEY, busy_object(), GIVEN)
    await asyncio.sleep(0.3)
    await runner.close()
    assert not psutil.Process().children(recursive=True)


async def test_a_job_that_is_no_job_is_one_sentence() -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate(b'{"given": 3}')
    assert (process.returncode, out) == (2, b"")
    assert err.count(b"\n") == 1
    assert b"Traceback" not in err


async def test_a_replay_needs_no_more_than_the_planner() -> None:
    heavy = "{'kopf', 'kubernetes', 'aiohttp', 'torch', 'numpy', 'prometheus_client'}"
    check = f"import sys, phasesplit.planner.replay_program; sys.exit(len({heavy} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", check)
    async with asyncio.timeout(60):
        assert await process.wait() == 0
