"""The smallest change of one thing (link, load, a target) at which a replay's answer would turn.

The window is served again under scaled conditions; plans are those near the best ones found, so that
one answer takes a fraction of a second. Takes no decision.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.routing import ServedMode
from phasesplit.planner.replay import (
    ReplayInput,
    ReplayOutcome,
    colocated_plans,
    compare_plans,
    split_plans,
)
from phasesplit.planner.simulation_types import Plan
from phasesplit.planner.text import format_rate, format_seconds

REACH = 8.0  # how far a change is looked for, as a factor
_PRECISION = 1.06
_SHORT_WINDOW = 800  # requests: enough where the answer is clear


@dataclass(frozen=True, slots=True)
class Flip:
    """The smallest change of one thing that would turn the answer."""

    what: str
    factor: float
    message: str


def replay_pays(found: ReplayOutcome, minimum_percent: float, loosest_tpot_s: float) -> bool:
    """Would Auto adopt the split on this replay, were everything else in order?"""
    gain = found.believed_gain_percent
    if gain < minimum_percent or (found.colocated.meets and gain <= 2 * minimum_percent):
        return False
    return not found.split.transfer_p99_s > loosest_tpot_s


def find_replay_flips(given: ReplayInput, found: ReplayOutcome, minimum_percent: float) -> Iterator[Flip]:
    """Flips of link, load and targets, one after the other; none where the answer is too close to call."""
    question = _Question(minimum_percent, _near(given, found))
    pays = replay_pays(found, minimum_percent, _loosest_tpot_s(given))
    short = replace(given, trace=given.trace[-_SHORT_WINDOW:])
    base = next((item for item in (short, given) if question.pays(item) == pays), None)
    if base is None:
        return
    for what, change in _KNOBS.items():
        factor = _nearest(base, question, change, pays)
        if factor is not None:
            yield Flip(what, factor, _sentence(given, what, factor, pays))


@dataclass(frozen=True, slots=True)
class _Question:
    minimum_percent: float
    plans: tuple[tuple[Plan, ...], tuple[Plan, ...]]

    def pays(self, given: ReplayInput) -> bool:
        found = compare_plans(given, *self.plans)
        return replay_pays(found, self.minimum_percent, _loosest_tpot_s(given))


def _near(given: ReplayInput, found: ReplayOutcome) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    return (
        _neighbours(colocated_plans(given), found.colocated.plan),
        _neighbours(split_plans(given), found.split.plan),
    )


def _neighbours(plans: Sequence[Plan], best: Plan) -> tuple[Plan, ...]:
    at = plans.index(best) if best in plans else 0
    return tuple(plans[max(0, at - 1) : at + 2])


def _loosest_tpot_s(given: ReplayInput) -> float:
    return max(item.tpot_s for item in given.classes)


def _scaled_link(given: ReplayInput, factor: float) -> ReplayInput:
    hardware = given.hardware
    return replace(given, hardware=replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s * factor))


def _scaled_load(given: ReplayInput, factor: float) -> ReplayInput:
    trace = tuple(replace(arrival, at_s=arrival.at_s / factor) for arrival in given.trace)
    return replace(given, trace=trace)


def _scaled_ttft(given: ReplayInput, factor: float) -> ReplayInput:
    return replace(given, classes=tuple(replace(c, ttft_s=c.ttft_s * factor) for c in given.classes))


def _scaled_tpot(given: ReplayInput, factor: float) -> ReplayInput:
    return replace(given, classes=tuple(replace(c, tpot_s=c.tpot_s * factor) for c in given.classes))


_Change = Callable[[ReplayInput, float], ReplayInput]
_KNOBS: dict[str, _Change] = {
    "link": _scaled_link,
    "load": _scaled_load,
    "TTFT target": _scaled_ttft,
    "TPOT target": _scaled_tpot,
}


def _nearest(given: ReplayInput, question: _Question, change: _Change, pays: bool) -> float | None:
    """The factor nearest to 1, either way; the answer is taken to turn once on the way."""
    if change is _scaled_link and not math.isfinite(given.hardware.link_bytes_per_s):
        return None
    found = []
    for direction in (1, -1):
        near, far = 1.0, 2.0
        while far <= REACH and question.pays(change(given, far**direction)) == pays:
            near, far = far, far * 2
        if far > REACH:
            continue
        while far / near > _PRECISION:
            middle = math.sqrt(near * far)
            if question.pays(change(given, middle**direction)) == pays:
                near = middle
            else:
                far = middle
        found.append(far**direction)
    return min(found, key=lambda factor: max(factor, 1 / factor), default=None)


def _sentence(given: ReplayInput, what: str, factor: float, pays: bool) -> str:
    turned = ServedMode.COLOCATED if pays else ServedMode.SPLIT
    first = given.classes[0]
    if what == "link":
        now = given.hardware.link_bytes_per_s
        to = f"links of {format_rate(now * factor)} instead of {format_rate(now)}"
    elif what == "load":
        rate = len(given.trace) / max(given.trace[-1].at_s - given.trace[0].at_s, 1e-9)
        to = f"{rate * factor:.3g} requests/s instead of {rate:.3g}"
    else:
        target_s = first.ttft_s if what == "TTFT target" else first.tpot_s
        to = f"a {what} of {format_seconds(target_s * factor)} instead of {format_seconds(target_s)}"
        to += f" (class {first.name}, others alike)" if len(given.classes) > 1 else ""
    return f"{turned} with {to}"
