"""The planner's memory of the mode after a restart, from what the last copy left in the status. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from phasesplit.api.conditions import Reason
from phasesplit.api.routing import ServedMode
from phasesplit.operator.times import from_rfc3339
from phasesplit.planner.mode_types import ModeMemory

_CAUSES = {str(reason): reason for reason in (Reason.LINK_DEGRADED, Reason.POOL_UNAVAILABLE, Reason.MISMATCH)}


def restore_mode(status: Mapping[str, object], served: ServedMode, now_s: float) -> ModeMemory:
    """What is known of the earlier decisions."""
    return _with_trials(_served_since(status, served, now_s), status, served)


def _served_since(status: Mapping[str, object], served: ServedMode, now_s: float) -> ModeMemory:
    before = _mapping(status.get("decision"))
    since_s = from_rfc3339(str(before.get("since", "")))
    if before.get("mode") != served:
        return ModeMemory(since_s=since_s)
    cause = _CAUSES.get(str(before.get("reason")))
    if served is not ServedMode.COLOCATED:
        return ModeMemory(since_s=since_s)
    if before.get("reason") == Reason.DWELL:
        return ModeMemory(since_s=since_s, cause=Reason.LINK_DEGRADED, cause_gone_since_s=now_s)
    # A first start waits for its pools: that is no fallback to dwell after.
    if cause is Reason.POOL_UNAVAILABLE and status.get("mode") is None:
        cause = None
    return ModeMemory(since_s=since_s, cause=cause)


def _with_trials(memory: ModeMemory, status: Mapping[str, object], served: ServedMode) -> ModeMemory:
    """A trial in the middle of which the last copy ended has no verdict: its split is not adopted."""
    trial = _mapping(_mapping(status.get("evidence")).get("trial"))
    interrupted = _mapping(status.get("decision")).get("reason") == Reason.TRIAL
    failures = trial.get("failures")
    return replace(
        memory,
        trial_failures=failures if isinstance(failures, int) and failures > 0 else 0,
        trial_not_before_s=from_rfc3339(str(trial.get("notBefore", ""))),
        trial_message=str(trial.get("message", "")),
        trial_interrupted=interrupted and served is ServedMode.SPLIT,
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
