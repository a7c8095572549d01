"""Requests that really came, as lengths and times: the window that is served again, and the newest arrivals.

Knows no text and no router: rows come from the routers' traces with times on one clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One request that has come and not ended: it waits, or is being answered."""

    at_s: float  # arrival
    class_name: str
    prompt_tokens: int
    cached_tokens: int | None  # None: no worker has counted yet
    output_tokens: int  # put out so far


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
        replace(arrival, at_s=arrival.at_s - start_s)
        for arrival in (to_arrival(item, index) for item in kept)
    )


def to_arrival(request: ServedRequest, index: Mapping[str, int]) -> Arrival:
    """One that ended, with its class by number."""
    return Arrival(
        at_s=request.at_s,
        prompt_tokens=max(1, request.prompt_tokens),
        output_tokens=max(1, request.output_tokens),
        class_index=index.get(request.class_name, 0),
        cached_tokens=min(request.cached_tokens, max(0, request.prompt_tokens - 1)),
    )


def open_arrivals(
    unended: Sequence[OpenRequest], ended: Sequence[ServedRequest], index: Mapping[str, int]
) -> list[Arrival]:
    """Those that have not ended.

    What is not known yet of a request is as usual in its class: the share of the prompt that is cached, and
    the length of the answer, unless it is longer already.
    """
    usual = _Usual(ended)
    found = []
    for request in unended:
        prompt = max(1, request.prompt_tokens)
        cached = request.cached_tokens
        if cached is None:
            cached = int(prompt * usual.cached_share(request.class_name))
        found.append(
            Arrival(
                at_s=request.at_s,
                prompt_tokens=prompt,
                output_tokens=max(1, request.output_tokens, usual.output_tokens(request.class_name)),
                class_index=index.get(request.class_name, 0),
                cached_tokens=min(cached, prompt - 1),
            )
        )
    return found


@dataclass(slots=True)
class _Sums:
    """Tokens of requests that were answered."""

    count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, count: int, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        self.count += count
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens


class _Usual:
    """Means of the requests that were answered: of a class, of all where it has none."""

    def __init__(self, ended: Sequence[ServedRequest]) -> None:
        self._by_class: dict[str, _Sums] = {}
        for item in ended:
            if item.counted and item.e2e_s is not None:
                sums = self._by_class.setdefault(item.class_name, _Sums())
                sums.add(1, item.prompt_tokens, item.cached_tokens, item.output_tokens)
        self._all = _Sums()
        for sums in self._by_class.values():
            self._all.add(sums.count, sums.prompt_tokens, sums.cached_tokens, sums.output_tokens)

    def output_tokens(self, class_name: str) -> int:
        """Length of an answer; 0 while there is none."""
        sums = self._by_class.get(class_name, self._all)
        return round(sums.output_tokens / max(1, sums.count))

    def cached_share(self, class_name: str) -> float:
        """Of the prompts' tokens, those found in a prefix cache."""
        sums = self._by_class.get(class_name, self._all)
        return sums.cached_tokens / max(1, sums.prompt_tokens)
