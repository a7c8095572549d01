"""What the choice of mode is given and what it returns. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.conditions import ConditionStatus, Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode, TrialPolicy
from phasesplit.planner.facts import LinkFacts, LoadFacts, StepProfile, WorkerFacts
from phasesplit.planner.replay import ReplayOutcome
from phasesplit.planner.traffic import ServedRequest
from phasesplit.planner.trial_halves import Halves
from phasesplit.planner.trial_types import Trial, TrialReading


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """One pool as far as the mode cares."""

    pool: Pool
    desired: int
    ready: int
    placeable: bool = True  # can the pool be placed at all on devices of its own?
    shares_device: bool = False  # its GPUs are time slices of the other pool's
    detail: str = ""  # why it is not available, in the pods' own words


@dataclass(frozen=True, slots=True)
class TransferWindow:
    """KV transfers of the last minute or so."""

    attempts: int = 0
    failures: int = 0
    worst_reason: str = ""


@dataclass(frozen=True, slots=True)
class ReplayEvidence:
    """The last window served again, and how long ago that was asked."""

    outcome: ReplayOutcome
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModeMemory:
    """What the next decision needs of the earlier ones; the caller keeps it and passes it back.

    After a restart of the operator `ModeMemory(since_s=<status.decision.since>, cause=<its reason if
    the object was not serving the split it wants>)` is enough.
    """

    since_s: float | None = None  # the served mode has been the same since
    fallbacks_at_s: tuple[float, ...] = ()  # recent changes from split to colocated, oldest first
    cause: Reason | None = None  # why the last split was left
    cause_gone_since_s: float | None = None
    colocated_better_since_s: float | None = None
    trial: Trial | None = None  # both modes are being tried
    trial_failures: int = 0  # in a row
    trial_not_before_s: float | None = None
    trial_reading: TrialReading | None = None  # of the trial that runs, or ran last
    trial_message: str = ""  # how the last one ended
    trial_interrupted: bool = False  # the operator was restarted in the middle of one


@dataclass(frozen=True, slots=True)
class ModeInput:
    """Everything the decision depends on. `now_s` and the memory's times share one clock."""

    now_s: float
    wanted: Mode
    fallback: Fallback
    served: ServedMode
    pools: Mapping[Pool, PoolPresence]
    classes: tuple[LatencyClass, ...]
    loads: tuple[LoadFacts, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    transfers: TransferWindow = field(default_factory=TransferWindow)
    profiles: Mapping[Pool, StepProfile] = field(default_factory=dict)
    kv_bytes_per_token: int | None = None
    min_bandwidth_bytes_per_s: float | None = None
    dwell_s: float = 600.0
    minimum_gain_percent: float = 5.0
    chunk_tokens: int | None = None
    replay: ReplayEvidence | None = None  # absent: the closed form decides
    trial: TrialPolicy = TrialPolicy.NEVER
    requests: tuple[ServedRequest, ...] = ()  # that ended lately, for a trial to count
    interference: float | None = None  # share of decode tokens late because their step carried prefill
    memory: ModeMemory = field(default_factory=ModeMemory)


@dataclass(frozen=True, slots=True)
class LinkVerdict:
    """The condition `LinkHealthy` with its numbers."""

    status: ConditionStatus
    reason: Reason
    message: str
    need_bytes_per_s: float | None = None
    have_bytes_per_s: float | None = None
    worst: LinkFacts | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One item of the ordered lists."""

    label: str
    passed: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """What to serve from now on, and why. `colocated_allowed` goes into the routing table as it is."""

    mode: ServedMode
    reason: Reason
    message: str
    since_s: float
    changed: bool
    serving: bool  # False: Split, fallback Never, and the split cannot serve: routers answer 503
    colocated_allowed: bool
    link: LinkVerdict
    beneficial: ConditionStatus  # condition SplitBeneficial
    beneficial_reason: Reason
    beneficial_message: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    halves: Halves | None = None  # a trial serves both modes at once
    replay: ReplayEvidence | None = None  # what the evidence is, if it is not the closed form
    checks: tuple[CheckResult, ...] = ()
    memory: ModeMemory = field(default_factory=ModeMemory)
