"""A fleet that changes while a trace runs: workers start, drain and change roles as a policy says.

The planner's own simulator serves the requests; here are the clockwork of ticks and starts, what a
policy may see, and the bill. A worker costs from the moment it is asked for until it has drained.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Protocol

from phasesplit.api.names import Pool, Role
from phasesplit.planner.demand import Hardware
from phasesplit.planner.facts import LoadFacts
from phasesplit.planner.simulation import Simulator
from phasesplit.planner.simulation_types import (
    Arrival,
    ColocatedPlan,
    SimulatedClass,
    Simulation,
    SimulationResult,
    SplitPlan,
)

_TICK, _START = 100, 101  # kinds of events beyond the simulator's own
TICK_S = 5.0
SCRAPE_S = 15.0
WINDOW_S = 60.0


class State(Enum):
    """Of one place for a worker."""

    OFF = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True)
class Wish:
    """What a policy wants: replicas of both pools, and roles where they are not the pools' own."""

    replicas: Mapping[Pool, int]
    roles: Mapping[int, Role] = field(default_factory=dict)  # by worker


class Policy(Protocol):
    """Decides at every tick."""

    def decide(self, fleet: "Fleet", now_s: float) -> Wish:
        """Replicas and roles from now on."""


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """What all policies have in common."""

    trace: Sequence[Arrival]
    hardware: Hardware
    target: SimulatedClass
    split: bool
    start_s: float = 60.0  # from asking for a worker to its being ready
    most: int = 64  # workers of a pool
    chunk_tokens: int | None = None  # colocated budget; absent: steps within the TPOT target
    max_num_seqs: int = 64


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What a policy reached and cost."""

    attainment: float
    worker_hours: float
    most_workers: int
    result: SimulationResult


class Fleet(Simulator):
    """The simulator with a membership that changes."""

    def __init__(self, setting: FleetSetting, policy: Policy, initial: Mapping[Pool, int]) -> None:
        plan = (
            SplitPlan(setting.most, setting.most)
            if setting.split
            else ColocatedPlan(
                2 * setting.most,
                setting.chunk_tokens,
                None if setting.chunk_tokens else setting.target.tpot_s,
            )
        )
        super().__init__(
            Simulation(
                setting.trace, plan, setting.hardware, (setting.target,), max_num_seqs=setting.max_num_seqs
            )
        )
        self.setting = setting
        self.policy = policy
        self.states = [State.OFF] * plan.workers
        self.roles: dict[int, Role] = {}
        self._started_at = [0.0] * plan.workers
        self._busy_s = [0.0] * plan.workers
        self._arrivals_at = [arrival.at_s for arrival in setting.trace]
        self._firsts: list[tuple[float, float]] = []  # (when, TTFT)
        self._finished: list[tuple[float, int]] = []  # (when, request)
        self._bill_s, self._billed_until, self._most = 0.0, 0.0, 0
        for pool, count in initial.items():
            for index in self.places(pool)[:count]:
                self.states[index] = State.READY
        self._assign({})
        self._push(0.0, _TICK, 0, 0)

    # What policies see.

    def places(self, pool: Pool) -> range:
        """Indexes of a pool's workers, existing or not."""
        most = self.setting.most
        return range(most) if pool is Pool.PREFILL else range(most, 2 * most)

    def count(self, pool: Pool, *states: State) -> int:
        """Workers of a pool in any of the states."""
        return sum(self.states[index] in states for index in self.places(pool))

    def desired(self, pool: Pool) -> int:
        """Replicas now: ready or starting."""
        return self.count(pool, State.READY, State.STARTING)

    def ready(self, pool: Pool) -> list[int]:
        """Workers that serve."""
        return [index for index in self.places(pool) if self.states[index] is State.READY]

    def in_flight(self, index: int) -> int:
        """Prompts and sequences of a worker, waiting and running."""
        worker = self._workers[index]
        return (
            len(worker.queue) + (worker.head is not None) + worker.size + len(worker.waiting) + worker.coming
        )

    def busy_s(self, index: int) -> float:
        """Seconds that a worker has computed so far."""
        return self._busy_s[index]

    def queue_s(self) -> float:
        """Predicted wait for prefill of a request arriving now."""
        tokens = min((self._workers[index].queued_tokens for index in self._prefillers), default=0)
        return tokens * self.setting.hardware.prefill_profile.per_prefill_token_s

    def load(self, now_s: float) -> LoadFacts:
        """As Prometheus would say: the window before the last scrape; the queue is the routers' own."""
        end = math.floor(now_s / SCRAPE_S) * SCRAPE_S
        first, last = (bisect_right(self._arrivals_at, at) for at in (end - WINDOW_S, end))
        arrived = self.setting.trace[first:last]
        finished = [request for at, request in _since(self._finished, end - WINDOW_S) if at <= end]
        ttfts = [ttft for at, ttft in _since(self._firsts, end - WINDOW_S) if at <= end]
        tpots = [tpot for request in finished if (tpot := self._result.tpot_s[request]) > 0]
        return LoadFacts(
            arrival_rate_per_s=len(arrived) / WINDOW_S if end >= WINDOW_S else len(arrived) / max(end, 1.0),
            mean_prompt_tokens=_mean([arrival.prompt_tokens for arrival in arrived]),
            mean_output_tokens=_mean([self.setting.trace[request].output_tokens for request in finished]),
            ttft_p50_s=median(ttfts) if ttfts else None,
            tpot_p50_s=median(tpots) if tpots else None,
            queue_s=self.queue_s(),
            finished=len(finished),
        )

    def recent_arrivals(self, now_s: float, span_s: float) -> tuple[Arrival, ...]:
        """What the routers remember: requests and, of the finished ones, the answer's length."""
        first, last = (bisect_right(self._arrivals_at, at) for at in (now_s - span_s, now_s))
        done = self._result.outcomes
        arrived = self.setting.trace[first:last]
        lengths = [item.output_tokens for index, item in enumerate(arrived, first) if done[index]]
        usual = round(_mean(lengths)) or 1
        return tuple(
            item if done[index] else replace(item, output_tokens=usual)
            for index, item in enumerate(arrived, first)
        )

    # The clockwork.

    def serve(self) -> FleetResult:
        """Run the trace to its end."""
        result = self.run()
        self._bill(self._arrivals_at[-1])
        return FleetResult(result.attainment(), self._bill_s / 3600, self._most, result)

    def _handle(self, now: float, kind: int, subject: int, detail: int) -> None:
        if kind == _TICK:
            self._tick(now)
        elif kind == _START:
            if self.states[subject] is State.STARTING and self._started_at[subject] == detail / 1e6:
                self.states[subject] = State.READY
                self._assign(self.roles)
        else:
            super()._handle(now, kind, subject, detail)

    def _tick(self, now: float) -> None:
        self._bill(now)
        for index, state in enumerate(self.states):
            if state is State.DRAINING and not self.in_flight(index):
                self.states[index] = State.OFF
        wish = self.policy.decide(self, now)
        for pool, wanted in wish.replicas.items():
            self._resize(now, pool, wanted)
        self._assign(wish.roles)
        if now < self._arrivals_at[-1]:
            self._push(now + TICK_S, _TICK, 0, 0)

    def _resize(self, now: float, pool: Pool, wanted: int) -> None:
        missing = min(wanted, self.setting.most) - self.desired(pool)
        for index in self.places(pool):
            if missing > 0 and self.states[index] is State.OFF:
                self.states[index] = State.STARTING
                self._started_at[index] = round(now * 1e6) / 1e6
                self._push(now + self.setting.start_s, _START, index, round(now * 1e6))
                missing -= 1
        for index in reversed(self.places(pool)):
            if missing < 0 and self.states[index] in (State.READY, State.STARTING):
                starting = self.states[index] is State.STARTING
                self.states[index] = State.OFF if starting else State.DRAINING
                missing += 1

    def _assign(self, roles: Mapping[int, Role]) -> None:
        """Who takes prompts and who decodes; what was begun is finished where it is."""
        self.roles = dict(roles)
        ready = {pool: self.ready(pool) for pool in Pool}
        everyone = [*ready[Pool.PREFILL], *ready[Pool.DECODE]]
        if not self.setting.split:
            self._prefillers = self._decoders = everyone
            return
        own = dict.fromkeys(ready[Pool.PREFILL], Role.PREFILL)
        own |= dict.fromkeys(ready[Pool.DECODE], Role.DECODE)
        taken = {index: roles.get(index, role) for index, role in own.items()}
        self._prefillers = [index for index in everyone if taken[index] is Role.PREFILL]
        self._decoders = [index for index in everyone if taken[index] is Role.DECODE]

    def _bill(self, now: float) -> None:
        paid = sum(state is not State.OFF for state in self.states)
        self._most = max(self._most, paid)
        if now > self._billed_until:
            self._bill_s += paid * (min(now, self._arrivals_at[-1]) - self._billed_until)
            self._billed_until = now

    def _end_run(self, now: float, index: int) -> None:
        self._busy_s[index] += now - self._workers[index].run_start
        super()._end_run(now, index)

    def _first_token(self, now: float, worker: object, prompt: object) -> None:
        known = self._first_at[prompt.request]
        super()._first_token(now, worker, prompt)
        if math.isnan(known):
            self._firsts.append((now, self._result.ttft_s[prompt.request]))

    def _finish(self, now: float, request: int) -> None:
        super()._finish(now, request)
        self._finished.append((now, request))


def _since(events: Sequence[tuple[float, object]], at_s: float) -> Sequence[tuple[float, object]]:
    return events[bisect_right(events, at_s, key=lambda event: event[0]) :]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
