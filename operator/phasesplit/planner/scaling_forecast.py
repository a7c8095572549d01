"""The arrival rate at the time when a worker asked for now would serve.

Four simple forecasts - the last value, two exponential averages, a damped trend (Gardner and McKenzie
1985) - are weighted by how well each has foreseen what came since (Bates and Granger 1969). None of them
is best on every traffic: the last value is hard to beat where load drifts, an average where it bursts.
Pure; the past is given as points, evenly spaced or not.
"""

from bisect import bisect_right
from collections.abc import Sequence

STEP_S = 15.0
_AVERAGES = (0.1, 0.3)  # weights of the newest value
_LEVEL, _TREND, _DAMPING = 0.3, 0.1, 0.8
_MEMORY = 0.97  # per step, of past errors
_SHARPNESS = 4  # power of the inverse error that a forecast is weighted by


def forecast_rate(points: Sequence[tuple[float, float]], horizon_s: float) -> float | None:
    """Expected rate `horizon_s` after the last of (time, rate), oldest first; None without points."""
    if not points:
        return None
    values = _evenly_spaced(points)
    steps = max(1, round(horizon_s / STEP_S))
    history = _forecasts(values, steps)
    errors: list[float] | None = None
    for made, came in zip(history, values[steps:], strict=False):
        squares = [(value - came) ** 2 for value in made]
        errors = (
            squares
            if errors is None
            else [_MEMORY * old + (1 - _MEMORY) * new for old, new in zip(errors, squares, strict=True)]
        )
    if errors is None:
        return values[-1]
    least = max(min(errors), 1e-12)
    weights = [(least / max(error, 1e-12)) ** _SHARPNESS for error in errors]
    return sum(w * value for w, value in zip(weights, history[-1], strict=True)) / sum(weights)


def _evenly_spaced(points: Sequence[tuple[float, float]]) -> list[float]:
    """Values on a grid that ends at the last point, each that of the latest point until then."""
    times = [at_s for at_s, _ in points]
    count = int((times[-1] - times[0]) / STEP_S) + 1
    grid = [times[-1] - STEP_S * index for index in reversed(range(count))]
    return [points[max(0, bisect_right(times, at_s + 1e-9) - 1)][1] for at_s in grid]


def _forecasts(values: Sequence[float], steps: int) -> list[list[float]]:
    """What each method would have said at every time about `steps` steps later."""
    averages = [values[0]] * len(_AVERAGES)
    level, trend = values[0], 0.0
    ahead = sum(_DAMPING**step for step in range(1, steps + 1))
    made = []
    for value in values:
        averages = [old + weight * (value - old) for old, weight in zip(averages, _AVERAGES, strict=True)]
        before = level
        level = _LEVEL * value + (1 - _LEVEL) * (level + _DAMPING * trend)
        trend = _TREND * (level - before) + (1 - _TREND) * _DAMPING * trend
        made.append([value, *averages, max(0.0, level + ahead * trend)])
    return made
