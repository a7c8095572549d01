"""The engine's public face: thread-safe calls in, callbacks out, one thread that runs steps.

    loaded = load_model(config)                       # blocking, may raise ModelLoadError
    engine = Engine(config, loaded, hooks=hooks)      # hooks: the transfer side, may be None
    engine.start()

Owns the thread and the command queue. Does not know HTTP, text or the network.
"""

from collections.abc import Callable
from concurrent.futures import Future

from phasesplit.api.names import Role
from phasesplit.api.reports import ModelFacts, StepProfile
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.model.kv_cache import KVCache
from phasesplit_worker.model.loader import LoadedModel
from phasesplit_worker.requests import (
    EngineRequest,
    EngineStats,
    OnOutput,
    Reservation,
    StepRecord,
    TransferHooks,
)


class Engine:
    """Runs sequences. Every public method may be called from any thread."""

    def __init__(
        self,
        config: WorkerConfig,
        loaded: LoadedModel,
        *,
        hooks: TransferHooks | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def facts(self) -> ModelFacts:
        """What the loaded model is."""
        raise NotImplementedError

    @property
    def kv_cache(self) -> KVCache:
        """The paged KV cache; transfer reads and writes its blocks."""
        raise NotImplementedError

    @property
    def heartbeat_s(self) -> float:
        """Monotonic time of the engine loop's last sign of life."""
        raise NotImplementedError

    @property
    def longest_step_s(self) -> float:
        """Longest step that the loop may take; liveness allows five times as much."""
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """Why the engine thread died, None while it is well."""
        raise NotImplementedError

    @property
    def is_paced(self) -> bool:
        """Whether steps are stretched to a declared profile."""
        raise NotImplementedError

    def set_hooks(self, hooks: TransferHooks) -> None:
        """Set the transfer side, before `start`."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the engine thread."""
        raise NotImplementedError

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Queue a LOCAL or PREFILL request.

        Raises RequestError, EngineBusyError or EngineStoppedError; afterwards exactly one output
        with a finish_reason follows.
        """
        raise NotImplementedError

    def reserve(self, request: EngineRequest, on_output: OnOutput) -> Future[Reservation]:
        """Reserve blocks for a DECODE request; resolves when they are there.

        Waits in the queue while KV is short: `abort(request_id)` gives up. After it has resolved
        the caller must end with `start_remote`, `recompute`, or `abort`.
        """
        raise NotImplementedError

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None:
        """All reserved blocks are filled and verified: decode from the first token on."""
        raise NotImplementedError

    def recompute(self, request_id: str, reason: str, first_token: int | None = None) -> None:
        """The pull failed: prefill locally instead. Still emits from the second token on."""
        raise NotImplementedError

    def release_held(self, request_id: str) -> None:
        """Free the held KV of a finished prefill, or the reservation of a leg 2."""
        raise NotImplementedError

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request in any state; its blocks are free at the next step boundary.

        `reason` becomes the finish_reason (a server that found a stop string passes "stop").
        Unknown ids are ignored.
        """
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Load as of the last step boundary."""
        raise NotImplementedError

    def profile(self) -> StepProfile:
        """The declared profile when paced, else the fitted one."""
        raise NotImplementedError

    def set_role(
        self, role: Role, max_batched_tokens: int | None = None, tpot_s: float | None = None
    ) -> None:
        """Change the scheduler's profile from the next step on."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        raise NotImplementedError

    def stop(self, timeout_s: float) -> bool:
        """Abort what is left and end the thread. False if it did not end in time."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Nothing waits, runs or is held."""
        raise NotImplementedError
