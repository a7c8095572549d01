"""The protocol of a request's legs between router and worker.

Leg 1 (prefill): the client's body plus `kv_transfer_params = {do_remote_decode: true}`. The
worker answers as a stream of server-sent events, whatever the client asked for:
  1. one `PrefillAccepted` event (`object = "phasesplit.prefill"`) as soon as the prompt is
     tokenised and queued; from then on its KV can be pulled, chunk by chunk;
  2. one ordinary chunk carrying the first token;
  3. `data: [DONE]`. If the first token already ends the request (stop, max_tokens = 1) the chunk
     carries `finish_reason`, and there is no leg 2.
Leg 2 (decode): the client's body plus the `kv_transfer_params` of event 1, sent to the decode
worker right after event 1. The worker reserves blocks, pulls, verifies, and streams from the
*second* token on; it takes the first token from the manifest. If the pull fails it recomputes
locally and still streams from the second token on; `recomputed` in the leg's usage says so.
A local leg: the client's body with no `kv_transfer_params`.

Names follow vLLM's `kv_transfer_params`, so that one router can drive both.
Every chunk a worker streams to a router carries `token_ids` in each choice (the tokens whose text
is new in this chunk); the router strips it for clients and keeps it for replay.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

PREFILL_ACCEPTED: Final = "phasesplit.prefill"
LEG_DONE: Final = "phasesplit.leg"

# Field names added to bodies and chunks; a client may not send the first two.
FIELD_TRANSFER = "kv_transfer_params"
FIELD_INTERNAL = "phasesplit"
FIELD_TOKEN_IDS = "token_ids"  # noqa: S105


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class KVTransferParams(_Message):
    """`kv_transfer_params` in a leg's body and in the prefill worker's first event."""

    do_remote_decode: bool = False  # leg 1: somebody else will decode
    do_remote_prefill: bool = False  # leg 2: somebody else has prefilled
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    remote_num_tokens: int | None = None
    remote_pod: str | None = None


class InternalParams(_Message):
    """`phasesplit` in a leg's body: what only the router may say."""

    slo_class: str = "default"
    priority: int = 0
    # Tokens the client already has (replay after a lost decode worker). They count as output:
    # the worker continues after them and emits no text for them.
    output_token_ids: list[int] = Field(default_factory=list)
    # Seed of sampling noise, fixed by the router so that every leg draws the same noise.
    seed: int | None = None


class PrefillAccepted(_Message):
    """First event of leg 1."""

    object: Literal["phasesplit.prefill"] = PREFILL_ACCEPTED
    kv_transfer_params: KVTransferParams
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    kv_bytes: int = 0


class LegReport(_Message):
    """Last event before `[DONE]` of every leg (`object = "phasesplit.leg"`); router only.

    Times are durations in seconds on the worker's own monotonic clock; None: did not happen.
    """

    object: Literal["phasesplit.leg"] = LEG_DONE
    request_id: str
    pod: str
    node: str
    role: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int
    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    # KV pulled by this leg (leg 2 only).
    kv_bytes: int = 0
    kv_transport: str | None = None
    kv_transfer_s: float | None = None  # first byte asked for to last byte verified
    kv_busy_s: float | None = None  # time the socket was busy with data waiting
    kv_exposed_s: float | None = None  # part after the prefill had finished
    recomputed: str | None = None  # reason for a local recompute, None if the pull succeeded
    num_preemptions: int = 0
