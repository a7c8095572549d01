"""One attempt at a request on the workers it was placed on: a pair of legs, or one local leg.

    pair:   leg 1 (prefill worker) -> PrefillAccepted -> leg 2 opened at the decode worker
            leg 1 -> first token -> client;  leg 2 -> the rest -> client
    local:  one leg does both

Ends well, or raises a `LegError` that names the worker. Whatever happens, legs that did not end
well are dropped at once and cancelled at their workers.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from phasesplit.api import names
from phasesplit.api.legs import PREFILL_ACCEPTED, InternalParams, KVTransferParams, PrefillAccepted
from phasesplit_router.answers import Answer
from phasesplit_router.errors import LegError, LegLostError, LegRejectedError
from phasesplit_router.halves import Halves
from phasesplit_router.legs import Event, Leg
from phasesplit_router.predict import TextLength
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.queues import Placement, Queues
from phasesplit_router.records import Record
from phasesplit_router.request import ClientRequest
from phasesplit_router.retry import RetryBudget
from phasesplit_router.workers import Worker, WorkerBook

TAIL_S = 1.0  # the client waits this long for the report after the last token
FIRST_TAIL_S = 10.0  # leg 1's end is read in the background

LegOpener = Callable[[Worker, str, bytes, dict[str, str]], Leg]


class Sink(Protocol):
    """Where tokens go."""

    async def send(self, data: bytes) -> None:
        """Send to the client at once; headers go out with the first bytes."""
        ...


class Observer(Protocol):
    """Is told what happens while it happens."""

    def local_prefill(self, reason: str) -> None: ...

    def migrated(self) -> None: ...

    def tokens_sent(self, record: Record, gap_s: float, count: int) -> None: ...


@dataclass(frozen=True)
class Services:
    """What flows share."""

    book: WorkerBook
    queues: Queues
    quarantine: Quarantine
    lengths: TextLength
    retries: RetryBudget
    halves: Halves
    observer: Observer
    open_leg: LegOpener
    cancel: Callable[[Worker, str], None]  # tell a worker, in the background, to drop a leg
    check: Callable[[Worker], None]  # see soon whether a worker still lives
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]  # in the background
    admin_token: str
    draw: random.Random


@dataclass(slots=True)
class Progress:
    """What of a request outlives its attempts."""

    request: ClientRequest
    record: Record
    answer: Answer
    sink: Sink | None  # None: a whole answer is wanted
    num_attempts: int = 0
    fingerprint: str | None = None  # of the worker that made the tokens so far
    completion_tokens: int = 0  # as the last worker counts them; 0: it did not say

    async def send(self, choices: list[dict[str, Any]]) -> None:
        """Send chunks to a client that streams."""
        if self.sink is not None and choices:
            await self.sink.send(b"".join([self.answer.chunk(choice) for choice in choices]))

    async def finish_by_length(self) -> bool:
        """If all tokens asked for were sent and only the finish reason was lost: say it here."""
        limit = self.request.max_tokens
        if limit is None or len(self.answer.token_ids) < limit:
            return False
        choice = self.answer.take({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        if choice is not None:
            await self.send([choice])
        return True


class Attempt:
    """One attempt. `run` once."""

    def __init__(self, services: Services, progress: Progress, placement: Placement) -> None:
        self._services = services
        self._progress = progress
        self._placement = placement

    async def run(self) -> None:
        """Serve the request, or what is left of it, to its end."""
        prefill = self._placement.prefill
        await (self._local() if prefill is None else self._pair(prefill))

    def _leg(self, worker: Worker, transfer: KVTransferParams | None) -> Leg:
        services, request = self._services, self._progress.request
        leg_id = (
            request.leg_id
            if not self._progress.num_attempts
            else f"{request.leg_id}.r{self._progress.num_attempts}"
        )
        internal = InternalParams(
            slo_class=request.latency_class.name,
            priority=request.latency_class.priority,
            output_token_ids=self._progress.answer.token_ids,
            seed=request.seed,
        )
        fields = b',"phasesplit":' + internal.model_dump_json().encode()
        if transfer is not None:
            fields += b',"kv_transfer_params":' + transfer.model_dump_json(exclude_none=True).encode()
        table = services.book.table
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {services.admin_token}",
            names.HEADER_REQUEST_ID: leg_id,
            names.HEADER_SLO_CLASS: request.latency_class.name,
            names.HEADER_ROLE: str(services.book.role_of(worker)),
            names.HEADER_ROLE_VERSION: str(table.version if table else 0),
        }
        return services.open_leg(worker, request.path, request.leg_body + fields + b"}", headers)

    async def _local(self) -> None:
        leg = self._leg(self._placement.decode, None)
        ended_well = False
        try:
            await leg.open()
            await self._stream(leg)
            ended_well = True
            self._progress.record.decode = leg.report
            self._learn(leg)
        finally:
            self._close(leg, ended_well)

    async def _pair(self, prefill: Worker) -> None:
        first = self._leg(prefill, KVTransferParams(do_remote_decode=True))
        second: Leg | None = None
        opening: asyncio.Task[None] | None = None
        ended_well = False
        try:
            await first.open()
            rest, accepted = await self._accepted(first)
            self._progress.record.prompt_tokens = accepted.num_prompt_tokens
            self._progress.record.cached_tokens = accepted.num_cached_tokens
            if self._progress.request.max_tokens != 1:
                second = self._leg(self._placement.decode, _pull(accepted, prefill))
                opening = asyncio.create_task(second.open())
            await self._first_token(first, rest)
            tail = self._services.spawn(self._finish_first(first))
            if self._progress.answer.finish_reason is None and second is not None and opening is not None:
                await opening
                await self._stream(second)
                self._note_transfer(prefill, second)
                self._progress.record.decode = second.report
            elif self._progress.answer.finish_reason is None:
                await self._progress.finish_by_length()
            ended_well = True
            await asyncio.wait([tail], timeout=TAIL_S)
            self._learn(second or first)
        except LegRejectedError as error:
            # Leg 1 took the same body, so a refusal by leg 2 is the worker's problem.
            if second is not None and error.pod == second.worker.pod:
                raise LegLostError(error.pod, f"it refused leg 2 with status {error.status}") from error
            raise
        finally:
            if opening is not None and not opening.done():
                opening.cancel()
            elif opening is not None and not opening.cancelled():
                opening.exception()  # retrieved, so that a refusal nobody waited for is not logged as lost
            if second is not None:
                self._close(second, ended_well and second.is_done)
            self._close(first, ended_well and first.is_done)

    async def _accepted(self, leg: Leg) -> tuple[list[Event], PrefillAccepted]:
        events = await leg.read()
        if not events or events[0].get("object") != PREFILL_ACCEPTED:
            raise LegLostError(leg.worker.pod, "leg 1 did not begin with its acceptance")
        try:
            return events[1:], PrefillAccepted.model_validate(events[0])
        except ValueError as error:
            raise LegLostError(leg.worker.pod, "its acceptance of leg 1 cannot be read") from error

    async def _first_token(self, leg: Leg, events: list[Event]) -> None:
        while True:
            await self._emit(events, leg)
            if self._progress.answer.num_chunks:
                return
            events = await leg.read()
            if not events:
                raise LegLostError(leg.worker.pod, "leg 1 ended without a token")

    async def _finish_first(self, leg: Leg) -> None:
        """Read what follows leg 1's token: its report, for the trace."""
        try:
            async with asyncio.timeout(FIRST_TAIL_S):
                while await leg.read():
                    pass
            self._progress.record.prefill = leg.report
        except (LegError, TimeoutError):
            pass  # the token is out; without its report the trace has one leg less
        finally:
            leg.close()

    async def _stream(self, leg: Leg) -> None:
        while self._progress.answer.finish_reason is None:
            events = await leg.read()
            if not events:
                raise LegLostError(leg.worker.pod, "it ended without a finish reason")
            await self._emit(events, leg)
        try:
            async with asyncio.timeout(TAIL_S):
                while not leg.is_done and await leg.read():
                    pass
                await leg.read()
        except (LegError, TimeoutError):
            pass  # the answer is whole; only the report is missing

    async def _emit(self, events: list[Event], leg: Leg) -> None:
        answer, record = self._progress.answer, self._progress.record
        before = answer.num_tokens
        choices = [choice for event in events if (choice := answer.take(event)) is not None]
        if not choices:
            return
        leg.had_token = True
        self._progress.fingerprint = self._progress.fingerprint or leg.worker.fingerprint
        await self._progress.send(choices)
        now_s = time.monotonic()
        self._placement.first_token()
        record.num_tokens = answer.num_tokens
        new = answer.num_tokens - before
        if record.last_sent_s is None:
            record.first_sent_s = now_s
        elif new:
            if record.second_sent_s is None:
                record.second_sent_s = now_s
            self._services.observer.tokens_sent(record, (now_s - record.last_sent_s) / new, new)
        record.last_sent_s = now_s

    def _close(self, leg: Leg, ended_well: bool) -> None:
        """Let a leg go; one that did not end well is cancelled at the worker, with its KV."""
        leg.close()
        if ended_well:
            leg.worker.leg_succeeded()
        else:
            self._services.cancel(leg.worker, leg.request_id)

    def _note_transfer(self, prefill: Worker, leg: Leg) -> None:
        if leg.report is None:
            return
        if leg.report.recomputed is None:
            self._services.quarantine.succeeded(prefill.pod, leg.worker.pod)
        else:
            self._services.quarantine.failed(prefill.pod, leg.worker.pod, time.monotonic())

    def _learn(self, leg: Leg) -> None:
        """Take the counts of the leg that ended the request."""
        record, report, usage = self._progress.record, leg.report, leg.usage or {}
        if report is not None:
            record.prompt_tokens = record.prompt_tokens or report.num_prompt_tokens
            record.cached_tokens = record.cached_tokens or report.num_cached_tokens
        record.prompt_tokens = record.prompt_tokens or int(usage.get("prompt_tokens") or 0)
        # The worker counts tokens without text too, and those of earlier legs.
        self._progress.completion_tokens = int(usage.get("completion_tokens") or 0)
        self._services.lengths.learn(
            self._progress.request.prompt_bytes, record.prompt_tokens, record.num_tokens
        )


def _pull(accepted: PrefillAccepted, prefill: Worker) -> KVTransferParams:
    """Leg 2's parameters: leg 1's answer, with the address Kubernetes knows where it gave none."""
    params = accepted.kv_transfer_params
    missing: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
    if params.remote_host is None:
        missing["remote_host"] = prefill.address.host
    if params.remote_port is None:
        missing["remote_port"] = prefill.address.transfer_port
    if params.remote_pod is None:
        missing["remote_pod"] = prefill.pod
    return params.model_copy(update=missing)
