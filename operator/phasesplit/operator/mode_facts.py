"""The choice of mode as the operator asks for it: one object's facts as the planner's input. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.api.quantities import parse_quantity
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.operator.facts import shares_device
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.mode_restore import restore_mode
from phasesplit.operator.situation import Situation
from phasesplit.planner.facts import LinkFacts, LoadFacts, NodeFacts, StepProfile, WorkerFacts
from phasesplit.planner.mode_types import ModeInput, PoolPresence
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.replay_schedule import usable


@dataclass(frozen=True)
class Facts:
    """What a pass has found out before it decides."""

    plan: PlacementPlan
    classes: tuple[LatencyClass, ...]
    loads: tuple[LoadFacts, ...]
    links: tuple[LinkFacts, ...]
    workers: tuple[WorkerFacts, ...]
    nodes: tuple[NodeFacts, ...]
    kv_bytes_per_token: int | None
    busy: bool


def build_mode_input(given: Situation, memory: ObjectMemory, facts: Facts) -> ModeInput:
    """Everything that the mode depends on."""
    spec = given.spec
    served = given.live_table.mode if given.live_table is not None else ServedMode.COLOCATED
    if memory.mode is None:
        memory.mode = restore_mode(given.snapshot.model.status, served, given.now_s)
    least = spec.transfer.min_bandwidth
    asked = ModeInput(
        now_s=given.now_s,
        wanted=spec.mode,
        fallback=spec.fallback,
        served=served,
        pools={pool: _presence(given, facts, pool) for pool in Pool},
        classes=facts.classes,
        loads=facts.loads,
        workers=facts.workers,
        links=facts.links,
        transfers=memory.transfers.window(given.now_s),
        profiles=best_profiles(facts.workers),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        min_bandwidth_bytes_per_s=parse_quantity(least) if least is not None else None,
        dwell_s=spec.adoption.dwell_seconds,
        minimum_gain_percent=spec.adoption.minimum_gain_percent,
        chunk_tokens=spec.colocated.max_batched_tokens,
        trial=spec.adoption.trial,
        requests=memory.traffic.requests(),
        memory=memory.mode,
    )
    return replace(asked, replay=usable(memory.replay, asked))


def _presence(given: Situation, facts: Facts, pool: Pool) -> PoolPresence:
    plan = facts.plan
    found = given.observation.pools[pool]
    prefix = f"{given.snapshot.model.name}-{pool}-"
    problem = next((item for item in given.observation.problems if item.pod.startswith(prefix)), None)
    missing = next((item for item in plan.missing if item.pool is pool), None)
    placed = [node for node in plan.nodes.get(pool, ()) if node is not None]
    return PoolPresence(
        pool=pool,
        desired=found.desired,
        ready=found.ready,
        placeable=bool(placed),
        shares_device=shares_device(given.spec.pool(pool), placed, facts.nodes),
        detail=problem.message if problem else missing.message if missing and not found.ready else "",
    )


def best_profiles(workers: Sequence[WorkerFacts]) -> dict[Pool, StepProfile]:
    """The best-measured profile of each pool."""
    found: dict[Pool, StepProfile] = {}
    for worker in workers:
        known = found.get(worker.pool)
        if worker.profile is not None and (known is None or _weight(worker.profile) > _weight(known)):
            found[worker.pool] = worker.profile
    return found


def _weight(profile: StepProfile) -> tuple[bool, int]:
    return not profile.guessed, profile.num_samples
