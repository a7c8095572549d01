"""Both modes tried on real requests in alternating windows: colocated, split, split, colocated, again.

The order cancels a load that drifts. A window's requests count when the window after it has ended, so
that slow answers count too. A clear drop ends the trial at once. Pure: requests and time are passed in.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from phasesplit.planner.traffic import ServedRequest, usual_duration_s
from phasesplit.planner.trial_types import (
    Part,
    Trial,
    TrialReading,
    TrialStep,
    TrialVerdict,
    Window,
    total,
)

WINDOW_REQUESTS = 40  # wanted in a window
MIN_WINDOW_REQUESTS = 10  # fewer end the trial
SHORTEST_S, LONGEST_S = 30.0, 300.0
SHORTEST_SKIP_S = 5.0
PARTS = 5
BLOCK = 4  # windows of one ABBA
MAX_BLOCKS = 3
LONGEST_BACKOFF_S = 86_400.0

_STUDENT_95 = 2.1  # two-sided, at 18 degrees of freedom: two windows of five parts for each mode
_CLEAR = 0.05  # between the two intervals
_MIN_STOP_REQUESTS = 15
_MIN_GAIN_REQUESTS = 30  # of each mode; a split is adopted on more than it is given up on
_WILSON_Z = 1.96
_SILENT_SHARE = 0.25  # of the answers expected


def start_trial(now_s: float, rate_per_s: float, requests: Sequence[ServedRequest]) -> Trial:
    """Windows long enough for their requests to come and to end."""
    usual_s = usual_duration_s(requests)
    wanted_s = max(SHORTEST_S, 4 * usual_s, WINDOW_REQUESTS / rate_per_s if rate_per_s > 0 else 0.0)
    window_s = min(LONGEST_S, wanted_s)
    skip_s = min(window_s / 3, max(SHORTEST_SKIP_S, usual_s))
    return Trial(now_s, window_s + skip_s, skip_s, window_started_s=now_s)


def is_split(index: int) -> bool:
    """ABBA: is this window served split?"""
    return index % BLOCK in (1, 2)


def advance_trial(trial: Trial, requests: Sequence[ServedRequest], now_s: float) -> TrialStep:
    """Where the trial stands now."""
    current = _window(trial, requests, trial.index, trial.window_started_s, now_s)
    before = _previous(trial, requests)
    reading = read_trial([*trial.windows, *before, current])
    first = next(iter((*trial.windows, *before)), None)
    if is_split(trial.index) and first is not None and _drops(trial, reading, current, first, now_s):
        return TrialStep(TrialVerdict.STOPPED, False, reading, trial)
    if now_s < trial.window_started_s + trial.window_s:
        return TrialStep(TrialVerdict.RUNNING, is_split(trial.index), reading, trial)
    windows = (*trial.windows, *before)
    if any(window.total.counted < MIN_WINDOW_REQUESTS for window in before):
        return TrialStep(TrialVerdict.STARVED, False, reading, trial)
    if windows and len(windows) % BLOCK == 0:
        reading = read_trial(windows)
        verdict = judge(reading, len(windows) // BLOCK)
        if verdict is not TrialVerdict.RUNNING:
            return TrialStep(verdict, verdict is TrialVerdict.CONFIRMED, reading, trial)
    moved = replace(trial, index=trial.index + 1, window_started_s=now_s, windows=windows)
    return TrialStep(TrialVerdict.RUNNING, is_split(moved.index), reading, moved)


def read_trial(windows: Sequence[Window]) -> TrialReading:
    """The difference of both modes, with an interval from the scatter between parts of windows."""
    parts = {
        split: tuple(part for window in windows if window.split is split for part in window.parts)
        for split in (True, False)
    }
    split, colocated = total(parts[True]), total(parts[False])
    if not split.counted or not colocated.counted:
        return TrialReading(split, colocated)
    difference = split.attained / split.counted - colocated.attained / colocated.counted
    half = _STUDENT_95 * math.sqrt(sum(_variance(part) for part in parts.values()))
    return TrialReading(split, colocated, difference, difference - half, difference + half)


def backoff_s(failures: int, dwell_s: float) -> float:
    """How long to wait after so many failed trials in a row: doubling, up to a day."""
    return float(min(LONGEST_BACKOFF_S, dwell_s * 2.0 ** min(failures, 20)))


def judge(reading: TrialReading, looks: int) -> TrialVerdict:
    """What a look at the finished windows says; after the last one a doubt is a no."""
    if reading.low > 0:
        return TrialVerdict.CONFIRMED
    if reading.high <= 0 or looks >= MAX_BLOCKS:
        return TrialVerdict.REFUTED
    return TrialVerdict.RUNNING


def drops_clearly(reading: TrialReading) -> bool:
    """Do the 95 % intervals of the shares in target lie apart, the split's below?"""
    if reading.split.counted < _MIN_STOP_REQUESTS or not reading.colocated.counted:
        return False
    return _is_clearly_above(reading.colocated, reading.split)


def gains_clearly(reading: TrialReading) -> bool:
    """Do the 95 % intervals of the shares in target lie apart, the split's above?"""
    if min(reading.split.counted, reading.colocated.counted) < _MIN_GAIN_REQUESTS:
        return False
    return _is_clearly_above(reading.split, reading.colocated)


def _is_clearly_above(one: Part, other: Part) -> bool:
    return _wilson(one)[0] > _wilson(other)[1] + _CLEAR


def _drops(trial: Trial, reading: TrialReading, current: Window, first: Window, now_s: float) -> bool:
    """Is the split clearly worse already, or do its answers fail to come?"""
    if drops_clearly(reading):
        return True
    served_s = now_s - trial.window_started_s - trial.skip_s
    length_s = trial.window_s - trial.skip_s
    expected = first.total.counted * served_s / length_s
    return (
        served_s >= length_s / 2
        and expected >= MIN_WINDOW_REQUESTS
        and current.total.counted < _SILENT_SHARE * expected
    )


def _previous(trial: Trial, requests: Sequence[ServedRequest]) -> list[Window]:
    """The window before this one, whose last answers come while this one runs."""
    if trial.index == 0 or len(trial.windows) >= trial.index:
        return []
    started_s = trial.window_started_s - trial.window_s
    return [_window(trial, requests, trial.index - 1, started_s, trial.window_started_s)]


def _window(
    trial: Trial, requests: Sequence[ServedRequest], index: int, started_s: float, until_s: float
) -> Window:
    """Requests by arrival, whoever served them: what a mode hands to one worker is its own doing."""
    first_s = started_s + trial.skip_s
    length_s = trial.window_s - trial.skip_s
    last_s = min(until_s, first_s + length_s)
    counted, attained = [0] * PARTS, [0] * PARTS
    for request in requests:
        if request.counted and first_s <= request.at_s < last_s:
            part = min(PARTS - 1, int((request.at_s - first_s) / length_s * PARTS))
            counted[part] += 1
            attained[part] += request.attained
    return Window(is_split(index), tuple(Part(c, a) for c, a in zip(counted, attained, strict=True)))


def _variance(parts: Sequence[Part]) -> float:
    """Of a mode's share in target: from the scatter of its parts, and never below that of fair draws."""
    whole = total(tuple(parts))
    smoothed = (whole.attained + 1) / (whole.counted + 2)
    drawn = smoothed * (1 - smoothed) / whole.counted
    share = whole.attained / whole.counted
    used = [part for part in parts if part.counted]
    if len(used) < 2:
        return drawn
    scatter = sum((part.attained - share * part.counted) ** 2 for part in used) / whole.counted**2
    return max(drawn, scatter * len(used) / (len(used) - 1))


def _wilson(part: Part) -> tuple[float, float]:
    """95 % interval of a share."""
    count, share = part.counted, part.attained / part.counted
    square = _WILSON_Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _WILSON_Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half
