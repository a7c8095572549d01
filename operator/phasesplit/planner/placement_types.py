"""What the placement is asked and what it answers. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.conditions import ConditionStatus, Reason
from phasesplit.api.names import Pool
from phasesplit.planner.facts import LinkFacts, NodeFacts, Resources


@dataclass(frozen=True, slots=True)
class Toleration:
    """As in a pod spec; an empty key with Exists tolerates everything, an empty effect every effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One expression of a selector: In, NotIn, Exists, DoesNotExist, Gt, Lt."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeTerm:
    """A node selector term: all expressions hold. Terms of one affinity are alternatives."""

    labels: tuple[LabelRequirement, ...] = ()
    fields: tuple[LabelRequirement, ...] = ()  # metadata.name only
    weight: int = 0  # of a preferred term


@dataclass(frozen=True, slots=True)
class SpreadConstraint:
    """Pods of the pool over the values of a node label differ by at most `max_skew`."""

    topology_key: str
    max_skew: int = 1
    hard: bool = True  # DoNotSchedule; False: ScheduleAnyway


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One pool to be placed: ordinals 0 to count-1."""

    pool: Pool
    count: int
    requests: Resources = field(default_factory=Resources)  # of one pod
    gpu_resource: str = ""  # empty: CPU
    products: tuple[str, ...] = ()
    min_gpu_memory_bytes: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    required_terms: tuple[NodeTerm, ...] = ()  # empty: no restriction
    preferred_terms: tuple[NodeTerm, ...] = ()
    spread: tuple[SpreadConstraint, ...] = ()
    existing: Mapping[int, str] = field(default_factory=dict)  # ordinal -> node it is bound to
    allowed_nodes: Mapping[int, frozenset[str]] = field(default_factory=dict)  # volumes: ordinal -> nodes


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Everything the plan depends on."""

    pools: tuple[PoolRequest, ...]
    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    levels: tuple[str, ...] = ()  # node labels, nearest first
    promised: Mapping[str, Resources] = field(default_factory=dict)  # node -> other objects' promises
    kv_bytes_per_request: float = 1.0
    requests_per_s: float = 0.0
    model_load_s: float = 60.0  # a move costs this much of one worker
    spread_decode: bool = True  # decode on two nodes where that costs little
    movable: bool = False  # may existing pods be planned elsewhere?


@dataclass(frozen=True, slots=True)
class Missing:
    """What a pool lacks."""

    pool: Pool
    count: int  # pods that have no node
    resource: str  # "nvidia.com/gpu", "cpu", "memory", or "node"
    reason: Reason
    message: str  # one sentence


@dataclass(frozen=True, slots=True)
class Move:
    """An existing pod that the plan would rather have elsewhere."""

    pool: Pool
    ordinal: int
    from_node: str
    to_node: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Node per ordinal; None where nothing fits."""

    nodes: Mapping[Pool, tuple[str | None, ...]]
    wire_s: float  # expected seconds on the wire per request
    bound_wire_s: float  # no placement can be below this
    reason: Reason
    message: str
    eligible: Mapping[Pool, tuple[str, ...]]
    missing: tuple[Missing, ...] = ()
    moves: tuple[Move, ...] = ()
    node_matters: bool = False  # do eligible nodes differ in cost?
    notes: tuple[str, ...] = ()

    @property
    def condition_status(self) -> ConditionStatus:
        """Status of the `Placed` condition."""
        return "False" if self.missing else "True"

    def node_of(self, pool: Pool, ordinal: int) -> str | None:
        """Node planned for an ordinal; None if it has none or lies beyond the plan."""
        nodes = self.nodes.get(pool, ())
        return nodes[ordinal] if 0 <= ordinal < len(nodes) else None
