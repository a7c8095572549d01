"""Everything that came lately, ended or in flight, and nothing at all where a part may be missing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_planner import PATIENT
from helpers_tick import BusyObject
from helpers_traffic import batch, in_flight, served
from phasesplit.api.names import Role
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.traces import MAX_OPEN, MAX_ROWS
from phasesplit.operator.traffic import READ_EVERY_S, TrafficBook
from phasesplit.planner.scaling_arrivals import WINDOW_S
from phasesplit.planner.traffic import OpenRequest, open_arrivals

CLASSES = tuple(LatencyClass(name=name, ttft_s=2.0, tpot_s=0.1) for name in ("default", "batch"))
NOW_S = 1000.0


def told() -> TrafficBook:
    """One router: two requests have ended, two have not; its clock began at 900."""
    book = TrafficBook()
    book.keep_only({"r0"}, NOW_S)
    open_columns = in_flight([99.0, 97.0], open_output_tokens=(0, 25))
    book.add("r0", batch("a", 0, [90.0, 98.0], now_s=100.0, **open_columns), NOW_S)
    return book


def test_ended_and_open_requests_stand_in_the_order_in_which_they_came() -> None:
    found = told().arrivals(CLASSES, NOW_S)
    assert [item.at_s for item in found] == [990.0, 997.0, 998.0, 999.0]
    # What is put out already counts where it is more than what is usual.
    assert [item.output_tokens for item in found] == [10, 25, 10, 10]


def test_each_answer_replaces_what_is_open_and_a_request_counts_once() -> None:
    book = told()
    for step in range(5):
        now_s = NOW_S + step
        ended = batch("a", 2 + step, [99.0 + step], now_s=100.0 + step, **in_flight([99.5 + step]))
        book.add("r0", ended, now_s)
        assert len(book.arrivals(CLASSES, now_s)) == 2 + step + 2


def test_old_requests_leave_the_window() -> None:
    book = told()
    later_s = NOW_S - 2.5 + WINDOW_S
    book.note_quiet("r0", later_s)
    assert [item.at_s for item in book.arrivals(CLASSES, later_s)] == [998.0]


def test_classes_may_be_numbered_anew() -> None:
    book = told()
    assert {item.class_index for item in book.arrivals(CLASSES, NOW_S)} == {0}
    assert {item.class_index for item in book.arrivals(CLASSES[::-1], NOW_S)} == {1}


def no_answer_for_long(book: TrafficBook) -> float:
    return NOW_S + 3 * READ_EVERY_S


def a_router_that_was_never_heard(book: TrafficBook) -> float:
    book.keep_only({"r0", "r1"}, NOW_S)
    return NOW_S


def a_router_gone_with_open_requests(book: TrafficBook) -> float:
    book.keep_only({"r1"}, NOW_S)
    book.note_quiet("r1", NOW_S)
    return NOW_S


def a_router_that_started_anew(book: TrafficBook) -> float:
    book.add("r0", batch("b", 0, [], now_s=1.0), NOW_S)
    return NOW_S


def rows_lost(book: TrafficBook) -> float:
    book.add("r0", batch("a", 9, [99.0], now_s=100.0, lost=7), NOW_S)
    return NOW_S


def an_older_router(book: TrafficBook) -> float:
    later_s = NOW_S + 3 * READ_EVERY_S
    book.add("r0", batch("a", 2, [99.0], now_s=112.0, open_total=None), later_s)
    return later_s


def more_rows_than_one_look_reads(book: TrafficBook) -> float:
    later_s = NOW_S + 3 * READ_EVERY_S
    book.add("r0", batch("a", 2, [99.0], now_s=112.0, total=9000), later_s)
    return later_s


def more_in_flight_than_one_answer_holds(book: TrafficBook) -> float:
    later_s = NOW_S + 3 * READ_EVERY_S
    crowd = in_flight([111.0] * MAX_OPEN, open_total=MAX_OPEN + 1)
    book.add("r0", batch("a", 2, [99.0], now_s=112.0, **crowd), later_s)
    return later_s


def more_in_the_short_window_than_is_kept(book: TrafficBook) -> float:
    for part in range(4):
        arrivals = [99.0 + index / 2000 for index in range(1000)]
        book.add("r0", batch("a", 2 + 1000 * part, arrivals, now_s=100.0), NOW_S)
    return NOW_S


@pytest.mark.parametrize(
    "happens",
    [
        no_answer_for_long,
        a_router_that_was_never_heard,
        a_router_gone_with_open_requests,
        a_router_that_started_anew,
        rows_lost,
        an_older_router,
        more_rows_than_one_look_reads,
        more_in_flight_than_one_answer_holds,
        more_in_the_short_window_than_is_kept,
    ],
)
def test_where_a_part_may_be_missing_there_are_no_arrivals(happens: Callable[[TrafficBook], float]) -> None:
    book = told()
    assert book.arrivals(CLASSES, NOW_S)
    assert book.arrivals(CLASSES, happens(book)) == ()


def test_what_was_lost_is_forgiven_when_it_has_left_the_window() -> None:
    book = told()
    rows_lost(book)
    later_s = NOW_S + WINDOW_S + 1
    book.add("r0", batch("a", 10, [219.0], now_s=221.0), later_s)
    assert len(book.arrivals(CLASSES, later_s)) == 1


def test_a_router_that_leaves_with_nothing_open_takes_nothing_along() -> None:
    book = told()
    book.note_quiet("r0", NOW_S)
    book.keep_only({"r1"}, NOW_S)
    book.note_quiet("r1", NOW_S)
    assert len(book.arrivals(CLASSES, NOW_S)) == 2


def test_an_object_without_routers_has_no_arrivals() -> None:
    book = told()
    book.note_quiet("r0", NOW_S)
    book.keep_only((), NOW_S)
    assert book.arrivals(CLASSES, NOW_S) == ()


def test_what_is_not_known_of_an_open_request_is_as_usual_in_its_class() -> None:
    ended = [
        served(1.0, prompt_tokens=100, cached_tokens=50, output_tokens=10),
        served(2.0, prompt_tokens=100, cached_tokens=0, output_tokens=30),
        served(3.0, class_name="batch", prompt_tokens=200, cached_tokens=0, output_tokens=200),
        served(4.0, output_tokens=9000, e2e_s=None),  # refused: what was expected of it is no answer
        served(5.0, output_tokens=9000, counted=False),
    ]
    index = {"default": 0, "batch": 1, "new": 2}
    asked = OpenRequest(6.0, "default", 400, None, 0)
    table = {
        "in its class": (asked, 20, 100),
        "in another class": (replace(asked, class_name="batch"), 200, 0),
        "of all, where its class has none": (replace(asked, class_name="new"), 80, 50),
        "already longer": (replace(asked, output_tokens=70), 70, 100),
        "counted by a worker": (replace(asked, cached_tokens=7), 20, 7),
        "never the whole prompt cached": (replace(asked, prompt_tokens=1, cached_tokens=5), 20, 0),
    }
    for name, (request, output_tokens, cached_tokens) in table.items():
        (found,) = open_arrivals([request], ended, index)
        assert (found.output_tokens, found.cached_tokens) == (output_tokens, cached_tokens), name
    (alone,) = open_arrivals([asked], [], index)
    assert (alone.output_tokens, alone.cached_tokens) == (1, 0)


_Step = tuple[int, int, int, float]
_STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 30), st.floats(0.1, 30.0)), max_size=30
)


@PATIENT
@given(_STEPS)
def test_arrivals_are_never_more_than_what_routers_have_told(steps: list[_Step]) -> None:
    book = TrafficBook()
    now_s = NOW_S
    rows: dict[int, list[float]] = {}
    unended: dict[int, list[float]] = {}
    for router, ends, stays_open, passed_s in steps:
        now_s += passed_s
        known = rows.setdefault(router, [])
        fresh = [now_s - index / 7 for index in range(ends)]
        unended[router] = [now_s - index / 9 for index in range(stays_open)]
        book.keep_only({f"r{number}" for number in rows}, now_s)
        answer = batch(f"{router}", len(known), fresh, now_s, **in_flight(unended[router]))
        book.add(f"r{router}", answer, now_s)
        known += fresh
        found = book.arrivals(CLASSES, now_s)
        everything = sorted(at_s for column in (*rows.values(), *unended.values()) for at_s in column)
        within = [at_s for at_s in everything if at_s >= now_s - WINDOW_S]
        assert found == () or [item.at_s for item in found] == pytest.approx(within)


def test_a_burst_raises_the_need_while_all_of_it_is_in_flight() -> None:
    busy = BusyObject(16, mode="Split", traced=True)
    calm = busy.tick()
    assert calm.mode.mode is ServedMode.SPLIT
    while busy.now_s < 1060.0:
        calm = busy.tick()
    rate = len(busy.memory.traffic.arrivals(calm.classes, busy.now_s)) / WINDOW_S
    burst_s = [busy.now_s - index / 40 for index in range(round(400 * rate / 5))]
    answer = batch("z", 0, [], busy.now_s, **in_flight(burst_s, open_prompt_tokens=(4000,) * len(burst_s)))
    busy.memory.traffic.add("another", answer, busy.now_s)
    loaded = busy.tick()
    assert loaded.scaling.needed[Role.PREFILL] > calm.scaling.needed[Role.PREFILL]
    assert len(burst_s) < MAX_ROWS


def test_a_colocated_object_is_sized_as_before() -> None:
    plain, traced = BusyObject(8), BusyObject(8, traced=True)
    assert plain.tick().scaling == traced.tick().scaling
