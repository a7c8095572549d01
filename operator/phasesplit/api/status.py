"""The `status` of a `DisaggregatedModel`: what is served now, why, and with what numbers.

A value that has no meter is absent, never zero. Enums are open in the CRD, so that an older CRD
takes the status of a newer operator.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from phasesplit.api.conditions import Condition, Reason
from phasesplit.api.names import Pool
from phasesplit.api.routing import ServedMode
from phasesplit.api.schema_rules import list_map

Message = Annotated[str, Field(max_length=2048)]
Name = Annotated[str, Field(max_length=253)]
Time = Annotated[str, Field(max_length=40)]


class _Status(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class DecisionStatus(_Status):
    """The last decision about the mode."""

    mode: Annotated[ServedMode, Field(description="Mode decided for.")]
    reason: Annotated[Reason, Field(description="Why, from a closed list.")]
    message: Annotated[Message, Field(description="Why, in one sentence with the numbers.")] = ""
    since: Annotated[Time, Field(description="When this decision was first made, RFC 3339.")] = ""


class ModeEvidence(_Status):
    """What is predicted or measured for one mode."""

    goodput_per_second: Annotated[
        float | None, Field(description="Requests per second that meet every target.")
    ] = None
    attainment_percent: Annotated[
        float | None, Field(description="Share of requests that meet every target.")
    ] = None


class EvidenceSource(StrEnum):
    """Where the numbers come from."""

    REPLAY = "Replay"
    CLOSED_FORM = "ClosedForm"


class CheckStatus(_Status):
    """One item of the list that a split must pass."""

    name: Annotated[str, Field(max_length=128, description="What must hold.")]
    passed: Annotated[bool, Field(description="Does it hold?")]
    message: Annotated[str, Field(max_length=512, description="Why it does not, with the numbers.")] = ""


class FlipStatus(_Status):
    """The smallest change of one thing at which the answer would be the other mode."""

    what: Annotated[str, Field(max_length=64, description="What would have to change.")]
    factor: Annotated[float, Field(description="To how many times of what it is now.")]
    message: Annotated[str, Field(max_length=512, description="The change in numbers.")]


class TrialArmStatus(_Status):
    """One mode as a trial has measured it."""

    requests: Annotated[int, Field(ge=0, description="Requests that counted.")] = 0
    attained: Annotated[int, Field(ge=0, description="Of these, in target.")] = 0


class TrialStatus(_Status):
    """The trial on real requests that runs, or ran last."""

    running: Annotated[bool, Field(description="Does it run now?")] = False
    split: Annotated[TrialArmStatus | None, Field(description="Served in two pools.")] = None
    colocated: Annotated[TrialArmStatus | None, Field(description="Served colocated.")] = None
    difference_percent_points: Annotated[
        float | None, Field(description="Share in target of the split over colocated.")
    ] = None
    failures: Annotated[int, Field(ge=0, description="Trials in a row that did not confirm the split.")] = 0
    not_before: Annotated[Time | None, Field(description="Earliest time of the next, RFC 3339.")] = None
    message: Annotated[str, Field(max_length=512, description="How the last one ended.")] = ""


class EvidenceStatus(_Status):
    """The numbers behind the decision, for both modes."""

    source: Annotated[
        EvidenceSource | None,
        Field(description="Replay: real requests served again on paper. ClosedForm: a formula, meanwhile."),
    ] = None
    replayed_at: Annotated[Time | None, Field(description="When the replay was asked for, RFC 3339.")] = None
    requests: Annotated[int | None, Field(ge=0, description="Requests that were replayed.")] = None
    split: Annotated[ModeEvidence | None, Field(description="Serving in two pools.")] = None
    colocated: Annotated[ModeEvidence | None, Field(description="Chunked prefill on every worker.")] = None
    gain_percent: Annotated[
        float | None, Field(description="Predicted goodput per GPU of the split over colocated serving.")
    ] = None
    gain_low_percent: Annotated[
        float | None, Field(description="Lower end of the gain's 95 % interval, of a replay.")
    ] = None
    gain_high_percent: Annotated[
        float | None, Field(description="Upper end of the gain's 95 % interval, of a replay.")
    ] = None
    interference_percent: Annotated[
        float | None, Field(description="Decode tokens that are late because of prefill beside them.")
    ] = None
    link_need_bytes_per_second: Annotated[
        float | None, Field(description="Bandwidth that the traffic and the targets need.")
    ] = None
    link_have_bytes_per_second: Annotated[float | None, Field(description="Bandwidth measured.")] = None
    checks: Annotated[
        list[CheckStatus], Field(max_length=32, description="The list that a split must pass, in its order.")
    ] = []
    flips: Annotated[
        list[FlipStatus], Field(max_length=16, description="What would turn the answer, nearest first.")
    ] = []
    trial: Annotated[TrialStatus | None, Field(description="The modes as measured in a trial.")] = None
    problem: Annotated[
        str, Field(max_length=512, description="Why the last replay gave no answer, if it did not.")
    ] = ""


class MeasuresStatus(_Status):
    """What users feel and what it costs, over the last window."""

    prompt_tokens_per_second: Annotated[float | None, Field(description="Prompt tokens read.")] = None
    ttft_milliseconds: Annotated[
        float | None, Field(description="Time to the first token at the class percentile, at the router.")
    ] = None
    tpot_milliseconds: Annotated[
        float | None, Field(description="Time per output token at the class percentile, at the router.")
    ] = None
    attainment_percent: Annotated[
        float | None, Field(description="Share of requests that met every target, of the worst class.")
    ] = None
    kv_bytes_per_request: Annotated[float | None, Field(description="KV carried per request.")] = None
    transfer_milliseconds: Annotated[float | None, Field(description="Time of a KV transfer.")] = None
    queue_milliseconds: Annotated[
        float | None, Field(description="Predicted wait of a request that arrives now.")
    ] = None
    duplicated_weight_bytes: Annotated[
        float | None, Field(description="Weights held more than once because there are two pools.")
    ] = None


class PoolStatus(_Status):
    """One pool of workers."""

    name: Annotated[Pool, Field(description="Name of the pool.")]
    desired: Annotated[int, Field(ge=0, description="Workers wanted now.")] = 0
    recommended: Annotated[
        int | None,
        Field(ge=0, description="Workers the operator would have; differs with scaling.policy Off."),
    ] = None
    ready: Annotated[int, Field(ge=0, description="Workers that take requests.")] = 0
    updated: Annotated[int, Field(ge=0, description="Workers of the current template.")] = 0
    gpus: Annotated[int, Field(ge=0, description="GPUs held.")] = 0
    nodes: Annotated[list[Name], Field(max_length=64, description="Nodes the workers run on.")] = []
    summary: Annotated[str, Field(max_length=32, description="Ready over desired, for kubectl get.")] = ""


class NodePair(_Status):
    """A prefill node and a decode node."""

    from_node: Annotated[Name, Field(alias="from", description="Node of the prefill side.")]
    to_node: Annotated[Name, Field(alias="to", description="Node of the decode side.")]


class LinksStatus(_Status):
    """The links that carry KV."""

    transport: Annotated[str, Field(max_length=32, description="Transport in use.")] = ""
    median_bytes_per_second: Annotated[float | None, Field(description="Median over node pairs.")] = None
    worst_bytes_per_second: Annotated[float | None, Field(description="Slowest node pair.")] = None
    worst_pair: Annotated[NodePair | None, Field(description="The slowest node pair.")] = None
    measured_at: Annotated[Time | None, Field(description="When, RFC 3339.")] = None


class ClassStatus(_Status):
    """One latency class."""

    name: Annotated[str, Field(max_length=63, description="Name of the class.")]
    attainment_percent: Annotated[float | None, Field(description="Share that met both targets.")] = None
    ttft_milliseconds: Annotated[
        float | None, Field(description="Time to the first token at the class percentile.")
    ] = None
    tpot_milliseconds: Annotated[
        float | None, Field(description="Time per output token at the class percentile.")
    ] = None


class PlacementStatus(_Status):
    """How good the chosen nodes are."""

    cost: Annotated[float | None, Field(description="Relative time that KV spends on the wire.")] = None
    bound: Annotated[float | None, Field(description="Least possible cost.")] = None
    message: Annotated[Message, Field(description="Which nodes and why, or what is missing where.")] = ""


class ScalingStatus(_Status):
    """The last decision about the number of workers."""

    reason: Annotated[Reason, Field(description="Why, from a closed list.")]
    message: Annotated[Message, Field(description="Why, in one sentence with the numbers.")] = ""


class DisaggregatedModelStatus(_Status):
    """What is."""

    observed_generation: Annotated[int, Field(ge=0, description="Generation that this status is about.")] = 0
    mode: Annotated[
        ServedMode | None, Field(description="Mode served now; absent until something serves.")
    ] = None
    decision: Annotated[DecisionStatus | None, Field(description="Last decision about the mode.")] = None
    evidence: Annotated[EvidenceStatus | None, Field(description="Numbers behind the decision.")] = None
    measures: Annotated[MeasuresStatus | None, Field(description="What users feel and what it costs.")] = None
    pools: Annotated[
        list[PoolStatus],
        Field(
            max_length=4,
            description="The two pools.",
            json_schema_extra=list_map("name"),
        ),
    ] = []
    links: Annotated[LinksStatus | None, Field(description="The links that carry KV.")] = None
    slo: Annotated[
        list[ClassStatus],
        Field(
            max_length=16,
            description="The latency classes.",
            json_schema_extra=list_map("name"),
        ),
    ] = []
    placement: Annotated[PlacementStatus | None, Field(description="How good the chosen nodes are.")] = None
    scaling: Annotated[ScalingStatus | None, Field(description="Last decision about replicas.")] = None
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            description="Conditions, one per type.",
            json_schema_extra=list_map("type"),
        ),
    ] = []

    def to_manifest(self) -> dict[str, Any]:
        """As written to the API server: camelCase, absent values left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
