"""Which ready worker does which phase. A switch takes seconds and costs no GPU, so it comes first."""

from collections.abc import Mapping, Sequence

from phasesplit.api.names import Pool, Role
from phasesplit.planner.capacity import Need
from phasesplit.planner.facts import WorkerFacts
from phasesplit.planner.scaling_clamp import shrink_to_total

ROLE_PAUSE_S = 20.0  # least time between two rearrangements


def count_prefill_roles(workers: Sequence[WorkerFacts]) -> int | None:
    """Workers that prefill now; None while any ready worker is still colocated."""
    if any(worker.role is Role.COLOCATED for worker in workers):
        return None
    return sum(worker.role is Role.PREFILL for worker in workers)


def choose_prefill_count(
    workers: Sequence[WorkerFacts], now: Need, keep: Need, *, switching: bool, paused: bool
) -> int:
    """How many of the ready workers prefill.

    The present arrangement stays while it serves; the pools' own arrangement returns once it would
    serve with the margin of a shrink; otherwise the smallest change that serves.
    """
    total = len(workers)
    natural = sum(worker.pool is Pool.PREFILL for worker in workers)
    if not switching or total < 2 or natural in (0, total):
        return natural
    present = count_prefill_roles(workers)
    if present is not None and 0 < present < total and paused:
        return present
    if keep.prefill <= natural <= total - keep.decode:
        return natural
    if present is not None and now.prefill <= present <= total - now.decode:
        return present
    if now.prefill + now.decode <= total:
        return min(max(natural, now.prefill), total - now.decode)
    wanted = shrink_to_total({Pool.PREFILL: now.prefill, Pool.DECODE: now.decode}, total)
    return min(max(1, wanted[Pool.PREFILL]), total - 1)


def assign_roles(workers: Sequence[WorkerFacts], num_prefill: int) -> Mapping[str, Role]:
    """Roles by pod: a pool's own phase first, then who has the role already, then high ordinals."""

    def rank(worker: WorkerFacts) -> tuple[bool, bool, int, str]:
        other_pool = worker.pool is not Pool.PREFILL
        ordinal = pod_ordinal(worker.pod)
        # Of the prefill pool the low ordinals keep prefilling, of the decode pool the high ones help.
        return other_pool, worker.role is not Role.PREFILL, -ordinal if other_pool else ordinal, worker.pod

    ranked = sorted(workers, key=rank)
    return {
        worker.pod: Role.PREFILL if index < num_prefill else Role.DECODE
        for index, worker in enumerate(ranked)
    }


def pod_ordinal(pod: str) -> int:
    """The number at the end of a StatefulSet pod's name; 0 without one."""
    tail = pod.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0
