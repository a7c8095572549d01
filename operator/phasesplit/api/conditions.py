"""Condition types and reasons of a `DisaggregatedModel`, and the rule for merging them.

Reasons are a closed list: what users alert on. Messages are one sentence with the numbers.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ConditionType(StrEnum):
    """In the order in which they are shown."""

    ACCEPTED = "Accepted"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    AVAILABLE = "Available"
    READY = "Ready"
    PLACED = "Placed"
    LINK_HEALTHY = "LinkHealthy"
    METRICS_AVAILABLE = "MetricsAvailable"
    SLO_MET = "SLOMet"
    SPLIT_BENEFICIAL = "SplitBeneficial"


class Reason(StrEnum):
    """Why a condition or a decision is what it is."""

    # Accepted
    VALID = "Valid"
    INVALID = "Invalid"
    OWNED_BY_ANOTHER = "OwnedByAnother"
    # Reconciling, Stalled, Ready, Available
    PAUSED = "Paused"
    CREATING = "Creating"
    ROLLING_OUT = "RollingOut"
    SETTLED = "Settled"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    ALL_SERVING = "AllServing"
    SERVING = "Serving"
    NOTHING_SERVES = "NothingServes"
    WORKERS_STARTING = "WorkersStarting"
    ROUTER_STARTING = "RouterStarting"
    CRASH_LOOP = "CrashLoopBackOff"
    IMAGE_PULL = "ImagePullBackOff"
    UNSCHEDULABLE = "Unschedulable"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    CONTAINER_ERROR = "ContainerError"
    # Placed
    PLACED = "Placed"
    PLACING = "Placing"
    NOT_ENOUGH_GPUS = "NotEnoughGPUs"
    NO_GPU_RESOURCE = "NoGPUResource"
    NO_ELIGIBLE_NODE = "NoEligibleNode"
    # LinkHealthy
    LINK_OK = "LinkOK"
    LINK_DEGRADED = "LinkDegraded"
    LINK_TOO_SLOW = "LinkTooSlow"
    NOT_MEASURED = "NotMeasured"
    TRANSFER_FAILURES = "TransferFailures"
    # MetricsAvailable
    METRICS_OK = "MetricsOK"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    METRICS_OUTAGE = "MetricsOutage"
    METRICS_GARBAGE = "MetricsGarbage"
    NOT_CONFIGURED = "NotConfigured"
    # SLOMet
    TARGETS_MET = "TargetsMet"
    TARGET_MISSED = "TargetMissed"
    # mode
    AS_REQUESTED = "AsRequested"
    SPLIT_PAYS = "SplitPays"
    NOT_ENOUGH_TRAFFIC = "NotEnoughTraffic"
    NOT_YET_MEASURED = "NotYetMeasured"
    SHARED_GPU = "SharedGPU"
    NO_INTERFERENCE = "NoInterference"
    GAIN_TOO_SMALL = "GainTooSmall"
    MISMATCH = "Mismatch"
    POOL_UNAVAILABLE = "PoolUnavailable"
    COLOCATED_BETTER = "ColocatedBetter"
    DWELL = "Dwell"
    TRIAL = "Trial"
    TRIAL_FAILED = "TrialFailed"
    # scaling
    HOLD = "Hold"
    LOAD_UP = "LoadUp"
    LOAD_DOWN = "LoadDown"
    QUEUE_WAIT = "QueueWait"
    ROLE_SWITCH = "RoleSwitch"
    AT_LIMIT = "AtLimit"
    MANUAL_DRIFT = "ManualDrift"


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(BaseModel):
    """One entry of `status.conditions`."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    type: Annotated[ConditionType, Field(description="What is said to hold.")]
    status: Annotated[ConditionStatus, Field(description="True, False, or Unknown when we do not know.")]
    reason: Annotated[Reason, Field(description="Why, from a closed list.")]
    message: Annotated[str, Field(max_length=2048, description="Why, in one sentence with the numbers.")] = ""
    observed_generation: Annotated[int, Field(description="Generation of the spec that this is about.")] = 0
    last_transition_time: Annotated[
        str, Field(max_length=40, description="When the status last flipped, RFC 3339.")
    ] = ""


def merge_conditions(old: Iterable[Condition], new: Iterable[Condition], now: str) -> tuple[Condition, ...]:
    """New conditions with the transition time of the old ones kept unless the status flips.

    `now` is RFC 3339. The result is in the order of `ConditionType`.
    """
    before = {condition.type: condition for condition in old}
    merged = []
    for condition in new:
        previous = before.get(condition.type)
        same = previous is not None and previous.status == condition.status and previous.last_transition_time
        time = previous.last_transition_time if previous is not None and same else now
        merged.append(condition.model_copy(update={"last_transition_time": time}))
    order = list(ConditionType)
    return tuple(sorted(merged, key=lambda condition: order.index(condition.type)))
