"""One request from admission to its last token: placement, legs, replay.

    place -> pair:  leg 1 (prefill worker) -> PrefillAccepted -> leg 2 opened at the decode worker
                    leg 1 -> first token -> client;  leg 2 -> the rest -> client
          -> local: one leg does both
    a leg is lost -> place again; with tokens already sent, a local leg continues after them

Knows legs, queues and the answer's shape; does not know HTTP on the client's side.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from phasesplit.api import names
from phasesplit.api.legs import PREFILL_ACCEPTED, InternalParams, KVTransferParams, PrefillAccepted
from phasesplit.api.routing import ServedMode
from phasesplit_router import sse
from phasesplit_router.answers import Answer, usage_of
from phasesplit_router.errors import ApiError, LegError, LegLostError, LegRejectedError, lost
from phasesplit_router.legs import Event, Leg
from phasesplit_router.policy import Demand
from phasesplit_router.predict import TextLength
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.queues import Placement, Queues
from phasesplit_router.records import Record
from phasesplit_router.request import ClientRequest
from phasesplit_router.retry import MAX_RETRIES, RetryBudget, backoff_s
from phasesplit_router.workers import Worker, WorkerBook

NEW_PATIENCE_S = 1.0  # a new request waits this long for any worker at all
RETRY_PATIENCE_S = 60.0  # one that has begun waits for a pod to come back
LONGEST_QUEUE_S = 600.0
TAIL_S = 1.0  # wait for the report after the last token

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
    observer: Observer
    open_leg: LegOpener
    cancel: Callable[[Worker, str], None]  # tell a worker, in the background, to drop a leg
    check: Callable[[Worker], None]  # see soon whether a worker still lives
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]  # in the background
    admin_token: str
    draw: random.Random


class Flow:
    """Serves one request."""

    def __init__(
        self, services: Services, request: ClientRequest, record: Record, answer: Answer, sink: Sink | None
    ) -> None:
        self._services = services
        self._request = request
        self._record = record
        self._answer = answer
        self._sink = sink
        self._attempt = 0
        self._avoid: set[str] = set()
        self._fingerprint: str | None = None
        self._completion_tokens = 0
        self.pods = ""

    async def run(self) -> None:
        """Serve to the end. Raises `ApiError` or `LegRejectedError` when it cannot be served."""
        while True:
            placement = await self._place()
            try:
                prefill = placement.prefill
                await (self._local(placement) if prefill is None else self._pair(prefill, placement))
            except LegRejectedError as error:
                if self._answer.num_chunks == 0:
                    raise
                failure: LegError = error
            except LegError as error:
                failure = error
            else:
                return
            finally:
                placement.release()
            if self._answer.finish_reason is not None or await self._finish_by_length():
                return
            await self._prepare_retry(failure)

    def demand(self) -> Demand:
        """What the next attempt needs."""
        request, sent = self._request, len(self._answer.token_ids)
        latency_class = request.latency_class
        return Demand(
            request_id=request.request_id,
            prompt_tokens=self._services.lengths.prompt_tokens(request.prompt_bytes) + sent,
            output_tokens=self._services.lengths.expected_output_tokens(request.max_tokens),
            ttft_s=latency_class.ttft_s,
            tpot_s=latency_class.tpot_s,
            priority=latency_class.priority,
            is_replay=sent > 0,
            fingerprint=self._fingerprint,
            avoid=frozenset(self._avoid),
        )

    async def _place(self) -> Placement:
        record = self._record
        placement, waits_s = await self._services.queues.place(
            self.demand(),
            deadline_s=record.arrival_s + self._request.latency_class.ttft_s,
            patience_s=RETRY_PATIENCE_S if self._attempt else NEW_PATIENCE_S,
            longest_s=LONGEST_QUEUE_S,
        )
        for phase, wait_s in waits_s.items():
            record.waits_s[phase] = record.waits_s.get(phase, 0.0) + wait_s
        if record.first_sent_s is None:
            record.mode, self.pods = placement.choice.mode, placement.pods
        reason = placement.choice.local_reason
        table = self._services.book.table
        if reason is not None and table is not None and table.mode is ServedMode.SPLIT:
            self._services.observer.local_prefill(str(reason))
        return placement

    async def _prepare_retry(self, failure: LegError) -> None:
        self._attempt += 1
        self._avoid.add(failure.pod)
        now_s = time.monotonic()
        if worker := self._services.book.workers.get(failure.pod):
            worker.leg_failed(now_s)
            self._services.check(worker)
        sent = self._answer.num_chunks
        if sent and not self._answer.token_ids:
            raise lost(f"The answer broke off and cannot be continued: {failure}.")
        if self._attempt > MAX_RETRIES:
            raise lost(f"{self._attempt} attempts failed, the last one because of {failure}; retry later.")
        if sent:
            self._record.num_migrations += 1
            self._services.observer.migrated()
        wait_s = self._services.retries.take(now_s) + backoff_s(self._attempt, self._services.draw)
        await asyncio.sleep(wait_s)

    async def _finish_by_length(self) -> bool:
        """All tokens asked for were sent and only the finish reason was lost: say it here."""
        limit = self._request.max_tokens
        if limit is None or len(self._answer.token_ids) < limit:
            return False
        choice = self._answer.take({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        if choice is not None and self._sink is not None:
            await self._sink.send(self._answer.chunk(choice))
        return True

    # Legs

    def _leg(self, worker: Worker, transfer: KVTransferParams | None) -> Leg:
        services, request = self._services, self._request
        leg_id = request.request_id if not self._attempt else f"{request.request_id}.r{self._attempt}"
        internal = InternalParams(
            slo_class=request.latency_class.name,
            priority=request.latency_class.priority,
            output_token_ids=self._answer.token_ids,
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

    async def _local(self, placement: Placement) -> None:
        leg = self._leg(placement.decode, None)
        ended_well = False
        try:
            await leg.open()
            await self._stream(leg, placement)
            ended_well = True
            self._record.decode = leg.report
            self._learn(leg)
        finally:
            self._close(leg, ended_well)

    async def _pair(self, prefill: Worker, placement: Placement) -> None:
        first = self._leg(prefill, KVTransferParams(do_remote_decode=True))
        second: Leg | None = None
        opening: asyncio.Task[None] | None = None
        ended_well = False
        try:
            await first.open()
            rest, accepted = await self._accepted(first)
            self._record.prompt_tokens = accepted.num_prompt_tokens
            self._record.cached_tokens = accepted.num_cached_tokens
            if self._request.max_tokens != 1:
                second = self._leg(placement.decode, _pull(accepted, prefill))
                opening = asyncio.create_task(second.open())
            await self._first_token(first, placement, rest)
            tail = self._services.spawn(self._finish_first(first))
            if self._answer.finish_reason is None and second is not None and opening is not None:
                await opening
                await self._stream(second, placement)
                self._note_transfer(prefill, second)
                self._record.decode = second.report
            elif self._answer.finish_reason is None:
                await self._finish_by_length()
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

    async def _first_token(self, leg: Leg, placement: Placement, events: list[Event]) -> None:
        while True:
            await self._emit(events, leg, placement)
            if self._answer.num_chunks:
                return
            events = await leg.read()
            if not events:
                raise LegLostError(leg.worker.pod, "leg 1 ended without a token")

    async def _finish_first(self, leg: Leg) -> None:
        """Read what follows leg 1's token: its report, for the trace."""
        try:
            async with asyncio.timeout(TAIL_S):
                while await leg.read():
                    pass
            self._record.prefill = leg.report
        except (LegError, TimeoutError):
            pass  # the token is out; without its report the trace has one leg less
        finally:
            leg.close()

    async def _stream(self, leg: Leg, placement: Placement) -> None:
        while self._answer.finish_reason is None:
            events = await leg.read()
            if not events:
                raise LegLostError(leg.worker.pod, "it ended without a finish reason")
            await self._emit(events, leg, placement)
        try:
            async with asyncio.timeout(TAIL_S):
                while not leg.is_done and await leg.read():
                    pass
                await leg.read()
        except (LegError, TimeoutError):
            pass  # the answer is whole; only the report is missing

    async def _emit(self, events: list[Event], leg: Leg, placement: Placement) -> None:
        answer, record = self._answer, self._record
        before = answer.num_tokens
        choices = [choice for event in events if (choice := answer.take(event)) is not None]
        if not choices:
            return
        leg.had_token = True
        self._fingerprint = self._fingerprint or leg.worker.fingerprint
        if self._sink is not None:
            await self._sink.send(b"".join([answer.chunk(choice) for choice in choices]))
        now_s = time.monotonic()
        placement.first_token()
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
        record, report, usage = self._record, leg.report, leg.usage or {}
        if report is not None:
            record.prompt_tokens = record.prompt_tokens or report.num_prompt_tokens
            record.cached_tokens = record.cached_tokens or report.num_cached_tokens
        record.prompt_tokens = record.prompt_tokens or int(usage.get("prompt_tokens") or 0)
        # The worker counts tokens without text too, and those of earlier legs.
        self._completion_tokens = int(usage.get("completion_tokens") or 0)
        self._services.lengths.learn(self._request.prompt_bytes, record.prompt_tokens, record.num_tokens)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` over all legs."""
        record = self._record
        completion_tokens = self._completion_tokens or record.num_tokens
        return usage_of(
            record.prompt_tokens, completion_tokens, min(record.cached_tokens, record.prompt_tokens)
        )

    def ending(self) -> bytes:
        """Last bytes of a stream that ended well."""
        answer = self._answer
        end = answer.usage_chunk(self.usage()) if answer.include_usage else b""
        return end + sse.DONE_EVENT


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


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream, after which there is no `[DONE]`."""
    return sse.encode_event(json.dumps(error.body()).encode())
