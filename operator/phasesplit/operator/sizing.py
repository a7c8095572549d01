"""How many workers: what the planner answers, held to what the placement has room for. Pure."""

from dataclasses import replace

from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Mode
from phasesplit.cluster.snapshot import Key
from phasesplit.operator.placing import Placer, Room
from phasesplit.operator.situation import Situation
from phasesplit.planner.scaling import plan_scaling
from phasesplit.planner.scaling_types import PoolBounds, ScalingDecision, ScalingInput


def scale_within_room(placer: Placer, key: Key, given: ScalingInput) -> ScalingDecision:
    """The planner's decision, asked once more when workers of different sizes do not fit together."""
    decision = plan_scaling(given)
    if not decision.replicas:
        return decision  # somebody else chooses the number
    fitting = placer.count_fitting(key, decision.replicas)
    if all(fitting[pool] >= count for pool, count in decision.replicas.items()):
        return decision
    pools = {pool: replace(bounds, placeable=fitting[pool]) for pool, bounds in given.pools.items()}
    return plan_scaling(replace(given, pools=pools))


def least_workers(spec: DisaggregatedModelSpec, pool: Pool) -> int:
    """Both pools of a wanted split, and whatever decodes, have a worker."""
    least = spec.pool(pool).replicas.min
    return max(1, least) if pool is Pool.DECODE or spec.mode is not Mode.COLOCATED else least


def to_bounds(given: Situation, pool: Pool, room: Room) -> PoolBounds:
    """What the user allows, what exists, what there is room for."""
    found, wanted = given.observation.pools[pool], given.spec.pool(pool)
    return PoolBounds(
        pool=pool,
        min=wanted.replicas.min,
        max=wanted.replicas.max,
        desired=found.desired,
        ready=found.ready,
        gpus_per_worker=wanted.gpu.count,
        placeable=room.by_pool[pool],
    )
