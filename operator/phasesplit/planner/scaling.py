"""How many workers each pool has, and which phase each ready worker does. One pure decision per tick.

Need (forecast, correction, queues) -> roles -> replicas within bounds, GPUs and the down window.
Knows nothing of StatefulSets; the caller writes what is returned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import ServedMode
from phasesplit.api.v1alpha1 import RoleSwitching, ScalingPolicy
from phasesplit.planner.facts import WorkerFacts
from phasesplit.planner.metrics_types import Permission
from phasesplit.planner.scaling_clamp import Counts, repair_one_sided, shrink_until
from phasesplit.planner.scaling_correction import correct
from phasesplit.planner.scaling_need import WorkerNeed, find_need, remember, total_rate_per_s
from phasesplit.planner.scaling_roles import (
    ROLE_PAUSE_S,
    assign_roles,
    choose_prefill_count,
    count_prefill_roles,
)
from phasesplit.planner.scaling_types import PoolBounds, ScalingDecision, ScalingInput, ScalingMemory
from phasesplit.planner.text import format_seconds


@dataclass(frozen=True, slots=True)
class _Targets:
    """Replicas on the way from need to decision."""

    counts: dict[Pool, int]
    limited: bool = False


def plan_scaling(given: ScalingInput) -> ScalingDecision:
    """Replicas, roles and why."""
    memory = correct(given)
    need = find_need(given, memory)
    roles, switched = _plan_roles(given, need)
    now_counts = _counts_for(given, need, shrinking=False)
    keep_counts = _counts_for(given, need, shrinking=True)
    floor = _stabilised(given, memory, keep_counts)
    wanted = {pool: _step(given, need, pool, now_counts[pool], floor[pool]) for pool in Pool}
    target = _clamped(given, wanted)
    beyond = {pool: max(now_counts[pool], given.pools[pool].desired) for pool in Pool}
    if need.known and any(beyond[pool] > given.pools[pool].max for pool in Pool):
        target = replace(target, limited=True)
    memory = replace(remember(given, memory, keep_counts), counted=need.counted)
    if switched:
        memory = replace(memory, roles_changed_at_s=given.now_s)
    reason, message = _explain(given, need, target, switched)
    needed = (
        {Role.PREFILL: need.now.prefill, Role.DECODE: need.now.decode}
        if given.mode is ServedMode.SPLIT
        else {Role.COLOCATED: need.now.decode}
    )
    return ScalingDecision(
        replicas=dict(target.counts) if given.policy is ScalingPolicy.MANAGED else {},
        roles=roles,
        reason=reason,
        message=message,
        advice=dict(target.counts),
        needed=needed,
        feasible=need.now.feasible,
        memory=memory,
    )


def _plan_roles(given: ScalingInput, need: WorkerNeed) -> tuple[Mapping[str, Role], bool]:
    ready = [worker for worker in given.workers if worker.ready]
    if given.mode is not ServedMode.SPLIT:
        return {worker.pod: Role.COLOCATED for worker in ready}, False
    switching = (
        given.role_switching is RoleSwitching.ENABLED and given.policy is not ScalingPolicy.OFF and need.known
    )
    if not need.known and count_prefill_roles(ready) not in (None, 0, len(ready)):
        return {worker.pod: worker.role for worker in ready}, False  # nothing known: leave as it is
    changed_at_s = given.memory.roles_changed_at_s
    paused = changed_at_s is not None and given.now_s - changed_at_s < ROLE_PAUSE_S
    count = choose_prefill_count(ready, need.now, need.keep, switching=switching, paused=paused)
    roles = assign_roles(ready, count)
    switched = any(_is_switch(worker, roles[worker.pod]) for worker in ready)
    return roles, switched


def _is_switch(worker: WorkerFacts, role: Role) -> bool:
    return worker.role is not Role.COLOCATED and worker.role is not role


def _counts_for(given: ScalingInput, need: WorkerNeed, *, shrinking: bool) -> dict[Pool, int]:
    """Replicas that the need asks for, before any clamp.

    A ready worker that the other phase can spare counts before a new replica is asked for.
    """
    source = need.keep if shrinking else need.now
    if given.mode is not ServedMode.SPLIT:
        return _spread_colocated(given, source.decode)
    counts = {Pool.PREFILL: source.prefill, Pool.DECODE: source.decode}
    if given.role_switching is not RoleSwitching.ENABLED or given.policy is ScalingPolicy.OFF:
        return counts
    for pool, other in ((Pool.PREFILL, Pool.DECODE), (Pool.DECODE, Pool.PREFILL)):
        here, there = given.pools[pool], given.pools[other]
        missing = counts[pool] - here.desired
        # Only what is ready can help at once; what is kept busy by its own phase cannot.
        spare = there.ready - max(counts[other], there.min)
        if missing > 0 and spare > 0 and counts[other] < there.desired:
            helpers = min(missing, spare)
            counts[pool] -= helpers
            counts[other] += helpers
        elif missing > 0 and counts[pool] > here.max:
            # This pool may not grow further, the other may: a new worker there takes this role.
            moved = min(counts[pool] - here.max, max(0, there.max - counts[other]))
            counts[pool] -= moved
            counts[other] += moved
    return counts


def _spread_colocated(given: ScalingInput, workers: int) -> dict[Pool, int]:
    """Colocated workers over both pools: what exists first, then where there are fewest."""
    floor = 1 if given.keep_both_pools else 0
    counts = {pool: max(floor, given.pools[pool].min) for pool in Pool}
    counts[Pool.DECODE] = max(1, counts[Pool.DECODE])
    while sum(counts.values()) < workers:
        open_pools = [pool for pool in Pool if counts[pool] < given.pools[pool].max]
        if not open_pools:
            break
        existing = [pool for pool in open_pools if counts[pool] < given.pools[pool].desired]
        chosen = min(existing or open_pools, key=lambda pool: (counts[pool], pool is Pool.PREFILL))
        counts[chosen] += 1
    return counts


def _stabilised(given: ScalingInput, memory: ScalingMemory, keep: Counts) -> dict[Pool, int]:
    """The most that was worth keeping within the down window; the present size until it is covered."""
    start_s = given.now_s - given.down_stabilization_s
    covered = given.down_stabilization_s <= 0 or any(point.at_s <= start_s for point in memory.points)
    recent = [point for point in memory.points if point.at_s >= start_s]
    floor = {}
    for pool in Pool:
        most = max([keep[pool], *(point.keep.get(pool, 0) for point in recent)])
        # Pools that help each other out change roles for it: a pod given up to start one of the other pool
        # would cost a start each way.
        floor[pool] = most if covered else max(most, given.pools[pool].desired)
    return floor


def _step(given: ScalingInput, need: WorkerNeed, pool: Pool, now: int, floor: int) -> int:
    """One pool: up at once, down to the floor of the window, or as it is where nothing is known."""
    bounds = given.pools[pool]
    permission = given.metrics.permission(pool) if given.metrics else Permission()
    wanted = bounds.desired
    if need.known:
        if now > bounds.desired and permission.may_grow:
            wanted = now
        elif floor < bounds.desired and permission.may_shrink:
            wanted = max(now, floor)
    return min(bounds.max, max(_least(given, bounds), wanted))


def _least(given: ScalingInput, bounds: PoolBounds) -> int:
    """Smallest wish: the decode pool always has a worker, the prefill pool when a split is wanted."""
    if bounds.pool is Pool.DECODE or given.keep_both_pools:
        return max(1, bounds.min)
    return bounds.min


def _clamped(given: ScalingInput, wanted: Counts) -> _Targets:
    """Step 4: GPUs that exist and are allowed, along the ratio."""

    def fits(counts: Counts) -> bool:
        gpus = sum(counts[pool] * given.pools[pool].gpus_per_worker for pool in Pool)
        within = given.max_gpus is None or gpus <= given.max_gpus
        if given.placeable_total is not None:
            within = within and sum(counts.values()) <= given.placeable_total
        return within

    capped = {
        pool: min(wanted[pool], limit) if (limit := given.pools[pool].placeable) is not None else wanted[pool]
        for pool in Pool
    }
    counts = repair_one_sided(shrink_until(capped, fits))
    return _Targets(counts, limited=counts != dict(wanted))


def _explain(given: ScalingInput, need: WorkerNeed, target: _Targets, switched: bool) -> tuple[Reason, str]:
    changes = ", ".join(
        f"{pool} {given.pools[pool].desired} -> {target.counts[pool]}"
        for pool in Pool
        if target.counts[pool] != given.pools[pool].desired
    )
    held = _held_because(given, need, changes)
    if held is not None:
        return Reason.HOLD, held
    asked = _needs_sentence(given, need)
    if target.limited:
        return Reason.AT_LIMIT, f"{asked}; {_limit_sentence(given, target)}"
    if any(target.counts[pool] > given.pools[pool].desired for pool in Pool):
        reason = Reason.QUEUE_WAIT if need.urgent else Reason.LOAD_UP
        return reason, f"{changes}: {asked}"
    if changes:
        window = format_seconds(given.down_stabilization_s)
        return Reason.LOAD_DOWN, f"{changes}: {asked}, and for {window} no more was worth keeping"
    if switched:
        return Reason.ROLE_SWITCH, f"a worker takes the other phase's role: {asked}"
    return Reason.SETTLED, asked


def _held_because(given: ScalingInput, need: WorkerNeed, changes: str) -> str | None:
    if not need.known:
        why = given.metrics.message if given.metrics and given.metrics.status != "True" else need.detail
        what = f"{changes}: bounds changed" if changes else "replicas hold"
        return f"{what}: {why or 'no load has been measured yet'}"
    if given.metrics and not changes and any(given.metrics.permission(pool).holds for pool in Pool):
        return f"replicas hold: {given.metrics.message}"
    return None


def _needs_sentence(given: ScalingInput, need: WorkerNeed) -> str:
    rate = total_rate_per_s(given.loads)
    if need.detail:
        return need.detail
    if given.mode is ServedMode.SPLIT:
        who = f"{need.now.prefill} prefill and {need.now.decode} decode workers"
    else:
        who = f"{need.now.decode} colocated workers"
    cause = "the queue is already too long for the TTFT target; " if need.urgent else ""
    return f"{cause}{rate:.2g} requests/s need {who}"


def _limit_sentence(given: ScalingInput, target: _Targets) -> str:
    gpus = "" if given.max_gpus is None else f" (scaling.maxGPUs {given.max_gpus})"
    return (
        f"{target.counts[Pool.PREFILL]} prefill and {target.counts[Pool.DECODE]} decode workers are what "
        f"fits{gpus}"
    )
