"""How many workers the requests that really came would have needed: bursts and lengths as they were.

The closed form of `capacity` takes arrivals for Poisson and lengths for log-normal. Here the recent
requests pass a queue with several servers, once for prefill and once for the places in decode batches,
and the fewest servers are sought that keep every class's share in target. Knows no bounds and no GPUs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.capacity import MOST_WORKERS, Need
from phasesplit.planner.demand import Hardware
from phasesplit.planner.performance import decode_step_s, prefill_chunk_tokens, prefill_s
from phasesplit.planner.simulation_types import Arrival

WINDOW_S = 120.0  # what is looked at for the need of now
SHORT_WINDOW_S = 45.0  # and for what has begun to grow
_LASTING_BUSY = 0.5  # of their time that workers asked for anew would have had to be busy
ENOUGH = 30  # requests in the window; with fewer the closed form is the better guess
MAX_BATCH = 64  # sequences of one decode worker, as its scheduler takes
_BATCH_STEP = 0.85  # of the TPOT target that a full batch's step may take
_LENGTHS_PER_DOUBLING = 4  # prompts are grouped by length this finely


@dataclass(frozen=True, slots=True)
class _Job:
    """One request at one of the two queues."""

    at_s: float
    service_s: float
    patience_s: float  # it may wait that long
    class_index: int


def needed_for_arrivals(
    arrivals: Sequence[Arrival],
    classes: Sequence[LatencyClass],
    hardware: Hardware,
    *,
    now_s: float,
    speed_up: float = 1.0,
    window_s: float = WINDOW_S,
) -> Need | None:
    """Prefill and decode workers for the last minutes' requests, come `speed_up` times as fast.

    None where there were too few to tell, or where a request alone would miss its target.
    """
    recent = [arrival for arrival in arrivals if now_s - window_s <= arrival.at_s <= now_s]
    if len(recent) < ENOUGH or not classes:
        return None
    allowed = _allowed_misses(recent, classes)
    first_s = recent[0].at_s
    prefill_jobs = _prefill_jobs(recent, classes, hardware, first_s, speed_up)
    prefill = _fewest(prefill_jobs, allowed, 1)
    if prefill is None:
        return None
    batch = _full_batch(recent, classes, hardware)
    finished_at = serve(prefill_jobs, prefill)
    decode_jobs = _decode_jobs(recent, classes, hardware, finished_at, batch)
    decode = _fewest(decode_jobs, allowed, batch)
    return None if decode is None else Need(prefill, decode, feasible=True)


def lasting_need(
    arrivals: Sequence[Arrival],
    classes: Sequence[LatencyClass],
    hardware: Hardware,
    *,
    now_s: float,
    speed_up: float = 1.0,
) -> Need | None:
    """The most workers that the last moments' work justifies: a burst that is over before a worker could
    start is no reason to start one.
    """
    if not arrivals or not classes:
        return None
    recent = [arrival for arrival in arrivals if now_s - SHORT_WINDOW_S <= arrival.at_s <= now_s]
    if not recent:
        return Need(1, 1, feasible=True)
    prefill_jobs = _prefill_jobs(recent, classes, hardware, recent[0].at_s, 1.0)
    batch = _full_batch(recent, classes, hardware)
    decode_jobs = _decode_jobs(recent, classes, hardware, [0.0] * len(recent), batch)
    factor = speed_up / SHORT_WINDOW_S / _LASTING_BUSY
    prefill, decode = (
        max(1, math.ceil(factor * sum(job.service_s for job in jobs) / places))
        for jobs, places in ((prefill_jobs, 1), (decode_jobs, batch))
    )
    return Need(prefill, decode, feasible=True)


def serve(jobs: Sequence[_Job], servers: int) -> list[float]:
    """When each job is done, first come first served."""
    free_at = [-math.inf] * servers
    done = []
    for job in jobs:
        begins_at = max(job.at_s, free_at[0])
        done.append(begins_at + job.service_s)
        heapreplace(free_at, done[-1])
    return done


def _allowed_misses(arrivals: Sequence[Arrival], classes: Sequence[LatencyClass]) -> list[float]:
    """Requests of each class that may be late at either queue: half of what may be late at all."""
    counts = [0] * len(classes)
    for arrival in arrivals:
        counts[_class_index(arrival, classes)] += 1
    return [count * (1 - item.percentile / 100) / 2 for count, item in zip(counts, classes, strict=True)]


def _class_index(arrival: Arrival, classes: Sequence[LatencyClass]) -> int:
    return arrival.class_index if arrival.class_index < len(classes) else 0


def _prefill_jobs(
    arrivals: Sequence[Arrival],
    classes: Sequence[LatencyClass],
    hardware: Hardware,
    first_s: float,
    speed_up: float,
) -> list[_Job]:
    profile = hardware.prefill_profile
    chunks: dict[int, int] = {}
    jobs = []
    for arrival in arrivals:
        index = _class_index(arrival, classes)
        # The chunk hardly changes with the prompt: looked for once per class of lengths.
        size = round(_LENGTHS_PER_DOUBLING * math.log2(max(1, arrival.prompt_tokens)))
        chunk = chunks.get(size)
        if chunk is None:
            chunk = chunks[size] = prefill_chunk_tokens(profile, arrival.prompt_tokens)
        service_s = prefill_s(profile, arrival.prompt_tokens, chunk, cached_tokens=arrival.cached_tokens)
        at_s = first_s + (arrival.at_s - first_s) / speed_up
        jobs.append(_Job(at_s, service_s, classes[index].ttft_s - service_s, index))
    return jobs


def _full_batch(arrivals: Sequence[Arrival], classes: Sequence[LatencyClass], hardware: Hardware) -> int:
    """Sequences of one decode worker for which there is KV room and time."""
    outputs = sum(arrival.output_tokens for arrival in arrivals)
    reserved = sum((a.prompt_tokens + a.output_tokens) * a.output_tokens for a in arrivals) / max(1, outputs)
    context = sum((a.prompt_tokens + a.output_tokens / 2) * a.output_tokens for a in arrivals)
    context /= max(1, outputs)
    profile = hardware.decode_profile
    slope_s = decode_step_s(profile, 1, context) - profile.base_s
    tightest_s = min(item.tpot_s for item in classes)
    by_time = (_BATCH_STEP * tightest_s - profile.base_s) / max(slope_s, 1e-12)
    by_room = hardware.kv_tokens_per_worker / max(1.0, reserved)
    return max(1, int(min(by_time, by_room, MAX_BATCH)))


def _decode_jobs(
    arrivals: Sequence[Arrival],
    classes: Sequence[LatencyClass],
    hardware: Hardware,
    ready_at: Sequence[float],
    batch: int,
) -> list[_Job]:
    """Each answer takes a place in a batch for as long as a full batch's steps last."""
    profile = hardware.decode_profile
    outputs = sum(arrival.output_tokens for arrival in arrivals)
    context = sum(a.prompt_tokens * a.output_tokens for a in arrivals) / max(1, outputs)
    step_s = decode_step_s(profile, batch, context)
    jobs = []
    for arrival, at_s in zip(arrivals, ready_at, strict=True):
        steps = arrival.output_tokens - 1
        if steps > 0:
            index = _class_index(arrival, classes)
            patience_s = steps * (classes[index].tpot_s - step_s)
            jobs.append(_Job(at_s, steps * step_s, patience_s, index))
    return sorted(jobs, key=lambda job: job.at_s)


def _fewest(jobs: Sequence[_Job], allowed: Sequence[float], places: int) -> int | None:
    """Fewest workers of so many places each that keep the misses within what is allowed."""
    hopeless = [0] * len(allowed)
    for job in jobs:
        hopeless[job.class_index] += job.patience_s < 0
    if any(count > most for count, most in zip(hopeless, allowed, strict=True)):
        return None
    if not jobs:
        return 1

    def suffices(workers: int) -> bool:
        late = [0] * len(allowed)
        for job, done_at in zip(jobs, serve(jobs, workers * places), strict=True):
            if done_at - job.service_s - job.at_s > job.patience_s:
                late[job.class_index] += 1
                if late[job.class_index] > allowed[job.class_index]:
                    return False
        return True

    span_s = max(1e-9, jobs[-1].at_s - jobs[0].at_s + max(job.patience_s for job in jobs))
    least = max(1, math.ceil(0.8 * sum(job.service_s for job in jobs) / span_s / places))
    return _first(suffices, least)


def _first(suffices: Callable[[int], bool], least: int) -> int | None:
    """Smallest count from `least` on for which a monotone predicate holds."""
    low, high = least, least
    while not suffices(high):
        if high >= MOST_WORKERS:
            return None
        low, high = high + 1, min(MOST_WORKERS, high + max(1, high // 4))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low
