"""What a pass knows and what it decides: the values between snapshot, planner, writers and status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, RoutingTable
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.observation import Observation
from phasesplit.planner.facts import LinkFacts, LoadFacts, NodeFacts, PodFacts, WorkerFacts
from phasesplit.planner.metrics_types import MetricsVerdict, QueryError
from phasesplit.planner.mode_types import ModeDecision, ModeInput
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.scaling_types import ScalingDecision


@dataclass(frozen=True)
class MetricsState:
    """How the Prometheus of an object is doing."""

    configured: bool
    error: QueryError | None = None
    error_detail: str = ""
    failing_s: float = 0.0
    scrape_interval_s: float = 15.0
    asked: bool = True  # False: not a single round since this copy started


@dataclass(frozen=True)
class Situation:
    """Everything a pass knows."""

    now_s: float
    snapshot: Snapshot
    spec: DisaggregatedModelSpec
    observation: Observation
    live_table: RoutingTable | None
    metrics: MetricsState
    other_pods: Sequence[Manifest]  # every unfinished pod that is not a worker of this object
    pod_specs: Mapping[Pool, Manifest]  # of the finished templates
    allowed_nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # volumes: pod -> nodes


@dataclass(frozen=True)
class Decisions:
    """The desired state, with reasons."""

    plan: PlacementPlan
    mode: ModeDecision
    mode_input: ModeInput  # what the decision was made from
    scaling: ScalingDecision
    metrics: MetricsVerdict
    table: RoutingTable
    gated: Mapping[Pool, bool]
    classes: tuple[LatencyClass, ...]
    loads: tuple[LoadFacts, ...]
    links: tuple[LinkFacts, ...]
    pods: tuple[PodFacts, ...]
    nodes: tuple[NodeFacts, ...]
    workers: tuple[WorkerFacts, ...]
