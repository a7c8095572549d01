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
from operator import itemgetter

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.capacity import MOST_WORKERS, Need
from phasesplit.planner.demand import Hardware
from phasesplit.planner.performance import decode_step_s, prefill_chunk_tokens, prefill_s
from phasesplit.planner.simulation_types import Arrival

WINDOW_S = 120.0  # what is looked at for the need of now
SHORT_WINDOW_S = 45.0  # and for what has begun to grow
ENOUGH = 30  # requests in the window; with fewer the closed form is the better guess
MAX_COUNTED = 1500  # requests that pass the queues: what a tick may cost
MAX_BATCH = 64  # sequences of one decode worker, as its scheduler takes
_LASTING_BUSY = 0.5  # of their time that workers asked for anew would have had to be busy
_BATCH_STEP = 0.85  # of the TPOT target that a full batch's step may take
_LENGTHS_PER_DOUBLING = 4  # prompts are grouped by length this finely


# One request at one of the two queues: when it comes, what it takes, how long it may wait, its class.
_Job = tuple[float, float, float, int]


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
        indices = self.class_indices
        allowed = _allowed_misses(indices, self.classes)
        targets_s = [item.ttft_s for item in self.classes]
        begin_s = self.arrivals[0].at_s
        prefill_jobs = [
            (begin_s + (arrival.at_s - begin_s) / speed_up, service_s, targets_s[index] - service_s, index)
            for arrival, service_s, index in zip(self.arrivals, self.prefill_times_s, indices, strict=True)
        ]
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

    def _decode_jobs(self, ready_at: Sequence[float]) -> list[_Job]:
        """Each answer takes a place in a batch for as long as a full batch's steps last."""
        step_s = self.step_s
        spare_s = [item.tpot_s - step_s for item in self.classes]  # of each step
        jobs = [
            (at_s, steps * step_s, steps * spare_s[index], index)
            for arrival, index, at_s in zip(self.arrivals, self.class_indices, ready_at, strict=True)
            if (steps := arrival.output_tokens - 1) > 0
        ]
        return sorted(jobs, key=itemgetter(0))


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
    times_s = []
    for arrival in arrivals:
        # The chunk hardly changes with the prompt: looked for once per class of lengths.
        size = round(_LENGTHS_PER_DOUBLING * math.log2(max(1, arrival.prompt_tokens)))
        chunk = chunks.get(size)
        if chunk is None:
            chunk = chunks[size] = prefill_chunk_tokens(profile, arrival.prompt_tokens)
        times_s.append(prefill_s(profile, arrival.prompt_tokens, chunk, cached_tokens=arrival.cached_tokens))
    return times_s


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


def _serve(jobs: Sequence[_Job], servers: int) -> list[float]:
    """When each job is done, first come first served."""
    free_at = [-math.inf] * servers
    done = []
    for at_s, service_s, _, _ in jobs:
        free_s = free_at[0]
        done_s = (free_s if free_s > at_s else at_s) + service_s
        done.append(done_s)
        heapreplace(free_at, done_s)
    return done


def _fewest(jobs: Sequence[_Job], allowed: Sequence[float], places: int, guess: int | None) -> int | None:
    """Fewest workers of so many places each that keep the misses within what is allowed."""
    hopeless = [0] * len(allowed)
    work_s = longest_s = 0.0
    for _, service_s, patience_s, index in jobs:
        work_s += service_s
        if patience_s > longest_s:
            longest_s = patience_s
        elif patience_s < 0:
            hopeless[index] += 1
    if any(count > most for count, most in zip(hopeless, allowed, strict=True)):
        return None
    if not jobs:
        return 1
    span_s = max(1e-9, jobs[-1][0] - jobs[0][0] + longest_s)
    least = max(1, math.ceil(0.8 * work_s / span_s / places))
    return _first(lambda workers: _suffice(jobs, allowed, workers * places), least, guess)


def _suffice(jobs: Sequence[_Job], allowed: Sequence[float], servers: int) -> bool:
    """Do so many servers keep the misses of every class within what is allowed?"""
    left = list(allowed)
    free_at = [-math.inf] * servers
    for at_s, service_s, patience_s, index in jobs:
        free_s = free_at[0]
        begins_s = free_s if free_s > at_s else at_s
        if begins_s - at_s > patience_s:
            left[index] -= 1
            if left[index] < 0:
                return False
        heapreplace(free_at, begins_s + service_s)
    return True


def _first(suffices: Callable[[int], bool], least: int, guess: int | None) -> int | None:
    """Smallest count from `least` on for which a monotone predicate holds; a good guess saves most looks."""
    low, high = least, max(least, guess or 0)
    while not suffices(high):
        if high >= MOST_WORKERS:
            return None
        low, high = high + 1, min(MOST_WORKERS, high + max(1, high // 4))
    if guess is not None and low < high and not suffices(high - 1):
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low
