"""Where a request goes: a pair, or one worker for both phases. A pure function of what is known.

Least predicted TTFT = queue + prefill of the prompt + exposed transfer; decode load breaks ties.
On equal or unknown data a split model uses a pair. Knows no clock and no network.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import ServedMode
from phasesplit_router import predict

# One worker is preferred to a pair when it is clearly faster, by a time that matters to the class:
# measured profiles of equal workers differ by noise, and the split also protects decoding.
LOCAL_GAIN = 0.8
LOCAL_GAIN_OF_TARGET = 0.1
LOCAL_GAIN_S = 0.05
MIN_PREFILLS = 2  # one computed, one ready to follow
PREFILL_AHEAD_S = 0.5  # predicted work that may wait inside a worker
TIE = 0.05  # predictions closer than this are equal
TIE_S = 0.01


class LocalReason(StrEnum):
    """Why a request of a split model was served by one worker; label of `local_prefills_total`."""

    SHORT_PROMPT = "short_prompt"
    SLOW_LINK = "slow_link"
    PREFILL_QUEUE = "prefill_queue"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_DECODE_WORKER = "no_decode_worker"
    QUARANTINED = "quarantined"
    REPLAY = "replay"


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
        # Steps are as long as the tightest TPOT allows; decoding takes its share of each.
        step_s = predict.decode_step_s(self.profile, self.num_decodes, self.context_tokens)
        return alone_s / (1 - min(step_s / self.tightest_tpot_s, 0.8))

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
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)  # nodes -> bytes/s
    quarantined: frozenset[tuple[str, str]] = frozenset()
    transfer_deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes. `prefill` is None when `decode` does both phases."""

    prefill: str | None
    decode: str
    ttft_s: float
    local_reason: LocalReason | None = None

    @property
    def mode(self) -> ServedMode:
        """How the request is served."""
        return ServedMode.COLOCATED if self.prefill is None else ServedMode.SPLIT


@dataclass(frozen=True, slots=True)
class Blocked:
    """Workers exist but none has room: wait in this phase's queue."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No worker may serve the request at all now."""


Decision = Choice | Blocked | Unavailable


def choose(demand: Demand, fleet: Fleet) -> Decision:
    """Decide for one request. The same arguments always give the same answer."""
    workers = _preferred(demand, fleet.workers)
    if fleet.mode is ServedMode.COLOCATED:
        return _single(demand, _by_role(workers, Role.COLOCATED) or workers, None)
    prefills, decodes = _by_role(workers, Role.PREFILL), _by_role(workers, Role.DECODE)
    both = _by_role(workers, Role.COLOCATED)
    if demand.is_replay:
        return _single(demand, [*decodes, *both] or prefills, LocalReason.REPLAY)
    pairs = [(p, d) for p in prefills for d in decodes if _agree(p, d)]
    usable = [(p, d) for p, d in pairs if (p.pod, d.pod) not in fleet.quarantined]
    if usable:
        return _split(demand, fleet, usable)
    if not fleet.colocated_allowed:
        # A pair that keeps failing still recomputes locally, which is better than no answer.
        return _split(demand, fleet, pairs) if pairs else Unavailable()
    if pairs:
        return _single(demand, decodes, LocalReason.QUARANTINED)
    reason = LocalReason.NO_DECODE_WORKER if prefills and not decodes else LocalReason.NO_PREFILL_WORKER
    return _single(demand, [*decodes, *both] or prefills, reason)


def _split(demand: Demand, fleet: Fleet, pairs: list[tuple[WorkerView, WorkerView]]) -> Decision:
    costs = [(_pair_cost(demand, fleet, p, d), p, d) for p, d in pairs]
    local = _faster_local(demand, fleet, min((cost for cost, _, _ in costs), key=sum), [d for _, d in pairs])
    if local is not None:
        return local
    scored = [(sum(cost), p, d) for cost, p, d in costs]
    prefill_open = [item for item in scored if item[1].has_prefill_room(demand)]
    if not prefill_open:
        return Blocked(Phase.PREFILL)
    open_pairs = [item for item in prefill_open if item[2].has_decode_room(demand)]
    if not open_pairs:
        return Blocked(Phase.DECODE)
    ties = _ties(open_pairs)
    score, prefill, decode = min(
        ties,
        key=lambda item: (
            item[2].num_decodes,
            item[2].context_tokens,
            item[1].num_prefills,
            _draw(demand.request_id, item[1].pod + item[2].pod),
        ),
    )
    return Choice(prefill.pod, decode.pod, score)


def _faster_local(
    demand: Demand, fleet: Fleet, pair: "PairCost", decodes: Iterable[WorkerView]
) -> Choice | None:
    """The decode worker that beats every pair clearly, if that is known and harms nobody."""
    if not fleet.colocated_allowed:
        return None
    devices = {worker.device for worker in fleet.workers if worker.role is Role.PREFILL and worker.device}
    pair_s = sum(pair)
    limit_s = min(LOCAL_GAIN * pair_s, pair_s - max(LOCAL_GAIN_S, LOCAL_GAIN_OF_TARGET * demand.ttft_s))
    best: Choice | None = None
    for worker in dict.fromkeys(decodes):
        if not (predict.is_measured(worker.profile) and worker.has_prefill_room(demand)):
            continue
        own_s = worker.prefill_s(demand.prompt_tokens)
        if worker.device in devices:
            # A decode worker reads few prompts, so its profile says little about them: on a device of the
            # same kind it is not believed to be faster. What it saves is the queue and the transfer.
            own_s = max(own_s, pair.prefill_s)
        local_s = worker.wait_s(demand) + own_s
        harmless = worker.num_decodes == 0 or own_s <= 0.5 * min(worker.tightest_tpot_s, demand.tpot_s)
        if local_s > limit_s or not harmless or not worker.has_decode_room(demand):
            continue
        if best is None or local_s < best.ttft_s:
            best = Choice(None, worker.pod, local_s, _why_local(pair, own_s))
    return best


def _why_local(pair: "PairCost", local_prefill_s: float) -> LocalReason:
    """The part of the pair's cost that weighs most."""
    causes = {
        LocalReason.PREFILL_QUEUE: pair.queue_s,
        LocalReason.SLOW_LINK: pair.exposed_transfer_s,
        LocalReason.SHORT_PROMPT: pair.prefill_s - local_prefill_s,
    }
    return max(causes, key=lambda reason: causes[reason])


class PairCost(NamedTuple):
    """Parts of a pair's predicted TTFT; their sum is the prediction."""

    queue_s: float
    prefill_s: float
    exposed_transfer_s: float


def _pair_cost(demand: Demand, fleet: Fleet, prefill: WorkerView, decode: WorkerView) -> PairCost:
    own_s = prefill.prefill_s(demand.prompt_tokens)
    kv_bytes = demand.prompt_tokens * prefill.kv_bytes_per_token
    exposed_s = predict.exposed_transfer_s(kv_bytes, fleet.links.get((prefill.node, decode.node)), own_s)
    return PairCost(prefill.wait_s(demand), own_s, exposed_s)


def _single(demand: Demand, workers: list[WorkerView], reason: LocalReason | None) -> Decision:
    if not workers:
        return Unavailable()
    prefill_open = [worker for worker in workers if worker.has_prefill_room(demand)]
    if not prefill_open:
        return Blocked(Phase.PREFILL)
    open_workers = [worker for worker in prefill_open if worker.has_decode_room(demand)]
    if not open_workers:
        return Blocked(Phase.DECODE)
    scored = [
        (worker.wait_s(demand) + worker.prefill_s(demand.prompt_tokens), worker, worker)
        for worker in open_workers
    ]
    score, worker, _ = min(
        _ties(scored),
        key=lambda item: (
            item[1].num_decodes + item[1].num_prefills,
            item[1].context_tokens,
            _draw(demand.request_id, item[1].pod),
        ),
    )
    return Choice(None, worker.pod, score, reason)


def _ties(
    scored: list[tuple[float, WorkerView, WorkerView]],
) -> list[tuple[float, WorkerView, WorkerView]]:
    limit = min(score for score, _, _ in scored)
    limit += max(TIE_S, TIE * limit)
    return [item for item in scored if item[0] <= limit]


def _preferred(demand: Demand, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Workers that can continue the request; those that failed it only when nothing else is left."""
    able = [
        worker
        for worker in workers
        if demand.fingerprint is None or worker.fingerprint in (None, demand.fingerprint)
    ]
    return [worker for worker in able if worker.pod not in demand.avoid] or able


def _by_role(workers: Iterable[WorkerView], role: Role) -> list[WorkerView]:
    return [worker for worker in workers if worker.role is role]


def _agree(prefill: WorkerView, decode: WorkerView) -> bool:
    """KV of one can be used by the other, as far as is known."""
    return None in (prefill.fingerprint, decode.fingerprint) or prefill.fingerprint == decode.fingerprint


def _draw(request_id: str, pods: str) -> bytes:
    """A fair draw between equals that depends on the request alone."""
    return hashlib.blake2b(pods.encode(), key=request_id.encode()[:64], digest_size=8).digest()
