"""What scaling is given and what it returns. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import RoleSwitching, ScalingPolicy
from phasesplit.planner.capacity import Need
from phasesplit.planner.facts import LoadFacts, StepProfile, WorkerFacts
from phasesplit.planner.metrics_types import MetricsVerdict
from phasesplit.planner.simulation_types import Arrival


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """One pool: what the user allows, what exists, what could be placed."""

    pool: Pool
    min: int
    max: int
    desired: int  # the StatefulSet's replicas now
    ready: int
    gpus_per_worker: int = 0
    placeable: int | None = None  # most workers the cluster could hold, existing ones included; None: unknown

    @property
    def pending(self) -> int:
        """Capacity on its way."""
        return max(0, self.desired - self.ready)


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """What one tick found."""

    at_s: float
    keep: Mapping[Pool, int]  # what the survivors of a shrink would have to be
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What the next decision needs of the earlier ones; the caller keeps it and passes it back."""

    points: tuple[ScalingPoint, ...] = ()
    ttft_correction: float = 1.0  # observed over predicted, bounded, slow
    tpot_correction: float = 1.0
    roles_changed_at_s: float | None = None
    counted: Need | None = None  # for the requests that came: where the next count begins to look


@dataclass(frozen=True, slots=True)
class ScalingInput:
    """Everything the decision depends on. `now_s` and the memory's times share one clock."""

    now_s: float
    mode: ServedMode  # as decided, see planner.mode
    pools: Mapping[Pool, PoolBounds]
    classes: tuple[LatencyClass, ...]
    loads: tuple[LoadFacts, ...]
    workers: tuple[WorkerFacts, ...] = ()
    metrics: MetricsVerdict | None = None
    policy: ScalingPolicy = ScalingPolicy.MANAGED
    role_switching: RoleSwitching = RoleSwitching.ENABLED
    max_gpus: int | None = None
    placeable_total: int | None = None  # most workers of both pools together; None: unknown
    keep_both_pools: bool = True  # False: nobody wants a split, prefill may go to its min of 0
    profiles: Mapping[Pool, StepProfile] = field(default_factory=dict)  # measured or guessed
    chunk_tokens: int | None = None  # colocated budget set by the user
    kv_tokens_per_worker: int | None = None
    kv_bytes_per_token: float = 0.0
    link_bytes_per_s: float | None = None
    down_stabilization_s: float = 300.0
    worker_start_s: float = 60.0
    memory: ScalingMemory = field(default_factory=ScalingMemory)
    # The recent requests on the clock of `now_s`, oldest first, `class_index` into `classes`, the answer's
    # length its mean where it is not known yet; empty: not known, the loads alone decide.
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Replicas to write, roles to publish, and why.

    `replicas` is what to write: empty for a pool that must not be written (External, Off).
    `advice` is what the operator would do, whatever the policy. `roles` names every ready worker.
    """

    replicas: Mapping[Pool, int]
    roles: Mapping[str, Role]
    reason: Reason
    message: str
    advice: Mapping[Pool, int]
    needed: Mapping[Role, int]
    feasible: bool
    memory: ScalingMemory
