"""One worker process: its life (loading, ready, draining, failed), its parts, its role.

Owns the loading thread, the watchdog and the drain. Knows no HTTP beyond the errors it answers with.
"""

import asyncio
import gc
import logging
import math
import threading
import time
from pathlib import Path

from phasesplit.api.reports import RoleAssignment, WorkerReport, WorkerState
from phasesplit_http.errors import unavailable
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.errors import ConfigError, ModelLoadError, ModelUnreachableError
from phasesplit_worker.requests import EngineStats
from phasesplit_worker.server.auth import AdminAuth
from phasesplit_worker.server.bridge import OpenRequests
from phasesplit_worker.server.metrics import LoadReading, WorkerMetrics
from phasesplit_worker.server.ports import LoadParts, Parts
from phasesplit_worker.server.roles import RoleState

logger = logging.getLogger(__name__)

LIVENESS_STEPS = 5  # a heartbeat older than this many longest steps means that the engine hangs
READINESS_SHARE = 0.5  # of the liveness limit
MIN_LIVENESS_S = 10.0  # a busy machine delays any thread by seconds without anything being wrong
WATCH_INTERVAL_S = 0.5
PAUSE_S = 5.0  # a watchdog that comes this late has stood still itself, with the whole process
STOP_TIMEOUT_S = 10.0
RETRY_LOADING_S, RETRY_DRAINING_S, RETRY_FAILED_S = 10, 5, 30
_TERMINATION_LOG = Path("/dev/termination-log")


class Worker:
    """The process's state. Created and used on the event loop."""

    def __init__(self, config: WorkerConfig, auth: AdminAuth, engine_id: str, load: LoadParts) -> None:
        self.config = config
        self.auth = auth
        self.engine_id = engine_id
        self.open_requests = OpenRequests()
        self.created = int(time.time())
        self._load = load
        self._parts: Parts | None = None
        self._state = WorkerState.LOADING
        self._message = ""
        self._broken = asyncio.Event()  # failed in a way that a new process may not
        self._role = RoleState(
            config.role, max_batched_tokens=config.max_batched_tokens, max_step_s=config.tpot_target_s
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._looked_s = self._resumed_s = float("-inf")  # at the engine; after the process stood still
        self.metrics = WorkerMetrics(
            model=config.object_name,
            namespace=config.namespace,
            pool=config.pool,
            role=lambda: self._role.role,
        )

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life."""
        return self._state

    @property
    def message(self) -> str:
        """Why the worker does not take requests; empty when it does."""
        if self._state is WorkerState.LOADING:
            return "The model is still loading."
        if self._state is WorkerState.DRAINING:
            return "The worker is draining and takes no new requests."
        return self._message

    @property
    def role(self) -> RoleState:
        """The role and the routing table version that says so."""
        return self._role

    @property
    def parts(self) -> Parts | None:
        """Engine, tokenizer and transfer, once the model is loaded."""
        return self._parts

    def ready_parts(self) -> Parts:
        """The parts, for a new request; raises 503 while the worker takes none."""
        if self._state is WorkerState.READY and self._parts is not None:
            return self._parts
        retry_s = {WorkerState.LOADING: RETRY_LOADING_S, WorkerState.DRAINING: RETRY_DRAINING_S}
        raise unavailable(self.message, retry_s.get(self._state, RETRY_FAILED_S))

    def live_parts(self) -> Parts:
        """The parts while anything runs, also when draining; raises 503 before the model is loaded."""
        return self._parts if self._parts is not None else self.ready_parts()

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading in the background; the HTTP server answers meanwhile."""
        self._tasks.append(asyncio.create_task(self._load_and_serve(), name="load"))

    async def _load_and_serve(self) -> None:
        try:
            parts = await self._load_in_thread()
            await parts.transfer.start()
            parts.engine.start()
            self._apply_role(parts)
        except (ModelUnreachableError, OSError) as error:
            self._fail(str(error), is_lasting=False)
            return
        except (ModelLoadError, ConfigError) as error:
            self._fail(str(error), is_lasting=True)
            return
        except Exception as error:  # whatever a library did: said, not hidden
            logger.exception("loading failed")
            message = f"The model could not be loaded: {type(error).__name__}: {error}."
            self._fail(message, is_lasting=False)
            return
        # What a loaded model leaves behind lives as long as the process: keep it out of collections,
        # each of which would otherwise stop every thread for a good part of a second.
        gc.collect()
        gc.freeze()
        self._parts = parts
        self.metrics.read_load_from(self._read_load)
        if self._state is WorkerState.DRAINING:
            parts.engine.drain()
        else:
            self._state = WorkerState.READY
        self._tasks.append(asyncio.create_task(self._watch(parts), name="watch"))
        logger.info("ready: serving %s as %s", self.config.model_name, self._role.role)

    async def _load_in_thread(self) -> Parts:
        """Load on a daemon thread, so that a SIGTERM in the middle of a download ends the process."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Parts] = loop.create_future()

        def settle(parts: Parts | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif parts is not None:
                future.set_result(parts)

        def run() -> None:
            outcome: tuple[Parts | None, BaseException | None]
            try:
                outcome = (self._load(self.metrics), None)
            except BaseException as error:  # handed over to the event loop, which decides
                outcome = (None, error)
            try:
                loop.call_soon_threadsafe(settle, *outcome)
            except RuntimeError:
                return  # the loop is closed: the process ends

        threading.Thread(target=run, name="load", daemon=True).start()
        return await future

    async def wait_broken(self) -> None:
        """Return when the worker has failed and a new process may do better."""
        await self._broken.wait()

    def _fail(self, message: str, *, is_lasting: bool) -> None:
        """Say why. What would fail again (`is_lasting`) stays up: a crash loop would hide the sentence."""
        self._state, self._message = WorkerState.FAILED, message
        if not is_lasting:
            self._broken.set()
        logger.error("%s", message)
        if _TERMINATION_LOG.exists():
            try:
                _TERMINATION_LOG.write_text(message, encoding="utf-8")
            except OSError as error:
                logger.warning("cannot write %s: %s", _TERMINATION_LOG, error)

    async def _watch(self, parts: Parts) -> None:
        """Notice a dead or hanging engine, so that no handler waits for it for ever."""
        while self._state is not WorkerState.FAILED:
            await asyncio.sleep(WATCH_INTERVAL_S)
            problem = self.engine_problem(parts)
            if problem is not None:
                self._fail(problem, is_lasting=False)
                self.open_requests.fail_all(problem)

    def readiness_problem(self) -> str | None:
        """Why no request should be sent here now; sooner than liveness when the engine hangs."""
        if self._state is WorkerState.READY and self._parts is not None:
            return self.engine_problem(self._parts, patience=READINESS_SHARE)
        return self.message

    def engine_problem(self, parts: Parts, patience: float = 1.0) -> str | None:
        """What is wrong with the engine thread, if anything."""
        if parts.engine.failure is not None:
            return f"The engine stopped: {parts.engine.failure}"
        age_s = time.monotonic() - max(parts.engine.heartbeat_s, self._last_resumed_s())
        limit_s = patience * max(MIN_LIVENESS_S, LIVENESS_STEPS * parts.engine.longest_step_s)
        if age_s > limit_s:
            return f"The engine gave no sign of life for {age_s:.0f} s; at most {limit_s:.0f} s are allowed."
        return None

    def _last_resumed_s(self) -> float:
        """When the process last went on after standing still: a frozen node is no hanging engine."""
        now_s = time.monotonic()
        if PAUSE_S < now_s - self._looked_s < math.inf:  # infinite: the first look
            self._resumed_s = now_s
        self._looked_s = now_s
        return self._resumed_s

    def liveness_problem(self) -> str | None:
        """Why the process should be restarted. A model that does not load is no such reason."""
        if self._parts is None:
            return None
        return self._message if self._state is WorkerState.FAILED else self.engine_problem(self._parts)

    def drain(self) -> None:
        """Take nothing new from now on; what runs goes on."""
        if self._state in (WorkerState.READY, WorkerState.LOADING):
            self._state = WorkerState.DRAINING
        if self._parts is not None:
            self._parts.engine.drain()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing runs, nothing is held for a peer and every answer is sent."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_idle():  # noqa: ASYNC110 the engine thread sets no asyncio event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    def _is_idle(self) -> bool:
        if len(self.open_requests) > 0:
            return False
        return self._parts is None or self._state is WorkerState.FAILED or self._parts.engine.is_idle()

    async def stop(self) -> None:
        """End loading, watchdog, engine and transfer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._parts is not None:
            stopped = await asyncio.to_thread(self._parts.engine.stop, STOP_TIMEOUT_S)
            if not stopped:
                logger.error("the engine thread did not end within %.0f s", STOP_TIMEOUT_S)
            await self._parts.transfer.stop()

    # -- role ----------------------------------------------------------------------------------

    def adopt_role(self, assignment: RoleAssignment, *, has_limits: bool) -> None:
        """Take a newer role at the next step; an older one changes nothing."""
        adopted = self._role.adopt(assignment, has_limits=has_limits)
        if adopted == self._role:
            return
        if adopted.role is not self._role.role:
            logger.info("role %s from version %d on", adopted.role, adopted.version)
        self._role = adopted
        if self._parts is not None:
            self._apply_role(self._parts)

    def _apply_role(self, parts: Parts) -> None:
        role = self._role
        longest_s = role.max_step_s or self.config.tpot_target_s
        parts.engine.set_role(role.role, role.max_batched_tokens, longest_s)

    # -- reports -------------------------------------------------------------------------------

    def _read_load(self) -> LoadReading:
        parts = self._parts
        if parts is None:
            return LoadReading()
        return LoadReading(parts.engine.stats(), parts.engine.facts.weights_bytes)

    def report(self) -> WorkerReport:
        """`GET /admin/state`."""
        config, parts = self.config, self._parts
        stats = EngineStats() if parts is None else parts.engine.stats()
        return WorkerReport(
            pod=config.pod_name,
            node=config.node_name,
            pool=config.pool,
            role=self._role.role,
            role_version=self._role.version,
            state=self._state,
            message=self.message,
            engine_id=self.engine_id,
            paced=config.pace_file is not None,
            device=config.device,
            model=None if parts is None else parts.engine.facts,
            kv_total_blocks=stats.kv_total_blocks,
            kv_used_blocks=stats.kv_used_blocks,
            max_num_seqs=config.max_num_seqs,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_prompt_tokens=stats.num_waiting_prompt_tokens,
            profile=None if parts is None else parts.engine.profile(),
            links=[] if parts is None else parts.transfer.link_samples(),
            transfers_total=0 if parts is None else parts.transfer.transfers_total,
            transfer_failures_total={} if parts is None else parts.transfer.failures_total,
            transfer_failures_by_peer={} if parts is None else parts.transfer.failures_by_peer,
        )
