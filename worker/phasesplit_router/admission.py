"""May a request come in: predicted TTFT against its class's target. Pure.

A miss that waiting causes is refused with 429, so that the client can go elsewhere; a request that
would miss even on an idle system follows its class's `when_infeasible`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phasesplit.api.names import Role
from phasesplit.api.routing import LatencyClass, WhenInfeasible
from phasesplit_http.errors import ApiError, overloaded
from phasesplit_router import predict
from phasesplit_router.fleet import Demand, Fleet, WorkerView
from phasesplit_router.policy import Choice, choose

MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a request arriving now has to expect."""

    is_measured: bool  # every worker it could use has a measured profile
    prefill_wait_s: float  # until its prefill would start
    decode_wait_s: float  # until a decode worker would have room
    own_prefill_s: float
    num_queued: int
    max_queued: int

    @property
    def wait_s(self) -> float:
        """Predicted wait in both queues, which overlap."""
        return max(self.prefill_wait_s, self.decode_wait_s)

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.wait_s + self.own_prefill_s


def forecast(
    demand: Demand,
    fleet: Fleet,
    ahead: Sequence[Demand],
    *,
    decode_hold_s: float,
    num_queued: int,
    max_queued: int,
) -> Outlook:
    """What a request has to expect behind those `ahead` of it, who wait in the router's queue.

    `decode_hold_s` is how long a decode place is usually held.
    """
    prefillers = [w for w in fleet.workers if w.role is not Role.DECODE] or list(fleet.workers)
    decoders = [w for w in fleet.workers if w.role is not Role.PREFILL] or list(fleet.workers)
    prefill_wait_s = decode_wait_s = own_s = 0.0
    if prefillers:
        own_s = min(worker.prefill_s(demand.prompt_tokens) for worker in prefillers)
        prefill_wait_s = _prefill_wait_s(demand, fleet, prefillers, ahead, own_s)
    if not any(worker.has_decode_room(demand) for worker in decoders):
        running = sum(worker.num_decodes for worker in decoders)
        decode_wait_s = decode_hold_s * (len(ahead) + 1) / max(1, running)
    return Outlook(
        is_measured=bool(prefillers) and all(predict.is_measured(worker.profile) for worker in prefillers),
        prefill_wait_s=prefill_wait_s,
        decode_wait_s=decode_wait_s,
        own_prefill_s=own_s,
        num_queued=num_queued,
        max_queued=max_queued,
    )


def _prefill_wait_s(
    demand: Demand, fleet: Fleet, prefillers: Sequence[WorkerView], ahead: Sequence[Demand], own_s: float
) -> float:
    queued_s = sum(prefillers[0].prefill_s(item.prompt_tokens) for item in ahead)
    wait_s = min(worker.wait_s(demand) for worker in prefillers) + queued_s / len(prefillers)
    decision = None if ahead else choose(demand, fleet)
    if isinstance(decision, Choice):  # it could start now, perhaps on a decode worker that is idle
        wait_s = min(wait_s, max(0.0, decision.ttft_s - own_s))
    return wait_s


def refuse(latency_class: LatencyClass, outlook: Outlook) -> ApiError | None:
    """The 429 a request gets, or None when it is admitted."""
    if outlook.num_queued >= outlook.max_queued:
        return overloaded(
            f"The queue is full with {outlook.num_queued} requests; retry later.",
            "queue_full",
            max(1.0, min(outlook.wait_s, MAX_RETRY_AFTER_S)),
        )
    if not outlook.is_measured or outlook.ttft_s <= latency_class.ttft_s:
        return None
    if outlook.own_prefill_s > latency_class.ttft_s:
        if latency_class.when_infeasible is WhenInfeasible.SERVE:
            return None
        return overloaded(
            f"The prompt alone takes {outlook.own_prefill_s:.2f} s to read, over the target of class "
            f"{latency_class.name} ({latency_class.ttft_s:.2f} s); "
            "send a shorter prompt or another x-slo-class.",
            "infeasible",
            MAX_RETRY_AFTER_S,
        )
    phase = "decode" if outlook.decode_wait_s > outlook.prefill_wait_s else "prefill"
    over_s = outlook.ttft_s - latency_class.ttft_s
    return overloaded(
        f"The first token would come after {outlook.ttft_s:.2f} s, of which {outlook.wait_s:.2f} s "
        f"waiting for {phase}; the target of class {latency_class.name} is {latency_class.ttft_s:.2f} s; "
        "retry later.",
        f"{phase}_queue",
        min(over_s, MAX_RETRY_AFTER_S),
    )
