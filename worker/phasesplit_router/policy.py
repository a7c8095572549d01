"""Where a request goes: a pair, or one worker for both phases. A pure function of what is known.

Least predicted TTFT = queue + prefill of the prompt + exposed transfer; decode load breaks ties.
On equal or unknown data a split model uses a pair. Knows no clock and no network.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from phasesplit.api.names import Role
from phasesplit.api.routing import ServedMode
from phasesplit_router import predict
from phasesplit_router.fleet import Demand, Fleet, Phase, WorkerView

# One worker is preferred to a pair when it is clearly faster, by a time that matters to the class:
# measured profiles of equal workers differ by noise, and the split also protects decoding.
LOCAL_GAIN = 0.8
LOCAL_GAIN_OF_TARGET = 0.1
LOCAL_GAIN_S = 0.05
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
    pairs = [(p, d) for p in prefills for d in decodes if _agree(p, d) and not fleet.split_suspended]
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
