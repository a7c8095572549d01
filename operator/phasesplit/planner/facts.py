"""What the planner knows: frozen values about nodes, pods, links, load and workers.

Knows nothing of how they were read. Times are seconds, sizes bytes, CPU milli-cores. Mappings are
never changed after construction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import ModelFacts, StepProfile, WorkerReport, WorkerState

__all__ = [
    "LinkFacts",
    "LoadFacts",
    "ModelFacts",
    "NodeFacts",
    "PodFacts",
    "PoolFacts",
    "Resources",
    "StepProfile",
    "Taint",
    "WorkerFacts",
]


@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of what a node offers or a pod asks for."""

    cpu_millis: int = 0
    memory_bytes: int = 0
    pods: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)  # by extended resource name

    def plus(self, other: "Resources") -> "Resources":
        """Sum."""
        return self._combined(other, 1)

    def minus(self, other: "Resources") -> "Resources":
        """Difference; entries may become negative."""
        return self._combined(other, -1)

    def times(self, count: int) -> "Resources":
        """This amount `count` times."""
        return Resources(
            self.cpu_millis * count,
            self.memory_bytes * count,
            self.pods * count,
            {name: amount * count for name, amount in self.gpus.items()},
        )

    def fits(self, room: "Resources") -> bool:
        """Does this request fit in `room`? A zero request fits even where the room is negative."""
        return (
            (self.cpu_millis <= 0 or self.cpu_millis <= room.cpu_millis)
            and (self.memory_bytes <= 0 or self.memory_bytes <= room.memory_bytes)
            and (self.pods <= 0 or self.pods <= room.pods)
            and all(amount <= 0 or amount <= room.gpus.get(name, 0) for name, amount in self.gpus.items())
        )

    def _combined(self, other: "Resources", sign: int) -> "Resources":
        gpus = dict(self.gpus)
        for name, amount in other.gpus.items():
            gpus[name] = gpus.get(name, 0) + sign * amount
        return Resources(
            self.cpu_millis + sign * other.cpu_millis,
            self.memory_bytes + sign * other.memory_bytes,
            self.pods + sign * other.pods,
            gpus,
        )


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint; effect NoSchedule, PreferNoSchedule or NoExecute."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. `requested` is the sum over *every* unfinished pod bound to it, ours included."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    ready: bool = True
    allocatable: Resources = field(default_factory=Resources)
    requested: Resources = field(default_factory=Resources)
    gpu_product: str | None = None  # None: the node says nothing (no GPU feature discovery)
    gpu_memory_bytes: int | None = None  # per GPU

    @property
    def free(self) -> Resources:
        """Allocatable minus what every pod on the node asks for."""
        return self.allocatable.minus(self.requested)


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One worker pod of the object."""

    name: str
    pool: Pool
    ordinal: int
    node: str | None = None  # bound to
    pinned_node: str | None = None  # nodeSelector kubernetes.io/hostname, set when the gate was lifted
    gated: bool = False
    ready: bool = False
    terminating: bool = False
    unschedulable_s: float | None = None  # for how long the scheduler has found no node
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool as it is. `desired` is the StatefulSet's replicas; `pending` = exists or will, not ready."""

    pool: Pool
    desired: int
    ready: int
    pending: int = 0
    roles: Mapping[Role, int] = field(default_factory=dict)  # of the ready workers


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """One latency class over the recent window. None: not measured."""

    class_name: str = "default"
    arrival_rate_per_s: float = 0.0
    mean_prompt_tokens: float = 0.0
    p95_prompt_tokens: float | None = None
    mean_output_tokens: float = 0.0
    mean_cached_tokens: float = 0.0  # prompt tokens found in a prefix cache
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    second_token_gap_p99_s: float | None = None
    queue_s: float | None = None  # predicted wait of a request arriving now
    attainment: float | None = None  # share of requests that met every target, 0 to 1
    finished: int = 0  # requests behind `attainment`


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Measured busy-time bandwidth from a prefill node to a decode node."""

    from_node: str
    to_node: str
    bytes_per_s: float
    age_s: float = 0.0
    settled: bool = True  # False: too few measurements to call it slow


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as its routers last saw it."""

    pod: str
    node: str
    pool: Pool
    role: Role
    ready: bool = True
    device: str = "cpu"
    fingerprint: str | None = None
    kv_bytes_per_token: int = 0
    kv_total_tokens: int = 0
    kv_used_tokens: int = 0
    max_num_seqs: int = 0  # 0: not told
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_prompt_tokens: int = 0
    profile: StepProfile | None = None
    transfers_total: int = 0
    transfer_failures_total: int = 0

    @classmethod
    def from_report(cls, report: WorkerReport) -> "WorkerFacts":
        """The part of a worker's report that decisions use."""
        layout = report.model.kv_layout if report.model else None
        block_size = layout.block_size if layout else 0
        return cls(
            pod=report.pod,
            node=report.node,
            pool=report.pool,
            role=report.role,
            ready=report.state is WorkerState.READY,
            device=report.device,
            fingerprint=report.model.fingerprint if report.model else None,
            kv_bytes_per_token=layout.bytes_per_token if layout else 0,
            kv_total_tokens=report.kv_total_blocks * block_size,
            kv_used_tokens=report.kv_used_blocks * block_size,
            max_num_seqs=report.max_num_seqs,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_waiting_prompt_tokens=report.num_waiting_prompt_tokens,
            profile=report.profile,
            transfers_total=report.transfers_total,
            transfer_failures_total=sum(report.transfer_failures_total.values()),
        )
