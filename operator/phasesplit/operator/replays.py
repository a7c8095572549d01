"""Runs replays beside the operator's loop: one process at a time over all objects, with a deadline.

Knows processes and pipes; what a replay is and when one is due is the planner's.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic import ValidationError

from phasesplit.cluster.snapshot import Key
from phasesplit.operator import instruments
from phasesplit.operator.memory import ObjectMemory
from phasesplit.planner import replay_schedule
from phasesplit.planner.mode_types import ModeInput
from phasesplit.planner.replay_job import ReplayJob, ReplayLine
from phasesplit.planner.replay_schedule import ReplayMark, ReplayRecord
from phasesplit.planner.traffic import MIN_REQUESTS

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "phasesplit.planner.replay_program")
DEADLINE_S = 30.0
_END_S = 5.0
_LOOK_EVERY_S = 10.0
_MAX_LINES = 64
_MAX_LINE_BYTES = 64 << 10


class ReplayRunner:
    """Starts at most one replay at a time; the outcome goes into the object's memory and wakes it."""

    def __init__(
        self,
        wake: Callable[[Key], None],
        *,
        command: Sequence[str] = COMMAND,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._wake = wake
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Does a replay run now?"""
        return self._task is not None and not self._task.done()

    def consider(self, key: Key, memory: ObjectMemory, given: ModeInput) -> None:
        """Start a replay of this object if one is due and none runs. Costs next to nothing otherwise."""
        if self.is_busy or not memory.flowing or len(memory.traffic) < MIN_REQUESTS:
            return
        if given.now_s - memory.replay_looked_at_s < _LOOK_EVERY_S:
            return
        memory.replay_looked_at_s = given.now_s
        last = memory.replay_asked
        if not replay_schedule.may_ask(given, last):
            return
        job = replay_schedule.build_replay(given, memory.traffic.requests())
        if job is None:
            return
        mark = replay_schedule.mark_of(given, job)
        if replay_schedule.is_due(given.wanted, mark, last):
            memory.replay_asked = mark
            try:
                message = ReplayJob(given=job, minimum_gain_percent=given.minimum_gain_percent)
            except ValidationError as error:  # a worker or router has reported what cannot be
                reason = error.errors(include_url=False, include_input=False)[0]["msg"]
                memory.replay_error = f"nothing was replayed: {reason}"
                logger.warning("%s/%s: %s", *key, memory.replay_error)
                instruments.REPLAYS.labels("error").inc()
                return
            self._task = asyncio.create_task(self._run(key, memory, mark, message), name="replay")

    async def close(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, key: Key, memory: ObjectMemory, mark: ReplayMark, job: ReplayJob) -> None:
        with instruments.REPLAY_SECONDS.time():
            found = await self._answer(job, ReplayRecord(mark))
        memory.replay_error = found.error
        if found.error:
            # The answer before stays in use for as long as it holds.
            logger.warning("%s/%s: %s", *key, found.error)
        else:
            memory.replay = found
        instruments.REPLAYS.labels("error" if found.error else "ok").inc()
        self._wake(key)

    async def _answer(self, job: ReplayJob, record: ReplayRecord) -> ReplayRecord:
        """The answer, or why there is none; what came before the deadline counts."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=_MAX_LINE_BYTES
            )
        except OSError as error:
            return replace(record, error=f"a replay could not be started: {error.strerror}")
        lines: list[ReplayLine] = []
        problem = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._talk(process, job, lines)
        except TimeoutError:
            problem = f"a replay of {len(job.given.trace)} requests took over {self._deadline_s:.0f} s"
        except (OSError, ValueError) as error:  # it died, or wrote what is no answer
            count = f"{error.error_count()} fields" if isinstance(error, ValidationError) else str(error)
            problem = f"the answer of a replay was not understood: {count}"
        finally:
            await _end(process)
        outcome = next((line.outcome for line in lines if line.outcome is not None), None)
        if outcome is None:
            return replace(record, error=problem or f"a replay ended with status {process.returncode}")
        flips = tuple(line.flip for line in lines if line.flip is not None)
        return replace(record, outcome=outcome, flips=flips)

    async def _talk(self, process: Process, job: ReplayJob, lines: list[ReplayLine]) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("no pipes")
        process.stdin.write(job.model_dump_json().encode())
        await process.stdin.drain()
        process.stdin.close()
        while len(lines) < _MAX_LINES and (text := await process.stdout.readline()):
            lines.append(ReplayLine.model_validate_json(text))
        await process.wait()


async def _end(process: Process) -> None:
    """Nothing is left behind, whatever happened."""
    if process.returncode is not None:
        return
    try:
        process.kill()
    except ProcessLookupError:
        return
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        logger.warning("a replay process (%d) does not end", process.pid)
