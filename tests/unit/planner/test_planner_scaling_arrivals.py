"""Workers for the requests that really came: bursts, lengths, windows, and what a burst may not ask for."""

import random
from dataclasses import replace

import pytest

from helpers_planner import SCALING_CLASSES, SMALL_GPU, scaling_input
from helpers_traces import random_trace
from phasesplit.planner.capacity import Need
from phasesplit.planner.demand import Hardware
from phasesplit.planner.performance import prefill_s, prefill_times_s
from phasesplit.planner.scaling import plan_scaling
from phasesplit.planner.scaling_arrivals import MAX_COUNTED, SHORT_WINDOW_S, see_requests
from phasesplit.planner.simulation_types import Arrival

HARDWARE = Hardware(SMALL_GPU, SMALL_GPU, kv_tokens_per_worker=60_000)


def steady(rate: float, seed: int = 1) -> tuple[Arrival, ...]:
    return tuple(random_trace(seed, rate, int(120 * rate), 2000, 100))


def needed(arrivals: tuple[Arrival, ...], **more: float) -> tuple[int, int] | None:
    seen = see_requests(arrivals, SCALING_CLASSES, HARDWARE, now_s=120.0)
    found = seen.need(**more) if seen is not None else None
    return None if found is None else (found.prefill, found.decode)


def lasting(arrivals: tuple[Arrival, ...], now_s: float) -> Need:
    seen = see_requests(arrivals, SCALING_CLASSES, HARDWARE, now_s=now_s)
    assert seen is not None
    return seen.last(SHORT_WINDOW_S).lasting()


def test_too_few_requests_say_nothing() -> None:
    assert needed(steady(0.2)) is None
    assert needed(()) is None


def test_more_load_needs_more_workers() -> None:
    small, large = needed(steady(4.0)), needed(steady(4.0), speed_up=3.0)
    assert small is not None
    assert large is not None
    assert large[0] > small[0]
    assert large[1] >= small[1]


def test_a_burst_needs_more_prefill_than_the_same_requests_spread_out() -> None:
    even = steady(4.0)
    burst = tuple(replace(item, at_s=60.0 + item.at_s / 12) for item in even)
    spread, crowded = needed(even), needed(burst)
    assert spread is not None
    assert crowded is not None
    assert crowded[0] > 2 * spread[0]


def test_long_answers_need_decode_workers_alone() -> None:
    rng = random.Random(2)
    short = steady(4.0)
    long = tuple(replace(item, output_tokens=800 + rng.randrange(100)) for item in short)
    one, other = needed(short), needed(long)
    assert one is not None
    assert other is not None
    assert other[0] == one[0]
    assert other[1] > one[1]


def test_a_prompt_that_is_late_alone_is_for_the_closed_form_to_name() -> None:
    assert needed(tuple(replace(item, prompt_tokens=60_000) for item in steady(2.0))) is None


def test_a_burst_that_is_over_asks_for_no_worker() -> None:
    burst = tuple(Arrival(60.0 + k / 50, 2000, 20) for k in range(200))
    past, present = lasting(burst, 115.0), lasting(burst, 65.0)
    assert (past.prefill, past.decode) == (1, 1)
    assert present.prefill < 8
    decision = plan_scaling(scaling_input(2.0, 2, 2, now_s=115.0, arrivals=burst))
    assert max(decision.advice.values()) == 2


def test_the_requests_decide_where_they_are_known() -> None:
    """The loads claim Poisson arrivals; the requests come in one lasting crowd."""
    crowd = tuple(Arrival(k / 30, 2000, 100) for k in range(3600))
    known = plan_scaling(scaling_input(5.0, 1, 1, now_s=120.0, arrivals=crowd))
    unknown = plan_scaling(scaling_input(5.0, 1, 1, now_s=120.0))
    assert sum(known.advice.values()) > sum(unknown.advice.values())


def test_of_very_many_requests_the_newest_count_as_long_as_they_reach_over_the_short_window() -> None:
    dense = tuple(random_trace(3, 20.0, 2400, 2000, 100))
    seen = see_requests(dense, SCALING_CLASSES, HARDWARE, now_s=dense[-1].at_s)
    assert seen is not None
    assert len(seen.arrivals) == MAX_COUNTED
    assert seen.arrivals[0].at_s < dense[-1].at_s - SHORT_WINDOW_S
    assert seen.need() is not None


def test_of_more_than_can_be_counted_a_sample_tells_the_work_and_the_closed_form_the_need() -> None:
    crowd = tuple(random_trace(3, 100.0, 6000, 2000, 100))
    now_s = crowd[-1].at_s
    seen = see_requests(crowd, SCALING_CLASSES, HARDWARE, now_s=now_s)
    assert seen is not None
    assert len(seen.arrivals) <= MAX_COUNTED
    assert seen.need() is None
    newest = see_requests(
        [item for item in crowd if item.at_s > now_s - 12], SCALING_CLASSES, HARDWARE, now_s=now_s
    )
    assert newest is not None
    of_part, of_all = newest.lasting(), seen.last(SHORT_WINDOW_S).lasting()
    assert of_all.prefill / of_part.prefill > 0.9 * SHORT_WINDOW_S / 12
    assert of_all.prefill / of_part.prefill < 1.1 * SHORT_WINDOW_S / 12


def test_many_prompts_take_as_long_together_as_one_by_one() -> None:
    prompts = [(1, 0, 8), (1, 5, 8), (8, 0, 8), (9, 0, 8), (4000, 3000, 512), (16000, 0, 700)]
    for profile in (SMALL_GPU, SMALL_GPU.model_copy(update={"overlap": 0.7})):
        one_by_one = [prefill_s(profile, all_, chunk, cached_tokens=old) for all_, old, chunk in prompts]
        assert prefill_times_s(profile, prompts) == pytest.approx(one_by_one)
