"""Which pod is replaced next when the pods' template has changed. Pure.

One pod at a time over both pools: while one side is away the other serves colocated. A pod that does
not serve anyway is replaced at once, so that a bad revision never blocks its correction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api.names import Pool


@dataclass(frozen=True)
class RolloutPod:
    """One worker pod as far as a rollout cares."""

    name: str
    pool: Pool
    ordinal: int
    ready: bool
    terminating: bool
    outdated: bool  # made from an older template


@dataclass(frozen=True)
class RolloutStep:
    """Pods to delete now, and why nothing more."""

    delete: tuple[str, ...] = ()
    message: str = ""


def plan_rollout(pods: Sequence[RolloutPod], desired: Mapping[Pool, int]) -> RolloutStep:
    """The next step. Pods beyond the desired number are the StatefulSet's business."""
    wanted = [pod for pod in pods if pod.ordinal < desired.get(pod.pool, 0)]
    outdated = [pod for pod in wanted if pod.outdated and not pod.terminating]
    if not outdated:
        return RolloutStep()
    broken = sorted(pod.name for pod in outdated if not pod.ready)
    if broken:
        return RolloutStep(tuple(broken), f"replacing {_list(broken)}, not serving and of an older template")
    waiting = _not_serving(wanted, desired)
    if waiting:
        return RolloutStep((), f"{len(outdated)} pods to replace, waiting for {waiting}")
    chosen = max(
        outdated, key=lambda pod: (_serving(wanted, pod.pool), pod.pool is Pool.PREFILL, pod.ordinal)
    )
    alone = " (the only worker, so nothing serves meanwhile)" if len(wanted) == 1 else ""
    return RolloutStep(
        (chosen.name,), f"replacing {chosen.name}, {len(outdated)} of {len(wanted)} to go{alone}"
    )


def _not_serving(wanted: Sequence[RolloutPod], desired: Mapping[Pool, int]) -> str:
    for pod in sorted(wanted, key=lambda pod: pod.name):
        if pod.terminating:
            return f"{pod.name} to end"
        if not pod.ready:
            return f"{pod.name} to become ready"
    for pool, count in desired.items():
        present = sum(1 for pod in wanted if pod.pool is pool)
        if present < count:
            return f"{count - present} {pool} pods to be created"
    return ""


def _serving(wanted: Sequence[RolloutPod], pool: Pool) -> int:
    return sum(1 for pod in wanted if pod.pool is pool and pod.ready)


def _list(pods: Sequence[str]) -> str:
    return ", ".join(pods[:3]) + (f" and {len(pods) - 3} more" if len(pods) > 3 else "")
