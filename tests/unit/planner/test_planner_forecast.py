"""The forecast of the arrival rate: exact where nothing changes, better than the last value on real load."""

import math
from bisect import bisect_right

import pytest

from helpers_azure import read_azure
from phasesplit.planner.scaling_forecast import STEP_S, forecast_rate

WINDOW_S = 60.0
HORIZON_S = 120.0  # the minute that begins when a worker asked for now would serve
MEMORY_S = 900.0


def test_a_steady_rate_is_foreseen_exactly() -> None:
    assert forecast_rate([(15.0 * k, 4.0) for k in range(40)], HORIZON_S) == pytest.approx(4.0)


def test_nothing_known_and_one_point() -> None:
    assert forecast_rate([], HORIZON_S) is None
    assert forecast_rate([(7.0, 3.0)], HORIZON_S) == 3.0


def test_a_lasting_growth_is_not_foreseen_below_the_last_value_by_much() -> None:
    rising = [(15.0 * k, 1.0 + 0.1 * k) for k in range(60)]
    found = forecast_rate(rising, HORIZON_S)
    assert found is not None
    assert 0.97 * rising[-1][1] < found < 1.2 * (1.0 + 0.1 * 68)


def test_uneven_points_are_taken_as_they_stand() -> None:
    points = [(0.0, 2.0), (3.0, 2.0), (50.0, 2.0), (51.0, 2.0), (200.0, 2.0)]
    assert forecast_rate(points, 60.0) == pytest.approx(2.0)


def _error_over_last_value(name: str) -> float:
    times = [arrival.at_s for arrival in read_azure(name)]

    def rate(at_s: float) -> float:
        return (bisect_right(times, at_s) - bisect_right(times, at_s - WINDOW_S)) / WINDOW_S

    grid = [WINDOW_S + STEP_S * k for k in range(int((times[-1] - 180.0) / STEP_S))]
    points = [(at_s, rate(at_s)) for at_s in grid]
    ours = last = 0.0
    for index, (at_s, value) in enumerate(points):
        known = [point for point in points[: index + 1] if at_s - point[0] <= MEMORY_S]
        found = forecast_rate(known, HORIZON_S)
        assert found is not None
        assert math.isfinite(found)
        came = rate(at_s + HORIZON_S)
        ours += abs(found - came)
        last += abs(value - came)
    return ours / last


@pytest.mark.parametrize(("name", "most"), [("conv", 1.0), ("code", 0.9)])
def test_it_beats_the_last_value_on_the_azure_traces(name: str, most: float) -> None:
    assert _error_over_last_value(name) < most
