"""Ways to size a fleet: fixed, as the horizontal pod autoscaler does, as the planner does, by foresight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from helpers_fleet import TICK_S, Fleet, Wish
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.planner.capacity import Need
from phasesplit.planner.facts import WorkerFacts
from phasesplit.planner.scaling import plan_scaling
from phasesplit.planner.scaling_arrivals import see_requests
from phasesplit.planner.scaling_types import PoolBounds, ScalingInput, ScalingMemory

STEP_S = 15.0
REMEMBERED_S = 120.0  # how far back the rings of the routers go


@dataclass
class Static:
    """As it is."""

    def decide(self, fleet: Fleet, now_s: float) -> Wish:
        return Wish({pool: fleet.desired(pool) for pool in fleet_pools(fleet)})


def fleet_pools(fleet: Fleet) -> tuple[Pool, ...]:
    """Colocated fleets use one pool."""
    return tuple(Pool) if fleet.setting.split else (Pool.DECODE,)


@dataclass
class HorizontalAutoscaler:
    """Kubernetes' algorithm per pool: ceil(ready * metric / target), 10 % tolerance, every 15 s.

    Grows at most to the double or by four pods per 15 s, shrinks to the most that was recommended in the
    window. The metric is the mean over ready pods of requests in flight, or of the busy share of the
    last minute.
    """

    target: Mapping[Pool, float]
    metric: str  # "in flight" or "busy"
    window_s: float = 300.0
    _recommended: dict[Pool, list[tuple[float, int]]] = field(default_factory=dict)
    _busy: list[tuple[float, dict[int, float]]] = field(default_factory=list)

    def decide(self, fleet: Fleet, now_s: float) -> Wish:
        present = {pool: fleet.desired(pool) for pool in fleet_pools(fleet)}
        if now_s % 15.0 > TICK_S / 2:
            return Wish(present)
        self._note_busy(fleet, now_s)
        return Wish({pool: self._replicas(fleet, now_s, pool, count) for pool, count in present.items()})

    def _note_busy(self, fleet: Fleet, now_s: float) -> None:
        self._busy.append((now_s, {i: fleet.busy_s(i) for pool in Pool for i in fleet.ready(pool)}))
        del self._busy[:-5]

    def _value(self, fleet: Fleet, pool: Pool) -> float:
        ready = fleet.ready(pool)
        if self.metric == "in flight":
            return sum(fleet.in_flight(index) for index in ready) / max(1, len(ready))
        (then, before), (now, after) = self._busy[0], self._busy[-1]
        if now <= then:
            return self.target[pool]
        shares = [(after[i] - before.get(i, 0.0)) / (now - then) for i in ready if i in after]
        return min(1.0, sum(shares) / max(1, len(shares)))

    def _replicas(self, fleet: Fleet, now_s: float, pool: Pool, present: int) -> int:
        ratio = self._value(fleet, pool) / self.target[pool]
        wanted = present
        if abs(ratio - 1) > 0.1:
            wanted = math.ceil(len(fleet.ready(pool)) * ratio)
            wanted = min(wanted, max(2 * present, present + 4))
        history = self._recommended.setdefault(pool, [])
        history.append((now_s, wanted))
        self._recommended[pool] = [item for item in history if item[0] > now_s - self.window_s]
        if wanted < present:
            covered = now_s >= self.window_s
            wanted = min(present, max(count for _, count in self._recommended[pool])) if covered else present
        return max(1, wanted)


@dataclass
class Planned:
    """`plan_scaling`, tick by tick, with what Prometheus and the routers would say."""

    down_stabilization_s: float = 300.0
    memory: ScalingMemory = field(default_factory=ScalingMemory)

    def decide(self, fleet: Fleet, now_s: float) -> Wish:
        setting = fleet.setting
        target = setting.target
        latency_class = LatencyClass(
            name="default", ttft_s=target.ttft_s, tpot_s=target.tpot_s, percentile=100 * target.share
        )
        hardware = setting.hardware
        workers = tuple(_worker_facts(fleet, pool, index) for pool in Pool for index in fleet.ready(pool))
        decision = plan_scaling(
            ScalingInput(
                now_s=now_s,
                mode=ServedMode.SPLIT if setting.split else ServedMode.COLOCATED,
                pools={pool: _bounds(fleet, pool) for pool in Pool},
                classes=(latency_class,),
                loads=(fleet.load(now_s),),
                workers=workers,
                keep_both_pools=setting.split,
                profiles={Pool.PREFILL: hardware.prefill_profile, Pool.DECODE: hardware.decode_profile},
                chunk_tokens=setting.chunk_tokens,
                kv_tokens_per_worker=int(hardware.kv_tokens_per_worker),
                kv_bytes_per_token=hardware.kv_bytes_per_token,
                link_bytes_per_s=hardware.link_bytes_per_s,
                down_stabilization_s=self.down_stabilization_s,
                worker_start_s=setting.start_s,
                memory=self.memory,
                arrivals=fleet.recent_arrivals(now_s, REMEMBERED_S),
            )
        )
        self.memory = decision.memory
        roles = {int(pod.rpartition("-")[2]): role for pod, role in decision.roles.items()}
        return Wish(decision.replicas, roles if setting.split else {})


def _bounds(fleet: Fleet, pool: Pool) -> PoolBounds:
    least = 1 if fleet.setting.split or pool is Pool.DECODE else 0
    return PoolBounds(
        pool, min=least, max=fleet.setting.most, desired=fleet.desired(pool), ready=len(fleet.ready(pool))
    )


def _worker_facts(fleet: Fleet, pool: Pool, index: int) -> WorkerFacts:
    own = Role.PREFILL if pool is Pool.PREFILL else Role.DECODE
    role = fleet.roles.get(index, own) if fleet.setting.split else Role.COLOCATED
    return WorkerFacts(f"m-{pool}-{index}", "n", pool, role)


@dataclass
class Clairvoyant:
    """Knows what will come: asks for workers in time, and for none that the near future does not need."""

    margin: float = 1.0  # planned for so many times what comes
    look_s: float = 90.0  # span of arrivals behind one need
    _needs: dict[int, Need] = field(default_factory=dict)

    def decide(self, fleet: Fleet, now_s: float) -> Wish:
        first = int(now_s // STEP_S)
        last = int((now_s + fleet.setting.start_s) // STEP_S) + 2
        needs = [self._need(fleet, step) for step in range(first, last + 1)]
        together = max(need.prefill + need.decode for need in needs)
        half = together // 2
        return Wish({Pool.PREFILL: together - half, Pool.DECODE: half}, _roles(fleet, needs[0]))

    def _need(self, fleet: Fleet, step: int) -> Need:
        if step not in self._needs:
            setting, target, half_s = fleet.setting, fleet.setting.target, self.look_s / 2
            centre_s = step * STEP_S
            arrivals = [a for a in setting.trace if abs(a.at_s - centre_s) <= half_s]
            latency_class = LatencyClass(
                name="default", ttft_s=target.ttft_s, tpot_s=target.tpot_s, percentile=100 * target.share
            )
            seen = see_requests(arrivals, (latency_class,), setting.hardware, now_s=centre_s + half_s)
            found = seen.need(speed_up=self.margin) if seen is not None else None
            self._needs[step] = found or Need(1, 1, feasible=True)
        return self._needs[step]


def _roles(fleet: Fleet, need: Need) -> dict[int, Role]:
    """The smallest change of roles that covers the need."""
    everyone = [index for pool in Pool for index in fleet.ready(pool)]
    prefilling = set(fleet.places(Pool.PREFILL))
    present = [
        i
        for i in everyone
        if fleet.roles.get(i, Role.PREFILL if i in prefilling else Role.DECODE) is Role.PREFILL
    ]
    others = [index for index in everyone if index not in present]
    count = len(present)
    if count < need.prefill or len(others) < need.decode:
        count = min(max(1, need.prefill), max(1, len(everyone) - 1))
    return {
        index: Role.PREFILL if place < count else Role.DECODE
        for place, index in enumerate([*present, *others])
    }
