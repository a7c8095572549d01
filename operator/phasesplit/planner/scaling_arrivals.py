"""How many workers the requests that really came would have needed: bursts and lengths as they were.

The closed form of `capacity` takes arrivals for Poisson and lengths for log-normal. Here the recent
requests pass a queue with several servers, once for prefill and once for the places in decode batches,
and the fewest servers are sought that keep every class's share in target. Knows no bounds and no GPUs.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import log2

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.capacity import MOST_WORKERS, Need
from phasesplit.planner.demand import Hardware
from phasesplit.planner.performance import decode_step_s, prefill_chunk_tokens, prefill_times_s
from phasesplit.planner.simulation_types import Arrival

WINDOW_S = 120.0  # what is looked at for the need of now
SHORT_WINDOW_S = 45.0  # and for what has begun to grow
ENOUGH = 30  # requests in the window; with fewer the closed form is the better guess
MAX_COUNTED = 1500  # requests that pass the queues: what a tick may cost
MAX_BATCH = 64  # sequences of one decode worker, as its scheduler takes
_NEARLY = 0.6
_LASTING_BUSY = 0.5  # of their time that workers asked for anew would have had to be busy
_BATCH_STEP = 0.85  # of the TPOT target that a full batch's step may take
_LENGTHS_PER_DOUBLING = 4  # prompts are grouped by length this finely


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Requests at one of the two queues, as columns: so many small objects would cost more than the queue."""

    come_at_s: Sequence[float]
    take_s: Sequence[float]
    may_wait_s: Sequence[float]
    class_indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class SeenRequests:
    """A window's requests, oldest first, with what each takes at both queues."""

    arrivals: Sequence[Arrival]
    class_indices: Sequence[int]
    prefill_times_s: Sequence[float]
    classes: Sequence[LatencyClass]
    hardware: Hardware
    now_s: float
    stands_for: float  # so many requests each: of more than may be counted there is a sample
    batch: int  # sequences of one decode worker
    step_s: float  # of a full batch

    def last(self, window_s: float) -> "SeenRequests":
        """The newest of them."""
        since_s = self.now_s - window_s
        first = bisect_left(self.arrivals, since_s, key=lambda arrival: arrival.at_s)
        return _put_together(
            self.arrivals[first:],
            self.class_indices[first:],
            self.prefill_times_s[first:],
            self.classes,
            self.hardware,
            now_s=self.now_s,
            stands_for=self.stands_for,
        )

    def need(self, *, speed_up: float = 1.0, like: Need | None = None) -> Need | None:
        """Prefill and decode workers for these requests, come `speed_up` times as fast; `like` is a guess.

        None where there were too few to tell, too many to count, or where a request alone would miss its
        target: the closed form is for all three.
        """
        if len(self.arrivals) < ENOUGH or self.stands_for > 1:
            return None
        allowed = _allowed_misses(self.class_indices, self.classes)
        prefill_jobs = self._prefill_jobs(speed_up)
        prefill = _fewest(prefill_jobs, allowed, 1, like.prefill if like is not None else None)
        if prefill is None:
            return None
        decode_jobs = self._decode_jobs(_serve(prefill_jobs, prefill))
        decode = _fewest(decode_jobs, allowed, self.batch, like.decode if like is not None else None)
        return None if decode is None else Need(prefill, decode, feasible=True)

    def lasting(self, *, speed_up: float = 1.0) -> Need:
        """The most workers that the work of the last `SHORT_WINDOW_S` justifies.

        A burst that is over before a worker could start is no reason to start one.
        """
        steps = sum(max(0, arrival.output_tokens - 1) for arrival in self.arrivals)
        factor = speed_up * self.stands_for / SHORT_WINDOW_S / _LASTING_BUSY
        prefill = math.ceil(factor * sum(self.prefill_times_s))
        decode = math.ceil(factor * steps * self.step_s / self.batch)
        return Need(max(1, prefill), max(1, decode), feasible=True)

    def is_nearly(self, whole: "SeenRequests") -> bool:
        """Is this most of so many requests that not all were counted? Then a count of these says no more."""
        return len(whole.arrivals) >= MAX_COUNTED and len(self.arrivals) > _NEARLY * len(whole.arrivals)

    def _prefill_jobs(self, speed_up: float) -> _Jobs:
        targets_s = [item.ttft_s for item in self.classes]
        indices, take_s = self.class_indices, self.prefill_times_s
        begin_s = self.arrivals[0].at_s
        return _Jobs(
            [begin_s + (arrival.at_s - begin_s) / speed_up for arrival in self.arrivals],
            take_s,
            [targets_s[index] - time_s for index, time_s in zip(indices, take_s, strict=True)],
            indices,
        )

    def _decode_jobs(self, ready_at: Sequence[float]) -> _Jobs:
        """Each answer takes a place in a batch for as long as a full batch's steps last."""
        steps = [arrival.output_tokens - 1 for arrival in self.arrivals]
        spare_s = [item.tpot_s - self.step_s for item in self.classes]  # of each step
        order = [row for row in sorted(range(len(steps)), key=ready_at.__getitem__) if steps[row] > 0]
        indices = [self.class_indices[row] for row in order]
        return _Jobs(
            [ready_at[row] for row in order],
            [steps[row] * self.step_s for row in order],
            [steps[row] * spare_s[index] for row, index in zip(order, indices, strict=True)],
            indices,
        )


def see_requests(
    arrivals: Sequence[Arrival], classes: Sequence[LatencyClass], hardware: Hardware, *, now_s: float
) -> SeenRequests | None:
    """What the needs are counted from; None where no requests are known.

    Of more than `MAX_COUNTED` the newest count, as long as they reach over the short window; else every so
    many of that window stand for all, which is enough for the work they bring but not for how they queue.
    """
    if not arrivals or not classes:
        return None
    recent = [arrival for arrival in arrivals if now_s - WINDOW_S <= arrival.at_s <= now_s]
    stands_for = 1.0
    if len(recent) > MAX_COUNTED:
        crowd = [arrival for arrival in recent if now_s - SHORT_WINDOW_S <= arrival.at_s]
        recent = recent[-MAX_COUNTED:]
        if len(crowd) > MAX_COUNTED:
            recent = crowd[:: math.ceil(len(crowd) / MAX_COUNTED)]
            stands_for = len(crowd) / len(recent)
    last = len(classes) - 1
    return _put_together(
        recent,
        [arrival.class_index if arrival.class_index <= last else 0 for arrival in recent],
        _prefill_times_s(recent, hardware),
        classes,
        hardware,
        now_s=now_s,
        stands_for=stands_for,
    )


def _put_together(
    arrivals: Sequence[Arrival],
    class_indices: Sequence[int],
    prefill_times_s: Sequence[float],
    classes: Sequence[LatencyClass],
    hardware: Hardware,
    *,
    now_s: float,
    stands_for: float,
) -> SeenRequests:
    batch, step_s = _full_batch(arrivals, classes, hardware)
    return SeenRequests(
        arrivals, class_indices, prefill_times_s, classes, hardware, now_s, stands_for, batch, step_s
    )


def _prefill_times_s(arrivals: Sequence[Arrival], hardware: Hardware) -> list[float]:
    profile = hardware.prefill_profile
    chunks: dict[int, int] = {}

    def chunk_of(prompt_tokens: int) -> int:
        """It hardly changes with the prompt: looked for once per class of lengths."""
        size = round(_LENGTHS_PER_DOUBLING * log2(prompt_tokens if prompt_tokens > 1 else 1))
        chunk = chunks.get(size)
        if chunk is None:
            chunk = chunks[size] = prefill_chunk_tokens(profile, prompt_tokens)
        return chunk

    return prefill_times_s(
        profile, ((item.prompt_tokens, item.cached_tokens, chunk_of(item.prompt_tokens)) for item in arrivals)
    )


def _full_batch(
    arrivals: Sequence[Arrival], classes: Sequence[LatencyClass], hardware: Hardware
) -> tuple[int, float]:
    """Sequences of one decode worker for which there is KV room and time, and what a step of them takes."""
    outputs = squares = products = 0
    for arrival in arrivals:
        tokens = arrival.output_tokens
        outputs += tokens
        squares += tokens * tokens
        products += arrival.prompt_tokens * tokens
    weight = max(1, outputs)
    profile = hardware.decode_profile
    slope_s = decode_step_s(profile, 1, (products + squares / 2) / weight) - profile.base_s
    tightest_s = min(item.tpot_s for item in classes)
    by_time = (_BATCH_STEP * tightest_s - profile.base_s) / max(slope_s, 1e-12)
    by_room = hardware.kv_tokens_per_worker / max(1.0, (products + squares) / weight)
    batch = max(1, int(min(by_time, by_room, MAX_BATCH)))
    return batch, decode_step_s(profile, batch, products / weight)


def _allowed_misses(indices: Sequence[int], classes: Sequence[LatencyClass]) -> list[float]:
    """Requests of each class that may be late at either queue: half of what may be late at all."""
    return [indices.count(index) * (1 - item.percentile / 100) / 2 for index, item in enumerate(classes)]


def _serve(jobs: _Jobs, servers: int) -> list[float]:
    """When each job is done, first come first served."""
    free_at = [-math.inf] * servers
    done = []
    for at_s, takes_s in zip(jobs.come_at_s, jobs.take_s, strict=True):
        free_s = free_at[0]
        done_s = (free_s if free_s > at_s else at_s) + takes_s
        done.append(done_s)
        heapreplace(free_at, done_s)
    return done


def _fewest(jobs: _Jobs, allowed: Sequence[float], places: int, guess: int | None) -> int | None:
    """Fewest workers of so many places each that keep the misses within what is allowed."""
    if not jobs.come_at_s:
        return 1
    hopeless = [0] * len(allowed)
    for wait_s, index in zip(jobs.may_wait_s, jobs.class_indices, strict=True):
        if wait_s < 0:
            hopeless[index] += 1
    if any(count > most for count, most in zip(hopeless, allowed, strict=True)):
        return None
    span_s = max(1e-9, jobs.come_at_s[-1] - jobs.come_at_s[0] + max(jobs.may_wait_s))
    least = max(1, math.ceil(0.8 * sum(jobs.take_s) / span_s / places))
    return _first(lambda workers: _suffice(jobs, allowed, workers * places), least, guess)


def _suffice(jobs: _Jobs, allowed: Sequence[float], servers: int) -> bool:
    """Do so many servers keep the misses of every class within what is allowed?"""
    left = list(allowed)
    free_at = [-math.inf] * servers
    columns = zip(jobs.come_at_s, jobs.take_s, jobs.may_wait_s, jobs.class_indices, strict=True)
    for at_s, takes_s, may_wait_s, index in columns:
        free_s = free_at[0]
        begins_s = free_s if free_s > at_s else at_s
        if begins_s - at_s > may_wait_s:
            left[index] -= 1
            if left[index] < 0:
                return False
        heapreplace(free_at, begins_s + takes_s)
    return True


def _first(suffices: Callable[[int], bool], least: int, guess: int | None) -> int | None:
    """Smallest count from `least` on for which a monotone predicate holds; a good guess saves most looks."""
    low, high = least, max(least, guess or 0)
    step = 1 if guess is not None else max(1, high // 4)
    held_at_once = True
    while not suffices(high):
        if high >= MOST_WORKERS:
            return None
        held_at_once = False
        low, high, step = high + 1, min(MOST_WORKERS, high + step), 2 * step
    step = 1
    while guess is not None and held_at_once and low < high:
        probe = max(low, high - step)
        if not suffices(probe):
            low = probe + 1
            break
        high, step = probe, 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low
