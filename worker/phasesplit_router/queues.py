"""Requests that wait for a worker: two gates, strict priority between classes, bounded.

The prefill gate is room for another prompt, the decode gate is KV room and TPOT; a request passes
both at once, so that no KV waits at a prefill worker for a decode worker. Within equal priority
the earliest TTFT deadline goes first, which is how waiting ages. Runs on the event loop; knows
workers only through `WorkerBook`.
"""

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phasesplit.api.routing import ServedMode
from phasesplit_http.errors import ApiError, unavailable
from phasesplit_router.admission import Outlook, forecast
from phasesplit_router.fleet import Demand, Fleet, Phase
from phasesplit_router.policy import Blocked, Choice, Unavailable, choose
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.workers import Worker, WorkerBook

CHECK_S = 0.25  # how often a waiting request looks whether it has waited too long


@dataclass(eq=False, slots=True)
class Placement:
    """Room held for one attempt of one request. Ends with `release`."""

    choice: Choice
    prefill: Worker | None
    decode: Worker
    demand: Demand
    _on_change: Callable[["Placement"], None]
    since_s: float = 0.0
    is_released: bool = False
    _in_prefill: bool = True
    _in_decode: bool = False

    def __post_init__(self) -> None:
        self._prefiller.begin_prefill(self.demand.prompt_tokens, self.demand.priority)
        self.decode.kv_tokens += self.demand.kv_tokens
        if self.prefill is not None:
            self._begin_decode()

    @property
    def _prefiller(self) -> Worker:
        return self.prefill or self.decode

    @property
    def pods(self) -> str:
        """Value of the pair header."""
        return self.decode.pod if self.prefill is None else f"{self.prefill.pod},{self.decode.pod}"

    def _begin_decode(self) -> None:
        self._in_decode = True
        self.decode.begin_decode(self.demand.prompt_tokens, self.demand.tpot_s)

    def first_token(self) -> None:
        """The prefill is done: its room is free for the next prompt."""
        if self._in_prefill:
            self._in_prefill = False
            self._prefiller.end_prefill(self.demand.prompt_tokens, self.demand.priority)
            if self.prefill is None:
                self._begin_decode()
            self._on_change(self)

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        if self.is_released:
            return
        self.is_released = True
        if self._in_prefill:
            self._prefiller.end_prefill(self.demand.prompt_tokens, self.demand.priority)
        if self._in_decode:
            self.decode.end_decode(self.demand.prompt_tokens, self.demand.tpot_s)
        self.decode.kv_tokens -= self.demand.kv_tokens
        self._on_change(self)


@dataclass(eq=False, slots=True)
class Waiting:
    """One request in the queues."""

    demand: Demand
    deadline_s: float  # arrival + TTFT target
    order: int
    future: asyncio.Future[Placement]
    entered_s: float
    waits_s: dict[Phase, float] = field(default_factory=lambda: {Phase.PREFILL: 0.0, Phase.DECODE: 0.0})
    phase: Phase = Phase.PREFILL
    phase_since_s: float = 0.0
    unavailable_since_s: float | None = None

    @property
    def key(self) -> tuple[int, int, float, int]:
        """Sorts first what goes first: class priority, then replays, then the earliest deadline."""
        return (-self.demand.priority, 0 if self.demand.is_replay else 1, self.deadline_s, self.order)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Note which gate it waits at, so that waiting is accounted to the right phase."""
        self.waits_s[self.phase] += now_s - self.phase_since_s
        self.phase, self.phase_since_s = phase, now_s


class Queues:
    """Gives room to waiting requests whenever there is some."""

    def __init__(self, book: WorkerBook, quarantine: Quarantine, *, max_queued: int = 1000) -> None:
        self._book = book
        self._quarantine = quarantine
        self.max_queued = max_queued
        self._waiting: list[Waiting] = []
        self._order = itertools.count()
        self._pump_scheduled = False
        self.decode_seconds = 5.0  # usual time a decode place is held, learned

    def __len__(self) -> int:
        return len(self._waiting)

    def fleet(self, now_s: float) -> Fleet:
        """What the policy decides on now."""
        table = self._book.table
        return Fleet(
            mode=table.mode if table else ServedMode.COLOCATED,
            workers=self._book.views(now_s),
            colocated_allowed=table.colocated_allowed if table else True,
            split_suspended=bool(table and table.reason and not table.colocated_allowed),
            links=self._book.links(now_s),
            quarantined=self._quarantine.active(now_s),
            transfer_deadline_s=table.transfer_deadline_s if table else None,
        )

    async def place(
        self,
        demand: Demand,
        *,
        deadline_s: float,
        patience_s: float,
        longest_s: float,
    ) -> tuple[Placement, dict[Phase, float]]:
        """Wait for room. Raises `ApiError` 503 after `patience_s` without any worker, or `longest_s`.

        Returns the room and how long each gate was waited at. Cancelling gives everything back.
        """
        now_s = time.monotonic()
        waiting = Waiting(
            demand=demand,
            deadline_s=deadline_s,
            order=next(self._order),
            future=asyncio.get_running_loop().create_future(),
            entered_s=now_s,
            phase_since_s=now_s,
        )
        bisect.insort(self._waiting, waiting, key=lambda item: item.key)
        self.pump()
        try:
            end_s = now_s + longest_s
            while not waiting.future.done():
                await asyncio.wait([waiting.future], timeout=CHECK_S)
                self._give_up(waiting, time.monotonic(), end_s, patience_s)
            placement = waiting.future.result()
        except BaseException:  # cancelled or given up: room that was granted meanwhile goes back
            if waiting.future.done() and not waiting.future.cancelled() and not waiting.future.exception():
                waiting.future.result().release()
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        waiting.enter(waiting.phase, time.monotonic())
        return placement, waiting.waits_s

    def _give_up(self, waiting: Waiting, now_s: float, end_s: float, patience_s: float) -> None:
        if waiting.future.done():
            return
        since_s = waiting.unavailable_since_s
        if since_s is not None and now_s - since_s >= patience_s:
            raise self.no_worker()
        if now_s >= end_s:
            raise unavailable(
                f"No room for the {waiting.phase} of this request came free within "
                f"{now_s - waiting.entered_s:.0f} s; retry later.",
                reason="timeout",
            )

    def no_worker(self) -> ApiError:
        """Why nothing serves."""
        table = self._book.table
        if table is None:
            return unavailable("The router has not read its routing table yet; retry in a few seconds.")
        known = len(self._book.workers)
        why = table.reason if table.mode is ServedMode.SPLIT and not table.colocated_allowed else ""
        detail = f" ({why})" if why else ""
        return unavailable(
            f"No worker of {table.name or table.model} can serve in mode {table.mode} now, of {known} "
            f"known{detail}; retry in a few seconds."
        )

    def wake(self) -> None:
        """Something changed: look again soon, once for any number of changes."""
        if not self._pump_scheduled and self._waiting:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Give room to those whose turn it is. The first that must wait stops those behind it."""
        self._pump_scheduled = False
        now_s = time.monotonic()
        granted: list[Waiting] = []
        blocked: dict[ServedMode | None, Phase] = {}  # by mode, which is one but for a trial of both
        fleet: Fleet | None = None
        for waiting in self._waiting:
            mode = waiting.demand.mode
            if None in blocked:
                break
            if waiting.future.done() or mode in blocked:
                continue
            fleet = fleet or self.fleet(now_s)
            decision = choose(waiting.demand, fleet.serving(mode))
            if isinstance(decision, Blocked):
                waiting.unavailable_since_s = None
                waiting.enter(decision.phase, now_s)
                blocked[mode] = decision.phase
                continue
            if isinstance(decision, Unavailable):
                waiting.unavailable_since_s = waiting.unavailable_since_s or now_s
                continue
            waiting.unavailable_since_s = None
            waiting.future.set_result(self._placement(waiting.demand, decision))
            granted.append(waiting)
            fleet = None  # there is less room now
        if blocked:
            for waiting in self._waiting:
                phase = blocked.get(None) or blocked.get(waiting.demand.mode)
                if phase is not None and not waiting.future.done() and waiting.phase is not phase:
                    waiting.enter(phase, now_s)
        for waiting in granted:
            self._waiting.remove(waiting)

    def _placement(self, demand: Demand, choice: Choice) -> Placement:
        workers = self._book.workers
        prefill = None if choice.prefill is None else workers[choice.prefill]
        now_s = time.monotonic()
        return Placement(choice, prefill, workers[choice.decode], demand, self._changed, now_s)

    def _changed(self, placement: Placement) -> None:
        if placement.is_released:
            held_s = time.monotonic() - placement.since_s
            self.decode_seconds += 0.1 * (held_s - self.decode_seconds)
        self.wake()

    def outlook(self, demand: Demand, now_s: float) -> Outlook:
        """What a request arriving now has to expect, for admission."""
        ahead = [
            item.demand
            for item in self._waiting
            if item.demand.priority >= demand.priority and item.demand.mode is demand.mode
        ]
        return forecast(
            demand,
            self.fleet(now_s).serving(demand.mode),
            ahead,
            decode_hold_s=self.decode_seconds,
            num_queued=len(self._waiting),
            max_queued=self.max_queued,
        )
