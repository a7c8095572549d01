"""The engine's public face: thread-safe calls in, callbacks out, one thread that runs steps.

    loaded = load_model(config)                       # blocking, may raise ModelLoadError
    engine = Engine(config, loaded, hooks=hooks)      # hooks: the transfer side, may be None
    engine.start()

Owns the thread and the command queue. Does not know HTTP, text or the network.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch

from phasesplit.api.names import Role
from phasesplit.api.reports import ModelFacts, StepProfile
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.engine.core import EngineCore
from phasesplit_worker.engine.pace import read_pace
from phasesplit_worker.engine.profiler import uncounted
from phasesplit_worker.engine.stepping import GUESS, Stepper
from phasesplit_worker.engine.validation import check_request
from phasesplit_worker.errors import EngineBusyError, EngineStoppedError
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
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.scheduling.scheduler import Scheduler, StepLimits
from phasesplit_worker.token_hash import salt_of

logger = logging.getLogger(__name__)

# Requests that wait, run or are held at once; beyond it `submit` refuses.
MAX_OPEN_REQUESTS = 2048
_IDLE_WAIT_S = 0.5
_BLOCKED_WAIT_S = 0.02
_MIN_LONGEST_STEP_S = 1.0


class Engine:
    """Runs sequences. Every public method may be called from any thread."""

    def __init__(
        self,
        config: WorkerConfig,
        loaded: LoadedModel,
        *,
        hooks: TransferHooks | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._clock = clock
        self._pace = read_pace(config.pace_file) if config.pace_file is not None else None
        salt = salt_of(loaded.facts.fingerprint)
        blocks = BlockManager(loaded.kv_cache.num_blocks, config.block_size, salt)
        limits = StepLimits.for_role(
            config.role, config.max_num_seqs, config.max_batched_tokens, config.tpot_target_s
        )
        self._core = EngineCore(loaded, Scheduler(blocks, limits, GUESS), clock, config.kv_ttl_s)
        self._core.set_hooks(hooks)
        processor_clock = time.thread_time if loaded.device.type == "cpu" else uncounted
        self._stepper = Stepper(self._core, self._pace, on_step, clock, processor_clock)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._num_open = 0  # as published with `_stats`
        # Submitted but not in the published load yet, and which of these the engine thread has taken.
        self._num_pending = 0
        self._num_pending_tokens = 0
        self._taken_tokens: list[int] = []
        self._is_draining = False
        self._is_closed = False  # the thread has ended and takes no commands any more
        self._is_checked = False
        self._failure: str | None = None
        self._stats = self._core.stats()

    @property
    def facts(self) -> ModelFacts:
        """What the loaded model is."""
        return self._loaded.facts

    @property
    def kv_cache(self) -> KVCache:
        """The paged KV cache; transfer reads and writes its blocks."""
        return self._loaded.kv_cache

    @property
    def heartbeat_s(self) -> float:
        """Monotonic time of the engine loop's last sign of life."""
        return self._stepper.heartbeat_s

    @property
    def longest_step_s(self) -> float:
        """Longest step to expect; liveness allows five times as much. At least a second."""
        limit_s = self._core.scheduler.limits.max_step_s or 0.0
        return max(limit_s, self._stepper.longest_step_s, _MIN_LONGEST_STEP_S)

    @property
    def failure(self) -> str | None:
        """Why the engine thread died, None while it is well."""
        return self._failure

    @property
    def is_paced(self) -> bool:
        """Whether steps are stretched to a declared profile."""
        return self._pace is not None

    def set_hooks(self, hooks: TransferHooks) -> None:
        """Set the transfer side, before `start`."""
        self._core.set_hooks(hooks)

    def start(self) -> None:
        """Start the engine thread. It measures some steps first; requests wait meanwhile."""
        self._thread.start()

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Queue a LOCAL or PREFILL request.

        Raises RequestError, EngineBusyError or EngineStoppedError; afterwards exactly one output
        with timings follows, the last one.
        """
        self._admit(request, on_output, None)

    def reserve(self, request: EngineRequest, on_output: OnOutput) -> Future[Reservation]:
        """Reserve blocks for a DECODE request; resolves when they are there. Raises as `submit`.

        Waits in the queue while KV is short: cancelling the future or `abort(request_id)` gives up.
        After it has resolved the caller must end with `start_remote`, `recompute` or
        `release_held`; `abort` alone leaves the blocks reserved until one of these is called, because
        a transfer may still be writing into them (at most for `kv_ttl_s`).
        """
        reservation: Future[Reservation] = Future()
        self._admit(request, on_output, reservation)
        return reservation

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None:
        """All reserved blocks are filled and verified: decode from the first token on."""
        self._post(lambda: self._core.start_remote(request_id, first_token, num_computed_tokens))

    def recompute(self, request_id: str, reason: str, first_token: int | None = None) -> None:
        """The pull failed: prefill locally instead. Still emits from the second token on."""
        self._post(lambda: self._core.recompute(request_id, reason, first_token))

    def release_held(self, request_id: str) -> None:
        """Free the held KV of a finished prefill, or the reservation of a leg 2 (which ends it)."""
        self._post(lambda: self._core.release_held(request_id))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request in any state; its blocks are free at the next step boundary.

        `reason` becomes the finish_reason (a server that found a stop string passes "stop").
        Unknown ids are ignored. Reserved blocks: see `reserve`.
        """
        self._post(lambda: self._core.abort(request_id, reason))

    def stats(self) -> EngineStats:
        """Load as of the last step boundary, plus what was submitted since."""
        with self._wake:
            stats = self._stats
            return replace(
                stats,
                num_waiting=stats.num_waiting + self._num_pending,
                num_waiting_prompt_tokens=stats.num_waiting_prompt_tokens + self._num_pending_tokens,
            )

    def profile(self) -> StepProfile:
        """The declared profile when paced, else the fitted one."""
        return self._stepper.profile

    def set_role(
        self, role: Role, max_batched_tokens: int | None = None, max_step_s: float | None = None
    ) -> None:
        """Change the scheduler's profile from the next step on. None: as the flags say."""
        limits = StepLimits.for_role(
            role,
            self._config.max_num_seqs,
            max_batched_tokens or self._config.max_batched_tokens,
            max_step_s or self._config.tpot_target_s,
        )

        def change() -> None:
            self._core.scheduler.limits = limits

        self._post(change)

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        self._is_draining = True

    def stop(self, timeout_s: float) -> bool:
        """Abort what is left and end the thread. False if it did not end in time."""
        self._is_draining = True
        self._stepper.is_stopping = True
        with self._wake:
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_idle(self) -> bool:
        """Nothing waits, runs or is held."""
        with self._wake:
            return self._num_pending == 0 and self._num_open == 0 and not self._commands

    # -- callers' threads ------------------------------------------------------------------------

    def _admit(
        self, request: EngineRequest, on_output: OnOutput, reservation: Future[Reservation] | None
    ) -> None:
        check_request(request, self.facts.max_model_length, self._loaded.vocabulary_size)
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure}")
        if self._is_draining:
            raise EngineStoppedError("this worker is draining and takes no new requests")
        arrival_s = self._clock()

        num_tokens = request.num_known_tokens

        def add() -> None:
            self._taken_tokens.append(num_tokens)
            self._core.add(request, on_output, arrival_s, reservation)

        with self._wake:
            if self._is_closed:
                raise EngineStoppedError("this worker has stopped")
            if self._num_pending + self._num_open >= MAX_OPEN_REQUESTS:
                raise EngineBusyError(f"{MAX_OPEN_REQUESTS} requests are open already; try again later")
            self._num_pending += 1
            self._num_pending_tokens += num_tokens
            self._commands.append(add)
            self._wake.notify()

    def _post(self, command: Callable[[], None]) -> None:
        """Bounded by the number of open requests: every command belongs to one."""
        with self._wake:
            if not self._is_closed:  # then everything has ended and been freed already
                self._commands.append(command)
                self._wake.notify()

    # -- the engine thread -----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._stepper.calibrate(self._loaded.vocabulary_size)
            while not self._stepper.is_stopping:
                self._turn()
        except Exception as error:  # whatever it was, callers must be told instead of waiting for ever
            logger.exception("the engine thread ends")
            self._failure = f"{type(error).__name__}: {error}"
        with self._wake:
            self._is_closed = True
        self._run_commands()
        self._core.abort_all(None if self._failure is None else f"the engine has failed: {self._failure}")
        self._publish()

    def _turn(self) -> None:
        """One round of the loop: commands, then a step or a wait."""
        self._stepper.beat()
        self._run_commands()
        self._core.free_expired()
        worked = self._core.scheduler.has_work() and self._stepper.run()
        self._publish()
        if worked:
            self._is_checked = False
            return
        if self._core.num_entries == 0 and not self._is_checked:
            self._core.check_integrity()  # a leak shows when the engine falls idle, not weeks later
            self._is_checked = True
        with self._wake:
            if not self._commands and not self._stepper.is_stopping:
                has_work = self._core.scheduler.has_work()
                self._wake.wait(_BLOCKED_WAIT_S if has_work else _IDLE_WAIT_S)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _publish(self) -> None:
        """Make the load of this moment visible; what was taken is part of it from now on."""
        stats, num_open = self._core.stats(), self._core.num_entries
        with self._wake:
            self._stats, self._num_open = stats, num_open
            self._num_pending -= len(self._taken_tokens)
            self._num_pending_tokens -= sum(self._taken_tokens)
        self._taken_tokens.clear()
