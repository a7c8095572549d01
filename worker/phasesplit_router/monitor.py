"""Keeps in touch with workers: polls their state, tells them their role, drops legs of dead ones.

One task per worker. Knows the admin endpoints; decides nothing about requests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from phasesplit.api import names
from phasesplit.api.reports import CancelRequest, RoleAssignment, WorkerReport
from phasesplit_router.legs import Patience
from phasesplit_router.snapshot import Snapshot
from phasesplit_router.workers import Worker, WorkerBook

logger = logging.getLogger(__name__)

BUSY_INTERVAL_S = 2.0
IDLE_INTERVAL_S = 10.0
FAILED_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 1.0
LATER_TIMEOUT_S = 3.0
WATCHDOG_S = 1.0
WAKE_S = 0.25
BUSY_FOR_S = 30.0  # since the last request
SILENT_FACTOR = 4  # a worker whose polls succeed may be silent this much longer


class Monitor:
    """Follows the workers of the newest snapshot."""

    def __init__(
        self,
        book: WorkerBook,
        session: aiohttp.ClientSession,
        *,
        admin_token: str,
        patience: Patience,
        wake: Callable[[], None],
        last_arrival_s: Callable[[], float],
        in_flight: Callable[[], int],
    ) -> None:
        self._book = book
        self._session = session
        self._headers = {"Authorization": f"Bearer {admin_token}"}
        self._patience = patience
        self._wake = wake
        self._last_arrival_s = last_arrival_s
        self._in_flight = in_flight
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._wakers: dict[Worker, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()

    def apply(self, snapshot: Snapshot) -> None:
        """Follow new workers, let go of those that are gone, tell all of a new table."""
        added, gone = self._book.apply(snapshot, time.monotonic())
        for worker in added:
            self._wakers[worker] = asyncio.Event()
            self._tasks[worker] = asyncio.create_task(self._follow(worker))
        for worker in gone:
            self._tasks.pop(worker).cancel()
            self._wakers.pop(worker)
            self.spawn(self._part_with(worker))
        for waker in self._wakers.values():
            waker.set()
        self._wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run something in the background; the caller bounds its time."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def check(self, worker: Worker) -> None:
        """Poll a worker now: a leg has failed there."""
        if waker := self._wakers.get(worker):
            waker.set()

    def cancel_leg(self, worker: Worker, request_id: str) -> None:
        """Tell a worker to drop a leg and its KV."""
        self.spawn(self._cancel_leg(worker, request_id))

    async def _cancel_leg(self, worker: Worker, request_id: str) -> None:
        body = CancelRequest(request_id=request_id).model_dump_json()
        for _ in range(2):
            try:
                await self._call(worker, "POST", names.PATH_ADMIN_CANCEL, body)
            except (aiohttp.ClientError, OSError):
                continue  # once more; then the worker's own time limits free the KV
            return

    async def run_watchdog(self) -> None:
        """Break off legs that are silent for too long, for ever."""
        checked_s = time.monotonic()
        while True:
            await asyncio.sleep(WAKE_S)
            self._wake()  # back-offs and slow starts end with time alone
            now_s = time.monotonic()
            if now_s - checked_s >= WATCHDOG_S:
                checked_s = now_s
                for worker in list(self._tasks):
                    self._check_legs(worker, now_s)

    def _check_legs(self, worker: Worker, now_s: float) -> None:
        lives = not worker.is_down and now_s - worker.report_at_s < 2 * IDLE_INTERVAL_S
        factor = SILENT_FACTOR if lives else 1
        limits = Patience(
            first_token_s=self._patience.first_token_s * factor,
            between_tokens_s=self._patience.between_tokens_s * factor,
        )
        for leg in list(worker.legs):
            # Workers send headers with their first event: before that only the prefill's time counts.
            waits_for_prefill = not leg.had_token and not worker.is_down
            limit_s = limits.first_token_s if waits_for_prefill else limits.between_tokens_s
            if now_s - leg.last_byte_s > limit_s:
                leg.abort("it has stalled")

    async def _part_with(self, worker: Worker) -> None:
        """A pod left the endpoints. Its legs run on as long as it still answers."""
        while worker.legs:
            try:
                await self._poll(worker)
            except (aiohttp.ClientError, OSError, ValueError):
                for leg in list(worker.legs):
                    leg.abort("its pod is gone")
                return
            await asyncio.sleep(BUSY_INTERVAL_S)

    async def _follow(self, worker: Worker) -> None:
        waker = self._wakers[worker]
        while True:
            waker.clear()
            before = (worker.is_down, worker.report.state if worker.report else None)
            await self._visit(worker)
            if before != (worker.is_down, worker.report.state if worker.report else None):
                self._wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s(worker)):
                    await waker.wait()

    def _interval_s(self, worker: Worker) -> float:
        if worker.error or worker.report is None:
            return FAILED_INTERVAL_S
        busy = self._in_flight() or time.monotonic() - self._last_arrival_s() < BUSY_FOR_S
        return BUSY_INTERVAL_S if busy else IDLE_INTERVAL_S

    async def _visit(self, worker: Worker) -> None:
        try:
            await self._poll(worker)
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            self._unreachable(worker, error, refused=True)
            for leg in list(worker.legs):
                leg.abort("its process is gone")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._unreachable(worker, error, refused=False)

    def _unreachable(self, worker: Worker, error: Exception, *, refused: bool) -> None:
        message = str(error) or "no answer in time"
        if not worker.error:
            logger.warning("worker %s cannot be polled: %s", worker.pod, message)
        worker.poll_failed(message, time.monotonic(), refused=refused)

    async def _poll(self, worker: Worker) -> None:
        """Read the worker's state, and repair its role if it is not the table's."""
        report = WorkerReport.model_validate_json(await self._call(worker, "GET", names.PATH_ADMIN_STATE))
        table = self._book.table
        role = self._book.role_of(worker)
        if table is not None and (report.role_version < table.version):
            assignment = RoleAssignment(
                role=role,
                version=table.version,
                max_batched_tokens=table.colocated_max_batched_tokens,
                max_step_s=table.max_step_s(role),
            )
            body = assignment.model_dump_json()
            report = WorkerReport.model_validate_json(
                await self._call(worker, "POST", names.PATH_ADMIN_ROLE, body)
            )
        if worker.error:
            logger.info("worker %s can be polled again", worker.pod)
        worker.take_report(report, time.monotonic())

    async def _call(self, worker: Worker, method: str, path: str, body: str | None = None) -> bytes:
        """One admin call. Raises `aiohttp.ClientError` or `OSError` (time-outs are one)."""
        # The first poll tells quickly that something is wrong, later ones give a busy machine time.
        async with asyncio.timeout(LATER_TIMEOUT_S if worker.failed_polls else POLL_TIMEOUT_S):
            async with self._session.request(
                method,
                worker.address.url + path,
                data=body,
                headers=self._headers | ({"Content-Type": "application/json"} if body else {}),
                raise_for_status=True,
            ) as response:
                return await response.read()

    async def close(self) -> None:
        """Stop following; wait a moment for what runs in the background."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        pending = [*tasks, *self._background]
        if pending:
            await asyncio.wait(pending, timeout=2)
