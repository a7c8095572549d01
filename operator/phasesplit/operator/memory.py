"""What the operator remembers of one object between two passes.

Everything here is either measured anew within seconds or restored from the cluster: losing it with a
restart costs time, never correctness.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec, Manifest
from phasesplit.cluster.prometheus import Value
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.cluster.snapshot import Key
from phasesplit.operator.accept import Chosen
from phasesplit.operator.links import LinkBook, ProbeMemory
from phasesplit.operator.traffic import TrafficBook
from phasesplit.operator.transfers import TransferCounter
from phasesplit.planner.facts import NodeFacts
from phasesplit.planner.mode_types import ModeMemory
from phasesplit.planner.replay_schedule import ReplayMark, ReplayRecord
from phasesplit.planner.scaling_types import ScalingMemory
from phasesplit.resources.context import BuildContext

BUSY_IDLE_S = 10.0


@dataclass(frozen=True)
class Templates:
    """What a spec says about the pods of each pool."""

    hashes: Mapping[Pool, str]
    pod_specs: Mapping[Pool, Manifest]


@dataclass
class ObjectMemory:
    """One object's facts and the planner's memories."""

    uid: str
    answers: tuple[RouterAnswer, ...] = ()
    answered_at_s: float | None = None
    metrics: tuple[Value, ...] = ()
    links: LinkBook = field(default_factory=LinkBook)
    transfers: TransferCounter = field(default_factory=TransferCounter)
    mode: ModeMemory | None = None
    traffic: TrafficBook = field(default_factory=TrafficBook)
    traffic_read_at_s: float | None = None
    replay: ReplayRecord | None = None  # the last that gave an answer
    replay_asked: ReplayMark | None = None  # the last that was started
    replay_looked_at_s: float = float("-inf")
    replay_error: str = ""  # why the last one gave none
    scaling: ScalingMemory = field(default_factory=ScalingMemory)
    probe: ProbeMemory | None = None
    probing: bool = False
    status_written_at_s: float = float("-inf")
    progress: tuple[int, ...] = ()
    progress_at_s: float | None = None
    settled: bool = False
    # Parsed once for each version of what they are parsed from.
    chosen: tuple[tuple[object, ...], Chosen] | None = None
    table: tuple[int, RoutingTable | None] | None = None
    templates: tuple[BuildContext, Templates] | None = None
    nodes: tuple[tuple[Manifest, ...], tuple[NodeFacts, ...]] | None = None
    remembered: tuple[DisaggregatedModelSpec, int] | None = None  # spec and version of its ControllerRevision
    refused: tuple[int, float, str] | None = None  # generation, when, why the API server would not take it
    applied: dict[tuple[str, str, str], str] = field(default_factory=dict)  # child and manager -> difference

    @property
    def has_reports(self) -> bool:
        """Has any router answered in the last round?"""
        return any(answer.report is not None for answer in self.answers)

    @property
    def in_trial(self) -> bool:
        """Are both modes being tried on real requests?"""
        return self.mode is not None and self.mode.trial is not None

    @property
    def idle_s(self) -> float | None:
        """Since the last request arrived at any router, None if no router says."""
        idle = [answer.report.idle_s for answer in self.answers if answer.report is not None]
        return min(idle) if idle else None

    @property
    def flowing(self) -> bool | None:
        """Do requests flow? None if no router says."""
        if not self.has_reports:
            return None
        return any(
            answer.report is not None
            and (
                answer.report.in_flight > 0 or answer.report.queued > 0 or answer.report.idle_s < BUSY_IDLE_S
            )
            for answer in self.answers
        )

    @property
    def table_version_seen(self) -> int:
        """The newest table that any router or worker knows."""
        versions = [0]
        for answer in self.answers:
            if answer.report is not None:
                versions.append(answer.report.table_version)
                versions.extend(worker.role_version for worker in answer.report.workers)
        return max(versions)


class Memories:
    """All objects' memories."""

    def __init__(self) -> None:
        self._by_key: dict[Key, ObjectMemory] = {}

    def of(self, key: Key, uid: str) -> ObjectMemory:
        """The memory of one object, an empty one if it is new or was made anew."""
        memory = self._by_key.get(key)
        if memory is None or memory.uid != uid:
            memory = self._by_key[key] = ObjectMemory(uid)
        return memory

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._by_key.pop(key, None)
