"""Which changes are news: Kubernetes Events on transitions only. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from phasesplit.api.conditions import Condition, ConditionType, Reason
from phasesplit.api.names import Role
from phasesplit.api.routing import ServedMode
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.events import Notice
from phasesplit.operator.apply import Change
from phasesplit.operator.status import read_conditions
from phasesplit.planner.mode_types import ModeDecision
from phasesplit.planner.scaling_types import ScalingDecision

# Others flip with the load, or follow from these.
_NEWS = (
    ConditionType.ACCEPTED,
    ConditionType.STALLED,
    ConditionType.AVAILABLE,
    ConditionType.READY,
    ConditionType.PLACED,
    ConditionType.LINK_HEALTHY,
    ConditionType.METRICS_AVAILABLE,
)
# Bad when true.
_INVERTED = (ConditionType.STALLED,)


def condition_notices(old: Manifest, new: Manifest) -> list[Notice]:
    """One notice for each condition that flipped."""
    before = {condition.type: condition for condition in read_conditions(old)}
    found = []
    for condition in read_conditions(new):
        previous = before.get(condition.type)
        if condition.type not in _NEWS or condition.status == "Unknown":
            continue
        if previous is None and _is_good(condition):
            continue  # the first status says that all is well: no news
        if previous is None or previous.status != condition.status:
            text = f"{condition.type} is {condition.status}: {condition.message or condition.reason}"
            found.append(Notice("Normal" if _is_good(condition) else "Warning", str(condition.reason), text))
    return found


def mode_notice(before: ServedMode | None, decision: ModeDecision) -> Notice | None:
    """A switch of the mode: from, to, reason, numbers."""
    if before is None or before is decision.mode:
        return None
    kind: Literal["Normal", "Warning"] = "Warning" if decision.link.status == "False" else "Normal"
    text = f"from {before} to {decision.mode}: {decision.message}"
    return Notice(kind, str(decision.reason), text, action="SwitchMode")


def drift_notices(changes: Sequence[Change]) -> list[Notice]:
    """What somebody changed by hand and was reverted."""
    return [
        Notice("Warning", "ManualDrift", f"{change} and was set back", action="Revert")
        for change in changes
        if change.drift
    ]


def scale_notices(changes: Sequence[Change], scaling: ScalingDecision) -> list[Notice]:
    """Changes of replicas."""
    return [
        Notice("Normal", str(scaling.reason), f"{change.name}: {scaling.message}", action="Scale")
        for change in changes
    ]


def role_notices(
    before: Mapping[str, Role] | None, after: Mapping[str, Role], scaling: ScalingDecision
) -> list[Notice]:
    """Ready workers that serve in another role than before, to follow the load."""
    if before is None:
        return []
    changed = [pod for pod in sorted(scaling.roles) if before.get(pod) != after.get(pod)]
    return [
        Notice(
            "Normal",
            str(Reason.ROLE_SWITCH),
            f"{pod} serves as {after.get(pod, 'its pool says')}: {scaling.message}",
            action="SwitchRole",
        )
        for pod in changed
    ]


def _is_good(condition: Condition) -> bool:
    return (condition.status == "True") != (condition.type in _INVERTED)
