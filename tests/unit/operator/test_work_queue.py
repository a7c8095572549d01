"""The work queue: one pass per key at a time, nothing lost, errors retried, gone keys dropped."""

import asyncio
import itertools
import time
from collections import Counter

from phasesplit.cluster.errors import NotLeaderError, ThrottledError, UnavailableError
from phasesplit.operator.queue import Key, WorkQueue

A, B = ("ns", "a"), ("ns", "b")


async def _run_for(queue: WorkQueue, seconds: float) -> None:
    try:
        await asyncio.wait_for(queue.run(num_workers=3), seconds)
    except TimeoutError:
        return


async def test_a_key_added_many_times_is_looked_at_once() -> None:
    seen: Counter[Key] = Counter()

    async def process(key: Key) -> None:
        seen[key] += 1

    queue = WorkQueue(process, time.monotonic)
    for _ in range(50):
        queue.add(A, 0.01)
    queue.add(B)
    await _run_for(queue, 0.1)
    assert seen == {A: 1, B: 1}


async def test_a_key_is_never_worked_on_twice_at_once_and_a_wake_during_work_counts() -> None:
    active, most, done = 0, 0, 0

    async def process(key: Key) -> None:
        nonlocal active, most, done
        active += 1
        most = max(most, active)
        if done == 0:
            queue.add(key)
        await asyncio.sleep(0.02)
        active -= 1
        done += 1

    queue = WorkQueue(process, time.monotonic)
    queue.add(A)
    await _run_for(queue, 0.15)
    assert (most, done) == (1, 2)


async def test_another_key_does_not_wait_for_a_slow_one() -> None:
    seen = []

    async def process(key: Key) -> None:
        if key == A:
            await asyncio.sleep(10)
        seen.append(key)

    queue = WorkQueue(process, time.monotonic)
    queue.add(A)
    queue.add(B)
    await _run_for(queue, 0.1)
    assert seen == [B]


async def test_an_error_is_retried_with_a_growing_delay_and_forgotten_after_success() -> None:
    times: list[float] = []

    async def process(key: Key) -> None:
        times.append(time.monotonic())
        if len(times) < 4:
            raise UnavailableError("away")

    queue = WorkQueue(process, time.monotonic, first_delay_s=0.02)
    queue.add(A)
    await _run_for(queue, 0.4)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == 4
    assert gaps[0] >= 0.02 and gaps[1] >= 0.04 and gaps[2] >= 0.08


async def test_the_server_says_when_to_come_back() -> None:
    times: list[float] = []

    async def process(key: Key) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            error = ThrottledError("later")
            error.retry_after_s = 0.1
            raise error

    queue = WorkQueue(process, time.monotonic, first_delay_s=0.001)
    queue.add(A)
    await _run_for(queue, 0.3)
    assert times[1] - times[0] >= 0.1


async def test_a_bug_in_one_object_does_not_end_the_loop() -> None:
    seen = []

    async def process(key: Key) -> None:
        if key == A:
            raise KeyError("a bug")
        seen.append(key)

    queue = WorkQueue(process, time.monotonic, first_delay_s=5)
    queue.add(A)
    await _run_for(queue, 0.05)
    queue.add(B)
    await _run_for(queue, 0.05)
    assert seen == [B]


async def test_a_copy_without_the_lease_does_not_hurry() -> None:
    calls = 0

    async def process(key: Key) -> None:
        nonlocal calls
        calls += 1
        raise NotLeaderError("not the leader")

    queue = WorkQueue(process, time.monotonic, first_delay_s=0.001)
    queue.add(A)
    await _run_for(queue, 0.1)
    assert calls == 1


async def test_a_pass_asks_for_the_next_one_and_a_gone_key_is_dropped() -> None:
    calls = 0

    async def process(key: Key) -> float | None:
        nonlocal calls
        calls += 1
        return 0.01 if calls < 3 else None

    queue = WorkQueue(process, time.monotonic)
    queue.add(A)
    queue.add(B, 60)
    queue.forget(B)
    await _run_for(queue, 0.2)
    assert calls == 3
    assert len(queue) == 0


def test_the_queue_is_bounded() -> None:
    async def process(key: Key) -> None:
        """Never called."""

    queue = WorkQueue(process, time.monotonic, max_keys=2)
    for name in "abc":
        queue.add(("ns", name))
    assert len(queue) == 2
