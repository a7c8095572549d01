"""The `DisaggregatedModel` spec as pydantic models: types, bounds, defaults, descriptions.

`api/crd.py` turns these into the structural schema; descriptions here are what `kubectl explain`
shows, rules here are what the API server checks. Knows nothing of the cluster. A field stands here
only if something acts on it.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from phasesplit.api.names import Pool
from phasesplit.api.routing import WhenInfeasible
from phasesplit.api.schema_rules import (
    CACHE_NEEDS_DOWNLOAD,
    FRACTION,
    LIST_SET,
    MAX_GPUS,
    MIN_MAX,
    ONE_SOURCE,
    OWNED_ARGS,
    TORCH_DECODE_GPUS,
    TORCH_PREFILL_GPUS,
    list_map,
    rules,
)

Manifest = dict[str, Any]  # a plain Kubernetes object or part of one
# YAML reads `storage: 1000` as a number; the API server takes both.
Quantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$", json_schema_extra={"x-kubernetes-int-or-string": True}),
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
]
ShortText = Annotated[str, Field(max_length=253)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Mode(StrEnum):
    """What the user wants."""

    AUTO = "Auto"
    SPLIT = "Split"
    COLOCATED = "Colocated"


class Fallback(StrEnum):
    ALWAYS = "Always"
    NEVER = "Never"


class DType(StrEnum):
    FLOAT32 = "Float32"
    FLOAT16 = "Float16"
    BFLOAT16 = "BFloat16"


class EngineType(StrEnum):
    TORCH = "Torch"


class Binding(StrEnum):
    AUTOMATIC = "Automatic"
    GATED = "Gated"
    AFFINITY = "Affinity"


class ScalingPolicy(StrEnum):
    MANAGED = "Managed"
    EXTERNAL = "External"
    OFF = "Off"


class RoleSwitching(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Transport(StrEnum):
    TCP = "TCP"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class SecretKeyRef(_Spec):
    """A key of a Secret in the object's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the Secret.")]
    key: Annotated[str, Field(min_length=1, max_length=253, description="Key inside the Secret.")]


class NameRef(_Spec):
    """Name of an object in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the object.")]


class HuggingFaceSource(_Spec):
    """A repository on the Hugging Face hub."""

    repository: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$", description="Repository, for example Qwen/Qwen3-4B.")]
    revision: Annotated[str, Field(min_length=1, max_length=100, description="Branch, tag or commit.")] = "main"
    token_secret_ref: Annotated[SecretKeyRef | None, Field(description="Access token for a gated repository.")] = None


class VolumeSource(_Spec):
    """An existing PersistentVolumeClaim that holds the model."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the claim.")]
    path: Annotated[str, Field(max_length=1024, description="Folder of the model inside the volume.")] = ""


class ModelSource(_Spec):
    """Where the weights come from; exactly one field."""

    model_config = ConfigDict(json_schema_extra=rules(ONE_SOURCE))

    hugging_face: Annotated[HuggingFaceSource | None, Field(description="Download from the Hugging Face hub.")] = None
    volume: Annotated[VolumeSource | None, Field(description="Read from an existing claim.")] = None
    path: Annotated[str | None, Field(min_length=1, max_length=1024, pattern=r"^/", description="Absolute path that the worker container already has: in its image, or mounted by the node's container runtime. No host path is mounted.")] = None


class ModelCache(_Spec):
    """One claim per pod, so that a restart does not download again; it then pins the pod to its node."""

    storage: Annotated[Quantity, Field(description="Size of each claim.")]
    storage_class_name: Annotated[ShortText | None, Field(description="Storage class; absent means the cluster's default.")] = None


class ModelSpec(_Spec):
    """The model to serve."""

    model_config = ConfigDict(json_schema_extra=rules(CACHE_NEEDS_DOWNLOAD))

    source: Annotated[ModelSource, Field(description="Where the weights come from.")]
    name: Annotated[ShortText | None, Field(min_length=1, description="Name in the OpenAI API; absent means the object's name.")] = None
    cache: Annotated[ModelCache | None, Field(description="Claim per pod for downloaded weights.")] = None
    max_model_length: Annotated[int | None, Field(ge=16, le=4_194_304, description="Longest prompt plus answer in tokens; absent means the checkpoint's.")] = None
    dtype: Annotated[DType | None, Field(description="Absent means the checkpoint's on GPUs, Float32 on CPU.")] = None


class EngineSpec(_Spec):
    """The worker program."""

    type: Annotated[EngineType, Field(description="Torch is the engine of this project.")] = EngineType.TORCH
    image: Annotated[str | None, Field(min_length=1, max_length=512, description="Worker image; absent means the operator's setting.")] = None
    image_pull_secrets: Annotated[list[NameRef], Field(max_length=8, description="Secrets for pulling the images.", json_schema_extra=list_map("name"))] = []
    block_size: Annotated[int, Field(ge=1, le=256, description="Tokens per KV block.")] = 16
    kv_memory_fraction: Annotated[float, Field(ge=0.01, le=1, description="Share of the memory left after the weights that holds KV.", json_schema_extra=rules(FRACTION))] = 0.9
    args: Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64, description="Further worker flags; those that the operator sets itself are refused.", json_schema_extra=rules(OWNED_ARGS))] = []


class Replicas(_Spec):
    """How many workers a pool may have."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_MAX))

    min: Annotated[int, Field(ge=0, le=1024, description="Smallest number of workers.")] = 1
    max: Annotated[int, Field(ge=1, le=1024, description="Largest number of workers.")] = 1


class GPU(_Spec):
    """The accelerator of each worker."""

    count: Annotated[int, Field(ge=0, le=16, description="GPUs per worker; 0 serves on CPU. The Torch engine takes 0 or 1.")] = 1
    resource_name: Annotated[ShortText, Field(description="Extended resource of the device plugin.")] = "nvidia.com/gpu"
    products: Annotated[list[ShortText], Field(max_length=16, description="Accepted values of the node label nvidia.com/gpu.product; empty accepts all.", json_schema_extra=LIST_SET)] = []
    min_memory: Annotated[Quantity | None, Field(description="Least memory per GPU.")] = None


class PoolSpec(_Spec):
    """Hardware and template of one pool of workers."""

    replicas: Annotated[Replicas, Field(description="Bounds of the number of workers.")] = Replicas()
    gpu: Annotated[GPU, Field(description="Accelerator of each worker.")] = GPU()
    resources: Annotated[Manifest, Field(description="Kubernetes resource requests and limits of the worker container.")] = {}
    node_selector: Annotated[dict[str, ShortText], Field(max_length=32, description="Labels a node must have.")] = {}
    tolerations: Annotated[list[Manifest], Field(max_length=32, description="Kubernetes tolerations.")] = []
    affinity: Annotated[Manifest, Field(description="Kubernetes affinity; honoured by the placement too.")] = {}
    topology_spread_constraints: Annotated[list[Manifest], Field(max_length=8, description="Kubernetes spread constraints; honoured by the placement too.")] = []
    runtime_class_name: Annotated[ShortText | None, Field(description="Absent means nvidia if that class exists and gpu.count is above 0.")] = None
    template: Annotated[Manifest, Field(description="Overlay on the pod template: maps merge deep, lists of named things merge by name, other lists replace.")] = {}


class Colocated(_Spec):
    """Settings of chunked prefill while a worker serves both phases."""

    max_batched_tokens: Annotated[int | None, Field(ge=8, le=1_048_576, description="Tokens per step; absent means the largest whose predicted step keeps the tightest TPOT.")] = None


class SLOClass(_Spec):
    """A latency class and its targets."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", description="Sent by clients in the header x-slo-class.")]
    priority: Annotated[int, Field(ge=-1000, le=1000, description="Higher goes first.")] = 0
    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000, description="Target for the time to the first token.")] = 2000
    tpot_milliseconds: Annotated[int, Field(ge=1, le=600_000, description="Target for the time per output token.")] = 100
    percentile: Annotated[int, Field(ge=1, le=99, description="Share of requests, in percent, that must meet both targets.")] = 95
    when_infeasible: Annotated[WhenInfeasible, Field(description="What happens to a request that could not meet its targets even on an idle system.")] = WhenInfeasible.SERVE


class TransferSpec(_Spec):
    """How KV moves from prefill to decode."""

    transports: Annotated[list[Transport], Field(min_length=1, max_length=4, description="Allowed transports, best first.", json_schema_extra=LIST_SET)] = [Transport.TCP]
    deadline_milliseconds: Annotated[int | None, Field(ge=100, le=600_000, description="Whole deadline; absent means the larger of 5 s and three times bytes over bandwidth.")] = None
    min_bandwidth: Annotated[Quantity | None, Field(description="Least bytes per second of the link; absent means what the targets need.")] = None


class PlacementLevel(_Spec):
    """Nodes that share the value of this label are near each other."""

    node_label: Annotated[str, Field(min_length=1, max_length=317, description="Node label.")]


class PlacementSpec(_Spec):
    """How pods are bound to nodes."""

    binding: Annotated[Binding, Field(description="Gated pins each pod to a chosen node; Affinity names labels; Automatic gates only where the exact node matters.")] = Binding.AUTOMATIC
    levels: Annotated[list[PlacementLevel], Field(max_length=8, description="Nearest first; a measured bandwidth overrides the guess.")] = [
        PlacementLevel(node_label="nvidia.com/gpu.clique"),
        PlacementLevel(node_label="kubernetes.io/hostname"),
        PlacementLevel(node_label="topology.kubernetes.io/zone"),
    ]


class ScalingSpec(_Spec):
    """Who decides how many workers each pool has."""

    policy: Annotated[ScalingPolicy, Field(description="Managed: the operator; External: an HPA or KEDA writes replicas; Off: advice in status only.")] = ScalingPolicy.MANAGED
    max_gpus: Annotated[int | None, Field(alias="maxGPUs", ge=1, le=4096, description="Largest number of GPUs over both pools.")] = None
    role_switching: Annotated[RoleSwitching, Field(description="May a worker take the other phase's role when that is faster than a new replica?")] = RoleSwitching.ENABLED
    down_stabilization_seconds: Annotated[int, Field(ge=0, le=86_400, description="How long fewer workers must be enough before one is removed.")] = 300


class TrialPolicy(StrEnum):
    """Is a split that is predicted to pay tried on real requests first?"""

    ALWAYS = "Always"
    NEVER = "Never"


class AdoptionSpec(_Spec):
    """When a change of mode is worth it."""

    minimum_gain_percent: Annotated[int, Field(ge=0, le=1000, description="Predicted goodput per GPU that the split must gain over colocated serving before Auto adopts it.")] = 5
    dwell_seconds: Annotated[int, Field(ge=1, le=86_400, description="Least time between two changes of mode, and before a return to the split.")] = 600
    trial: Annotated[TrialPolicy, Field(description="Always: Auto keeps a split only when alternating windows of real requests confirm it. Never: it adopts on prediction alone.")] = TrialPolicy.ALWAYS


class PrometheusSpec(_Spec):
    """The Prometheus that scrapes router and workers."""

    address: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^https?://", description="Base URL.")]
    bearer_token_secret_ref: Annotated[SecretKeyRef | None, Field(description="Bearer token.")] = None
    ca_secret_ref: Annotated[SecretKeyRef | None, Field(description="CA bundle in PEM.")] = None


class MetricsSpec(_Spec):
    """Where latencies are read from."""

    prometheus: Annotated[PrometheusSpec | None, Field(description="Absent means the operator's setting.")] = None


class RouterService(_Spec):
    """The Service that clients use."""

    type: Annotated[ServiceType, Field(description="Kubernetes Service type.")] = ServiceType.CLUSTER_IP
    port: Annotated[int, Field(ge=1, le=65_535, description="Port of the Service.")] = 80


class RouterSpec(_Spec):
    """The OpenAI-compatible entry point."""

    replicas: Annotated[int, Field(ge=1, le=16, description="Router pods.")] = 1
    service: Annotated[RouterService, Field(description="The Service that clients use.")] = RouterService()
    api_keys_secret_ref: Annotated[NameRef | None, Field(description="Secret whose values are the accepted API keys; absent accepts all.")] = None
    resources: Annotated[Manifest, Field(description="Kubernetes resource requests and limits of the router container.")] = {}


class RolloutSpec(_Spec):
    """How changes of the pod template reach the pods."""

    progress_deadline_seconds: Annotated[int, Field(ge=30, le=86_400, description="After this long without progress the object is Stalled.")] = 1800
    drain_seconds: Annotated[int, Field(ge=0, le=3600, description="How long a terminating worker may finish its requests; acts on pods started after the change.")] = 120


class DisaggregatedModelSpec(_Spec):
    """What the user wants."""

    model_config = ConfigDict(json_schema_extra=rules(TORCH_PREFILL_GPUS, TORCH_DECODE_GPUS, MAX_GPUS))

    model: Annotated[ModelSpec, Field(description="The model to serve.")]
    mode: Annotated[Mode, Field(description="Auto measures whether the split pays; Split and Colocated decide by hand.")] = Mode.AUTO
    fallback: Annotated[Fallback, Field(description="May a Split object serve colocated while the split cannot serve?")] = Fallback.ALWAYS
    paused: Annotated[bool, Field(description="Reconcile nothing but status.")] = False
    engine: Annotated[EngineSpec, Field(description="The worker program.")] = EngineSpec()
    prefill: Annotated[PoolSpec, Field(description="Workers that read prompts.")] = PoolSpec()
    decode: Annotated[PoolSpec, Field(description="Workers that write answers.")] = PoolSpec()
    colocated: Annotated[Colocated, Field(description="Settings of chunked prefill.")] = Colocated()
    slo: Annotated[list[SLOClass], Field(min_length=1, max_length=16, description="Latency classes; the first is used for requests that name none.", json_schema_extra=list_map("name"))] = [SLOClass(name="default")]
    transfer: Annotated[TransferSpec, Field(description="How KV moves.")] = TransferSpec()
    placement: Annotated[PlacementSpec, Field(description="How pods are bound to nodes.")] = PlacementSpec()
    scaling: Annotated[ScalingSpec, Field(description="Who decides how many workers there are.")] = ScalingSpec()
    adoption: Annotated[AdoptionSpec, Field(description="When a change of mode is worth it.")] = AdoptionSpec()
    metrics: Annotated[MetricsSpec, Field(description="Where latencies are read from.")] = MetricsSpec()
    router: Annotated[RouterSpec, Field(description="The entry point.")] = RouterSpec()
    rollout: Annotated[RolloutSpec, Field(description="How template changes reach the pods.")] = RolloutSpec()

    def pool(self, pool: Pool) -> PoolSpec:
        """The settings of one pool."""
        return self.prefill if pool is Pool.PREFILL else self.decode
