"""What the server asks of the other parts: protocols, so that it is built and tested without torch.

Knows the parts by what they do only; `__main__` fits the real ones in.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVManifest
from phasesplit.api.names import Role
from phasesplit.api.reports import LinkSample, ModelFacts, ProbeRequest, ProbeResult, StepProfile
from phasesplit_worker.requests import EngineRequest, EngineStats, OnOutput, Reservation
from phasesplit_worker.server.metrics import WorkerMetrics


class EngineApi(Protocol):
    """The engine's thread-safe face; see `engine.engine.Engine` for the contract of each call."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def heartbeat_s(self) -> float: ...

    @property
    def longest_step_s(self) -> float: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def is_paced(self) -> bool: ...

    def start(self) -> None: ...

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None: ...

    def reserve(self, request: EngineRequest, on_output: OnOutput) -> Future[Reservation]: ...

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None: ...

    def recompute(self, request_id: str, reason: str, first_token: int | None = None) -> None: ...

    def release_held(self, request_id: str) -> None: ...

    def abort(self, request_id: str, reason: str = "abort") -> None: ...

    def stats(self) -> EngineStats: ...

    def profile(self) -> StepProfile: ...

    def set_role(
        self, role: Role, max_batched_tokens: int | None = None, max_step_s: float | None = None
    ) -> None: ...

    def drain(self) -> None: ...

    def stop(self, timeout_s: float) -> bool: ...

    def is_idle(self) -> bool: ...


class TextDecoder(Protocol):
    """Tokens to text, piece by piece, up to a stop string.

    What has come out after n tokens depends on these n tokens alone. That is why a leg that starts
    in the middle (leg 2, replay) can feed the earlier tokens, throw their text away, and go on
    exactly where the earlier leg stopped, held-back text included.
    """

    stop_reason: str | None

    def append(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TokenizerApi(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render the chat template and tokenise it; raises RequestError when the template refuses."""
        ...

    def decoder(self, stop: Sequence[str], min_tokens: int) -> TextDecoder: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless `ignore_eos`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A pull that succeeded: what was verified and what it cost."""

    first_token: int
    num_tokens: int
    num_bytes: int
    transport: str
    seconds: float
    busy_s: float
    exposed_s: float


class PullFailedError(Exception):
    """A pull that failed; `reason` is the label of the metric."""

    def __init__(self, reason: str, message: str, first_token: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.first_token = first_token


class TransferApi(Protocol):
    """KV between workers, on the event loop."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def offer(self, request_id: str, num_tokens: int) -> KVTransferParams:
        """Leg 1's answer to "where do I pull from?"."""
        ...

    async def pull(
        self, request: EngineRequest, params: KVTransferParams, reservation: Reservation
    ) -> Pulled:
        """Fill the reserved blocks and verify them. Raises PullFailedError; when it returns, raises or
        is cancelled, nothing writes to the blocks any more."""
        ...

    def manifest(self, request_id: str) -> KVManifest | None: ...

    async def probe(self, request: ProbeRequest) -> ProbeResult: ...

    def link_samples(self) -> list[LinkSample]: ...

    @property
    def transfers_total(self) -> int: ...

    @property
    def failures_total(self) -> dict[str, int]: ...

    @property
    def failures_by_peer(self) -> dict[str, dict[str, int]]: ...


@dataclass(frozen=True)
class Parts:
    """What exists once the model is loaded."""

    engine: EngineApi
    tokenizer: TokenizerApi
    transfer: TransferApi


LoadParts = Callable[[WorkerMetrics], Parts]  # blocking; raises ModelLoadError or ConfigError
