"""What the policy decides on: workers as they are now, and what a request needs. Values only.

A worker's view answers what would happen to a request there: how long prefill waits and takes, and
whether there is room. Knows no clock and no network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import ServedMode
from phasesplit_router import predict

MIN_PREFILLS = 2  # one computed, one ready to follow
PREFILL_AHEAD_S = 0.5  # predicted work that may wait inside a worker


class Phase(StrEnum):
    """Which queue a request waits in."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the policy sees it."""

    pod: str
    node: str
    role: Role
    fingerprint: str | None = None
    device: str = ""  # kind of device, empty: unknown
    profile: StepProfile | None = None
    prefill_queue_s: float = 0.0  # predicted prefill work ahead
    num_prefills: int = 0
    max_prefills: int = 4
    # The same by priority, as (priority, number, seconds): a worker takes the highest first, so work
    # of lower priority is not ahead of a request.
    prefills_by_priority: tuple[tuple[int, int, float], ...] = ()
    num_decodes: int = 0
    max_decodes: int = 64
    context_tokens: int = 0  # of the sequences being decoded
    tightest_tpot_s: float = float("inf")  # of the sequences being decoded
    max_step_s: float = float("inf")  # of steps that also carry prompt tokens
    kv_free_tokens: int | None = None  # None: unknown
    kv_bytes_per_token: int = 0

    def wait_s(self, demand: "Demand") -> float:
        """Prefill work that the worker would do before this request's."""
        lower_s = sum(
            seconds for priority, _, seconds in self.prefills_by_priority if priority < demand.priority
        )
        return max(0.0, self.prefill_queue_s - lower_s)

    def has_prefill_room(self, demand: "Demand") -> bool:
        """May another prompt be sent to it now, so that order is kept in the router's queue."""
        lower = sum(number for priority, number, _ in self.prefills_by_priority if priority < demand.priority)
        enough = predict.is_measured(self.profile) and self.wait_s(demand) >= PREFILL_AHEAD_S
        limit = min(self.max_prefills, MIN_PREFILLS) if enough else self.max_prefills
        return self.num_prefills - lower < limit and self.num_prefills < 2 * self.max_prefills

    def prefill_s(self, tokens: int) -> float:
        """Seconds to prefill so many tokens here, beside the sequences that decode."""
        alone_s = predict.prefill_s(self.profile, tokens)
        if not self.num_decodes or not predict.is_measured(self.profile):
            return alone_s
        # Decoding takes its share of each step.
        step_s = predict.decode_step_s(self.profile, self.num_decodes, self.context_tokens)
        return alone_s / (1 - min(step_s / self.max_step_s, 0.8))

    def has_decode_room(self, demand: "Demand") -> bool:
        """May another sequence decode here without breaking TPOT or running out of KV."""
        if self.num_decodes == 0 and self.num_prefills == 0:
            return True
        if self.num_decodes + self.num_prefills >= self.max_decodes:
            return False
        if self.kv_free_tokens is not None and demand.kv_tokens > self.kv_free_tokens:
            return False
        if not predict.is_measured(self.profile):
            return True
        step_s = predict.decode_step_s(
            self.profile, self.num_decodes + 1, self.context_tokens + demand.prompt_tokens
        )
        # A sequence alone on the worker that cannot meet its target gains nothing by waiting.
        alone_s = predict.decode_step_s(self.profile, 1, demand.prompt_tokens)
        return step_s <= max(min(self.tightest_tpot_s, demand.tpot_s), alone_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs."""

    request_id: str
    prompt_tokens: int  # replayed output included
    output_tokens: int
    ttft_s: float
    tpot_s: float
    priority: int = 0
    is_replay: bool = False
    fingerprint: str | None = None  # of the worker that made the tokens sent so far
    avoid: frozenset[str] = frozenset()  # pods that have just failed this request
    mode: ServedMode | None = None  # drawn in a trial that serves both; None: the table's

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV the request will hold at its largest."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Every worker that may get traffic, and what is known between them."""

    mode: ServedMode
    workers: tuple[WorkerView, ...]
    colocated_allowed: bool = True
    split_suspended: bool = False  # the operator says that the split cannot serve, and nothing else may
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)  # nodes -> bytes/s
    quarantined: frozenset[tuple[str, str]] = frozenset()
    transfer_deadline_s: float | None = None

    def serving(self, mode: ServedMode | None) -> "Fleet":
        """The part that serves a mode in a trial of both, or all of it."""
        if mode is None:
            return self
        roles = {Role.COLOCATED} if mode is ServedMode.COLOCATED else {Role.PREFILL, Role.DECODE}
        own = tuple(worker for worker in self.workers if worker.role in roles)
        return replace(self, mode=mode, workers=own or self.workers)
