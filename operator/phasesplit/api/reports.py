"""What workers and routers report about themselves: admin bodies and the status endpoint."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from phasesplit.api.legs import LegReport
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import ServedMode


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class WorkerState(StrEnum):
    """Life of a worker process."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class StepProfile(_Message):
    """Fitted law of one engine step on this worker.

    step_s = base_s + prefill_tokens * per_prefill_token_s
           + prefill_tokens * context * per_prefill_context_s   (attention of prefill)
           + decode_sequences * per_decode_sequence_s
           + decode_context_tokens * per_decode_context_s
    `overlap` in [0, 1]: 0 = prefill and decode times add, 1 = the larger hides the smaller.
    """

    base_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_prefill_context_s: float = 0.0
    per_decode_sequence_s: float = 0.0
    per_decode_context_s: float = 0.0
    overlap: float = 0.0
    num_samples: int = 0
    residual: float = 0.0  # median |measured - fitted| / measured
    guessed: bool = False


class LinkSample(_Message):
    """One measurement of a pair of nodes: bytes over the time the socket was busy."""

    from_node: str
    to_node: str
    from_pod: str
    to_pod: str
    transport: str
    bytes: int
    busy_s: float
    age_s: float
    probe: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Busy-time bandwidth."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0


class ModelFacts(_Message):
    """What only a worker that loaded the model knows."""

    name: str
    fingerprint: str
    weights_bytes: int
    kv_layout: KVLayout
    max_model_length: int
    num_parameters: int = 0


class WorkerReport(_Message):
    """`GET /admin/state` of a worker."""

    pod: str
    node: str
    pool: Pool
    role: Role
    role_version: int
    state: WorkerState
    message: str = ""  # why FAILED, in one sentence
    engine_id: str
    paced: bool = False
    device: str = "cpu"
    model: ModelFacts | None = None
    kv_total_blocks: int = 0
    kv_used_blocks: int = 0
    max_num_seqs: int = 0  # that may run at once; 0: not told
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_prompt_tokens: int = 0  # prompt tokens queued or partly computed
    profile: StepProfile | None = None
    links: list[LinkSample] = Field(default_factory=list)
    transfers_total: int = 0
    transfer_failures_total: dict[str, int] = Field(default_factory=dict)  # by reason
    # The same by the pod that was pulled from, where it is known: pod -> reason -> count.
    transfer_failures_by_peer: dict[str, dict[str, int]] = Field(default_factory=dict)


class RoleAssignment(_Message):
    """Body of `POST /admin/role`. Ignored when `version` is not newer than what the worker has."""

    role: Role
    version: int
    max_batched_tokens: int | None = None  # colocated chunk budget; None: derived from `max_step_s`
    max_step_s: float | None = None  # predicted; None: the worker's own target


class ProbeRequest(_Message):
    """Body of `POST /admin/probe`: measure the link *from* a peer to this worker."""

    host: str
    port: int
    pod: str = ""
    node: str = ""
    bytes: int = Field(default=4 << 20, gt=0, le=64 << 20)
    deadline_s: float = Field(default=2.0, gt=0, le=30)


class ProbeResult(_Message):
    """Answer of a probe. `sample` is absent when it failed; then `error` says why."""

    sample: LinkSample | None = None
    error: str = ""


class CancelRequest(_Message):
    """Body of `POST /admin/cancel`."""

    request_id: str


class ClassReport(_Message):
    """One latency class over the router's recent window (60 s)."""

    name: str
    arrival_rate_per_s: float = 0.0
    attained: int = 0
    finished: int = 0
    rejected: int = 0
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    second_token_gap_p99_s: float | None = None
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    queue_s: float = 0.0  # predicted wait of a request arriving now


class KVTrace(_Message):
    """One finished request as the router saw it; `GET /v1/kv/{request_id}` on the router.

    Times are seconds since the request's arrival at the router.
    """

    request_id: str
    mode: ServedMode
    slo_class: str
    prefill: LegReport | None = None
    decode: LegReport | None = None  # the only leg when served locally
    ttft_s: float | None = None
    second_token_gap_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    queue_s: float = 0.0
    num_migrations: int = 0
    finish_reason: str | None = None
    text: str | None = None  # kept only while the router runs with --trace-text


class RouterReport(_Message):
    """`GET /v1/phasesplit/status` of a router."""

    namespace: str = ""
    name: str = ""
    table_version: int = 0
    mode: ServedMode = ServedMode.COLOCATED
    in_flight: int = 0
    queued: int = 0
    idle_s: float = 0.0  # since the last request arrived
    requests_total: int = 0
    traced_total: int = 0  # rows that `GET /v1/phasesplit/trace` has ever had
    failed_total: int = 0
    migrations_total: int = 0
    local_prefills_total: dict[str, int] = Field(default_factory=dict)
    workers: list[WorkerReport] = Field(default_factory=list)
    unreachable: dict[str, str] = Field(default_factory=dict)  # pod -> last error
    links: list[LinkSample] = Field(default_factory=list)
    classes: list[ClassReport] = Field(default_factory=list)
    quarantined_pairs: list[str] = Field(default_factory=list)  # "prefill pod,decode pod"
