"""What the router knows of each worker now: address, last report, and its own work there.

Mutable, on the event loop only. The clock is passed in. Sends nothing itself.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from phasesplit.api.names import Role
from phasesplit.api.reports import LinkSample, StepProfile, WorkerReport, WorkerState
from phasesplit.api.routing import RoutingTable
from phasesplit_router import predict
from phasesplit_router.fleet import WorkerView
from phasesplit_router.snapshot import Address, Snapshot

MAX_PREFILLS = 8  # legs with their prefill ahead, per worker; more wait in the router's queue
UNMEASURED_PREFILLS = 4  # the same while nothing is known of a worker's speed
MAX_DECODES = 64
FAILED_POLLS = 4
ALIVE_S = 5.0  # a leg that had a byte this recently shows that its worker lives
SLOW_START_S = 10.0
SLOW_START_FIRST = 2
LINK_AGE_S = 120.0
KV_HEADROOM = 0.95


class OpenLeg(Protocol):
    """A leg that runs on a worker."""

    had_token: bool
    last_byte_s: float

    def abort(self, message: str) -> None:
        """Break it off: its reader raises `LegLostError`."""
        ...


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process at one address."""

    address: Address
    since_s: float  # when this router first saw it
    slow_start: bool
    report: WorkerReport | None = None
    report_at_s: float = 0.0
    profile: StepProfile | None = None  # if it has one that is worth using
    error: str = ""  # of the last poll, empty when it succeeded
    is_down: bool = False  # refused connections, or failed several polls
    failed_polls: int = 0  # in a row
    avoid_until_s: float = 0.0  # after failed legs
    failures: int = 0  # in a row
    legs: set[OpenLeg] = field(default_factory=set)
    prefills: Counter[int] = field(default_factory=Counter)  # number by priority
    prompt_tokens: Counter[int] = field(default_factory=Counter)  # of these
    num_decodes: int = 0
    context_tokens: int = 0
    kv_tokens: int = 0
    tpots: Counter[float] = field(default_factory=Counter)
    _others_prefill_tokens: int = 0  # queued at the worker by other routers, at the last poll

    @property
    def pod(self) -> str:
        """Name of its pod."""
        return self.address.pod

    @property
    def fingerprint(self) -> str | None:
        """What its KV and tokens are compatible with; None until it was polled."""
        return self.report.model.fingerprint if self.report and self.report.model else None

    def take_report(self, report: WorkerReport, now_s: float) -> None:
        """Note a successful poll."""
        restarted = self.report is not None and self.report.engine_id != report.engine_id
        if restarted:
            self.since_s, self.slow_start = now_s, True
        if self.is_down or restarted:
            self.avoid_until_s, self.failures = 0.0, 0
        self.report, self.report_at_s, self.error = report, now_s, ""
        self.is_down, self.failed_polls = False, 0
        self.profile = _usable_profile(report)
        self._others_prefill_tokens = max(0, report.num_waiting_prompt_tokens - self.prompt_tokens.total())

    def poll_failed(self, message: str, now_s: float, *, refused: bool) -> None:
        """Note a failed poll. Some that time out may only mean a busy machine, if tokens still come."""
        self.error = message
        self.failed_polls += 1
        silent = all(now_s - leg.last_byte_s > ALIVE_S for leg in self.legs)
        self.is_down = self.is_down or refused or (silent and self.failed_polls >= FAILED_POLLS)

    def leg_failed(self, now_s: float) -> None:
        """Keep new requests away for a moment, longer after each failure in a row."""
        self.failures += 1
        self.avoid_until_s = now_s + min(0.5 * 2 ** (self.failures - 1), 10.0)

    def leg_succeeded(self) -> None:
        """A leg ended well."""
        self.failures, self.avoid_until_s = 0, 0.0

    @property
    def is_able(self) -> bool:
        """May new requests go there, apart from the moment after a failure."""
        if not self.address.ready or self.address.terminating or self.is_down:
            return False
        return self.report is None or self.report.state is WorkerState.READY

    def doubt(self, now_s: float) -> int:
        """0: nothing speaks against it, 1: it has never answered, 2: it has just failed."""
        if now_s < self.avoid_until_s:
            return 2
        return 1 if self.report is None else 0

    @property
    def num_prefills(self) -> int:
        """Prompts sent there whose first token has not come."""
        return self.prefills.total()

    def begin_prefill(self, tokens: int, priority: int) -> None:
        """A prompt was sent there."""
        self.prefills[priority] += 1
        self.prompt_tokens[priority] += tokens

    def end_prefill(self, tokens: int, priority: int) -> None:
        """Its first token came, or it failed."""
        self.prefills[priority] -= 1
        self.prompt_tokens[priority] -= tokens
        if self.prefills[priority] <= 0:
            del self.prefills[priority], self.prompt_tokens[priority]

    def begin_decode(self, context_tokens: int, tpot_s: float) -> None:
        """A sequence decodes there from now on."""
        self.num_decodes += 1
        self.context_tokens += context_tokens
        self.tpots[tpot_s] += 1

    def end_decode(self, context_tokens: int, tpot_s: float) -> None:
        """It ended."""
        self.num_decodes -= 1
        self.context_tokens -= context_tokens
        self.tpots[tpot_s] -= 1
        if self.tpots[tpot_s] <= 0:
            del self.tpots[tpot_s]

    def view(self, role: Role, now_s: float, max_step_s: float = float("inf")) -> WorkerView:
        """What the policy needs of it."""
        tokens_ahead = self.prompt_tokens.total() + self._others_prefill_tokens
        profile = self.profile
        layout = self.report.model.kv_layout if self.report and self.report.model else None
        queue_s = predict.prefill_s(profile, tokens_ahead) if tokens_ahead else 0.0
        return WorkerView(
            pod=self.pod,
            node=self.address.node,
            role=role,
            fingerprint=self.fingerprint,
            device=self.report.device if self.report is not None else "",
            profile=profile,
            prefill_queue_s=queue_s,
            num_prefills=self.num_prefills,
            max_prefills=self._ramp(
                MAX_PREFILLS if predict.is_measured(profile) else UNMEASURED_PREFILLS, now_s
            ),
            prefills_by_priority=tuple(
                (priority, number, predict.prefill_s(profile, self.prompt_tokens[priority]))
                for priority, number in self.prefills.items()
            ),
            num_decodes=self.num_decodes,
            max_decodes=self._ramp(MAX_DECODES, now_s),
            context_tokens=self.context_tokens,
            tightest_tpot_s=min(self.tpots, default=float("inf")),
            max_step_s=max_step_s,
            kv_free_tokens=self._kv_free_tokens(),
            kv_bytes_per_token=layout.bytes_per_token if layout else 0,
        )

    def _ramp(self, limit: int, now_s: float) -> int:
        """A new worker gets its share step by step: its caches are cold and it may be broken."""
        if not self.slow_start or now_s - self.since_s >= SLOW_START_S:
            return limit
        return min(limit, SLOW_START_FIRST + int(limit * (now_s - self.since_s) / SLOW_START_S))

    def _kv_free_tokens(self) -> int | None:
        report = self.report
        if report is None or report.model is None or not report.kv_total_blocks:
            return None
        block = report.model.kv_layout.block_size
        used = max(self.kv_tokens, report.kv_used_blocks * block)
        return max(0, int(report.kv_total_blocks * block * KV_HEADROOM) - used)


class WorkerBook:
    """All workers of the newest snapshot."""

    def __init__(self) -> None:
        self.table: RoutingTable | None = None
        self.workers: dict[str, Worker] = {}
        self._had_snapshot = False

    def apply(self, snapshot: Snapshot, now_s: float) -> tuple[list[Worker], list[Worker]]:
        """Take a snapshot over. Returns workers that are new and workers that are gone."""
        self.table = snapshot.table
        added: list[Worker] = []
        before, self.workers = self.workers, {}
        for address in snapshot.addresses:
            worker = before.get(address.pod)
            if worker is not None and _same_process(worker.address, address):
                if address.ready and not worker.address.ready:
                    worker.avoid_until_s = 0.0
                worker.address = address
                del before[address.pod]
            else:
                worker = Worker(address, now_s, slow_start=self._had_snapshot)
                added.append(worker)
            self.workers[address.pod] = worker
        self._had_snapshot = self._had_snapshot or bool(snapshot.addresses)
        return added, list(before.values())

    def role_of(self, worker: Worker) -> Role:
        """The role the table gives it."""
        if self.table is None:
            return Role.COLOCATED
        return self.table.role_of(worker.pod, worker.address.pool)

    def views(self, now_s: float) -> tuple[WorkerView, ...]:
        """Workers that may get new requests.

        One that has just failed, or has never answered, is left out while a better one of its role is
        there: a request which no worker can serve does not take all of them away from everybody, and
        none is tried on pods that may not exist.
        """
        able = [(self.role_of(worker), worker) for worker in self.workers.values() if worker.is_able]
        least: dict[Role, int] = {}
        for role, worker in able:
            least[role] = min(worker.doubt(now_s), least.get(role, 2))
        table = self.table
        longest_s = {role: table.max_step_s(role) if table is not None else float("inf") for role in least}
        return tuple(
            worker.view(role, now_s, longest_s[role])
            for role, worker in able
            if worker.doubt(now_s) == least[role]
        )

    def links(self, now_s: float) -> dict[tuple[str, str], float]:
        """Bandwidth between nodes: measured by workers where fresh, else as the table believes."""
        believed = (
            {(link.from_node, link.to_node): link.bytes_per_s for link in self.table.links}
            if self.table
            else {}
        )
        return believed | {
            pair: sample.bytes_per_s for pair, sample in newest_links(self.workers.values(), now_s).items()
        }


def newest_links(workers: Iterable[Worker], now_s: float) -> dict[tuple[str, str], LinkSample]:
    """The newest fresh sample of each pair of nodes."""
    newest: dict[tuple[str, str], LinkSample] = {}
    for worker in workers:
        if worker.report is None:
            continue
        since_poll_s = max(0.0, now_s - worker.report_at_s)
        for sample in worker.report.links:
            age_s = sample.age_s + since_poll_s
            if age_s > LINK_AGE_S or sample.bytes_per_s <= 0:
                continue
            key = (sample.from_node, sample.to_node)
            if key not in newest or age_s < newest[key].age_s:
                newest[key] = sample.model_copy(update={"age_s": age_s})
    return newest


def _usable_profile(report: WorkerReport) -> StepProfile | None:
    profile = report.profile
    if profile is not None and report.paced and not profile.guessed:
        # A declared pace is exact from the first step on.
        return profile.model_copy(update={"num_samples": max(profile.num_samples, predict.MIN_SAMPLES)})
    return profile if profile is not None and (profile.num_samples or profile.guessed) else None


def _same_process(old: Address, new: Address) -> bool:
    return (old.host, old.port, old.pool) == (new.host, new.port, new.pool)
