"""The KV manifest: what a prefill says about the KV it holds, before anybody decodes from it.

Decode starts only when metadata, fingerprint, token hash and checksums agree. Ages are relative
(seconds) because clocks of two hosts differ.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MANIFEST_VERSION = 1


class ManifestState(StrEnum):
    """Life of a prefill's KV."""

    RUNNING = "running"  # chunks still being computed
    READY = "ready"  # all prompt tokens computed, first token known
    PULLED = "pulled"  # confirmed by the decode side, blocks freed
    EXPIRED = "expired"  # nobody came in time, blocks freed
    ABORTED = "aborted"  # cancelled or failed, blocks freed


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class KVLayout(_Message):
    """Shape of one KV block: `[2 (K,V), layers, block_size, kv_heads, head_dim]` of `dtype`.

    The order is the *wire* order per block; how a worker keeps it in memory is its own business.
    """

    num_layers: Annotated[int, Field(gt=0)]
    num_kv_heads: Annotated[int, Field(gt=0)]
    head_dim: Annotated[int, Field(gt=0)]
    block_size: Annotated[int, Field(gt=0)]  # tokens
    dtype: str  # "float32", "float16", "bfloat16"

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the wire."""
        return self.bytes_per_token * self.block_size


class KVManifest(_Message):
    """Served at `GET /v1/kv/{request_id}` and sent in the KV protocol before any block."""

    version: int = MANIFEST_VERSION
    request_id: Annotated[str, Field(max_length=128)]
    model_fingerprint: str  # config, weights identity, tokenizer, dtype, block size, attention kind
    kv_layout: KVLayout
    token_ids_hash: tuple[str, ...]  # chained, one hex digest per block, the last may be partial
    num_tokens: Annotated[int, Field(ge=0)]  # prompt tokens the KV covers when READY
    num_ready_tokens: Annotated[int, Field(ge=0)] = 0  # computed so far (whole blocks unless READY)
    first_token: int | None = None
    sampling_state: dict[str, int] = Field(default_factory=dict)  # seed, position
    blocks: tuple[int, ...] = ()  # block ids on the prefill worker
    bytes: int = 0
    checksums: tuple[str, ...] = ()  # xxh3_64 hex, one per ready block
    engine_id: str = ""  # changes with every start of the worker process
    endpoint: str = ""  # host:port
    transports: tuple[str, ...] = ("TCP",)
    state: ManifestState = ManifestState.RUNNING
    age_s: float = 0.0
    expires_in_s: float = 0.0
