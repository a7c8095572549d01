"""Requests that were really served, as lengths and times, and the window of them that is served again.

Knows no text and no router: rows come from the routers' traces with times on one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.api.routing import LatencyClass
from phasesplit.planner.simulation_types import Arrival

WINDOW_S = 600.0
MAX_REQUESTS = 2000
MIN_REQUESTS = 60  # fewer say too little of how both ways would have done
_SETTLED_SHARE = 0.9  # of the requests have ended within what is called their usual duration


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request that ended. Lengths of one that did not finish are what the router expected."""

    at_s: float  # arrival
    class_name: str
    split: bool  # served by a pair
    attained: bool
    counted: bool  # False: its client left, so it is load but neither attained nor missed
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    e2e_s: float | None
    drawn: bool | None = None  # in a trial of both modes at once: drawn for the split?


def usual_duration_s(requests: Sequence[ServedRequest]) -> float:
    """Within this time most requests have ended; 0 while none has."""
    durations = sorted(request.e2e_s for request in requests if request.e2e_s is not None)
    return durations[int(_SETTLED_SHARE * (len(durations) - 1))] if durations else 0.0


def replay_window(
    requests: Sequence[ServedRequest], classes: Sequence[LatencyClass], now_s: float
) -> tuple[Arrival, ...]:
    """The last window as arrivals, oldest first, from time 0.

    Requests are known when they have ended: of the newest arrivals only the short ones are, so the time
    that most requests take is cut off the end.
    """
    cut_s = usual_duration_s(requests)
    index = {item.name: number for number, item in enumerate(classes)}
    kept = sorted(
        (request for request in requests if now_s - WINDOW_S <= request.at_s <= now_s - cut_s),
        key=lambda request: request.at_s,
    )[-MAX_REQUESTS:]
    if not kept:
        return ()
    start_s = kept[0].at_s
    return tuple(
        Arrival(
            at_s=request.at_s - start_s,
            prompt_tokens=max(1, request.prompt_tokens),
            output_tokens=max(1, request.output_tokens),
            class_index=index.get(request.class_name, 0),
            cached_tokens=min(request.cached_tokens, max(0, request.prompt_tokens - 1)),
        )
        for request in kept
    )
