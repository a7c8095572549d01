"""The window of real requests: one clock over many routers, bounded, each row once."""

from helpers_traffic import batch
from phasesplit.cluster.router_client import TraceCursor
from phasesplit.operator.traffic import TrafficBook
from phasesplit.planner.traffic import MAX_REQUESTS, WINDOW_S


def test_rows_of_two_routers_stand_on_one_clock() -> None:
    book = TrafficBook()
    book.add("r0", batch("a", 0, [90.0, 95.0], now_s=100.0), 1000.0)
    book.add("r1", batch("b", 0, [3.0], now_s=10.0), 1000.0)
    assert [request.at_s for request in book.requests()] == [990.0, 993.0, 995.0]
    assert book.cursor("r0") == TraceCursor("a", 2)
    assert book.cursor("r2") == TraceCursor()


def test_a_router_that_is_gone_leaves_its_requests_but_no_cursor() -> None:
    book = TrafficBook()
    book.add("r0", batch("a", 0, [90.0], now_s=100.0), 1000.0)
    book.keep_only({"r1"}, 1000.0)
    assert book.cursor("r0") == TraceCursor()
    assert len(book) == 1


def test_the_window_is_bounded_in_time_and_in_requests() -> None:
    book = TrafficBook()
    for part in range(8):
        arrivals = [float(part * 1000 + index) / 100 for index in range(1000)]
        book.add("r0", batch("a", part * 1000, arrivals, now_s=90.0), 1000.0)
    assert MAX_REQUESTS <= len(book) <= 1.5 * MAX_REQUESTS
    book.forget_old(1000.0 + 2 * WINDOW_S)
    assert len(book) == 0


def test_lost_rows_are_counted_and_abandoned_ones_are_no_verdict() -> None:
    book = TrafficBook()
    book.add("r0", batch("a", 5, [1.0], now_s=2.0, lost=5, outcome=[3]), 10.0)
    assert book.lost == 5
    assert not book.requests()[0].counted
