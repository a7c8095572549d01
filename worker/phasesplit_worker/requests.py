"""What passes between server, engine and transfer: messages and the protocols of both sides.

Values and protocols only, so that transfer and server can be built and tested without an engine.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from phasesplit.api.manifest import KVLayout
from phasesplit.api.reports import ModelFacts
from phasesplit_worker.sequence import RequestKind, SamplingParams, Sequence


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One leg of a request, tokenised and validated by the server."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kind: RequestKind = RequestKind.LOCAL
    priority: int = 0
    slo_class: str = "default"
    output_token_ids: tuple[int, ...] = ()  # the client already has these; counted, not emitted
    seed: int | None = None  # the router's; overrides sampling.seed

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV leg 1 computes and leg 2 pulls."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one chosen token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestTimings:
    """Durations of a finished leg on the worker's monotonic clock. None: did not happen."""

    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    recomputed: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """New tokens of a request, or its end. Given to `on_output` on the engine thread."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new ones, to be emitted
    # Output tokens that come before `token_ids` and must be fed to the detokeniser but not
    # emitted: the first token of leg 2. Replayed tokens of the request are not repeated here.
    skipped_token_ids: tuple[int, ...] = ()
    # stop, length, abort, error, or the reason given to abort. A leg 1 that handed over ends with
    # None: its last output is the one with timings.
    finish_reason: str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of `token_ids`
    timings: RequestTimings | None = None  # in the last output of the leg

    @property
    def is_last(self) -> bool:
        """Nothing more comes for this leg."""
        return self.timings is not None


OnOutput = Callable[[EngineOutput], None]


@dataclass(frozen=True)
class Reservation:
    """Blocks reserved for a leg 2.

    The first `num_cached_tokens // block_size` blocks are shared and already hold their KV: they
    must not be written.
    """

    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine's load."""

    kv_total_blocks: int = 0
    kv_used_blocks: int = 0  # running, reserved and held; cached but free blocks do not count
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_prompt_tokens: int = 0  # queued or partly computed
    num_held: int = 0  # finished prefills waiting to be pulled
    num_preemptions_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    prefix_cache_query_tokens_total: int = 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One engine step, for metrics and for the step profile."""

    prefill_tokens: int
    prefill_context: float  # sum over prefill tokens of the tokens each attends to
    decode_sequences: int
    decode_context_tokens: int
    seconds: float  # wall time of the step, pace included

    @property
    def mix(self) -> str:
        """Value of the `mix` label."""
        if self.prefill_tokens and self.decode_sequences:
            return "mixed"
        return "prefill" if self.prefill_tokens else "decode"


class KVBlocks(Protocol):
    """The bytes of KV blocks in wire order (`api.manifest.KVLayout`). Implemented by KVCache."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def block_view(self, block_id: int) -> memoryview:
        """Writable bytes of one block. On a device: a pinned staging copy, filled for reading."""
        ...

    def commit_block(self, block_id: int) -> None:
        """Say that `block_view(block_id)` was written; copies staging to the device if there is one."""
        ...


class TransferHooks(Protocol):
    """What leg 1 tells the transfer side. Called on the engine thread; must not block."""

    def on_prefill_accepted(self, sequence: Sequence) -> None:
        """Queued. `sequence` is read-only for the callee and only during the call."""
        ...

    def on_blocks_ready(self, request_id: str, num_ready_tokens: int, block_table: tuple[int, ...]) -> None:
        """KV of the first `num_ready_tokens` tokens is present (after each chunk; 0 after a preemption)."""
        ...

    def on_prefill_finished(self, request_id: str, first_token: int, sampling_state: dict[str, int]) -> None:
        """All KV present and the first token known; blocks are held until `release_held`."""
        ...

    def on_prefill_aborted(self, request_id: str, reason: str) -> None:
        """Blocks are gone or about to go; nothing may read them after this call returns."""
        ...


class EnginePort(Protocol):
    """What the transfer side may ask of the engine. All thread-safe; implemented by Engine."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def kv_cache(self) -> KVBlocks: ...

    def reserve(self, request: EngineRequest, on_output: OnOutput) -> Future[Reservation]: ...

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None: ...

    def recompute(self, request_id: str, reason: str, first_token: int | None = None) -> None: ...

    def release_held(self, request_id: str) -> None: ...

    def abort(self, request_id: str, reason: str = "abort") -> None: ...
