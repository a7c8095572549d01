"""The legs of a request on this worker: prefill (leg 1), decode (leg 2), local.

Knows the protocol of `phasesplit.api.legs`, engine and transfer by their ports. Whatever ends a leg
early (disconnect, cancel, an error) ends its sequence and its pull too, and frees the blocks.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from aiohttp import web

from phasesplit.api.legs import KVTransferParams, LegReport, PrefillAccepted
from phasesplit.api.names import HEADER_REQUEST_ID
from phasesplit_http.errors import ApiError, bad_request, overloaded, unavailable
from phasesplit_worker.errors import EngineBusyError, EngineStoppedError, RequestError
from phasesplit_worker.requests import EngineRequest, Reservation
from phasesplit_worker.sequence import RequestKind
from phasesplit_worker.server.answers import AnswerFormat, CollectedAnswer, Json, Usage
from phasesplit_worker.server.bridge import OutputQueue
from phasesplit_worker.server.generation import CANCELLED, Generation, Piece
from phasesplit_worker.server.ports import Parts, Pulled, PullFailedError
from phasesplit_worker.server.streaming import EventStream
from phasesplit_worker.server.worker import RETRY_DRAINING_S, Worker

# A reservation waits in the engine's queue like any prompt. By then the peer's KV has long expired.
RESERVATION_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg, ready to run."""

    request: EngineRequest
    answer: AnswerFormat
    streams: bool
    is_router: bool
    transfer: KVTransferParams | None = None


@contextlib.contextmanager
def engine_errors_as_answers() -> Iterator[None]:
    """Translate the engine's refusals into HTTP."""
    try:
        yield
    except RequestError as error:
        raise bad_request(str(error), error.parameter) from error
    except EngineBusyError as error:
        raise overloaded(str(error)) from error
    except EngineStoppedError as error:
        raise unavailable(str(error), RETRY_DRAINING_S) from error


class LegRun:
    """One run of a leg, from submission to the last event."""

    def __init__(self, worker: Worker, parts: Parts, leg: Leg, queue: OutputQueue) -> None:
        self._worker = worker
        self._parts = parts
        self._leg = leg
        self._queue = queue
        self._generation = Generation(leg.request, queue, parts.engine, parts.tokenizer)
        self._pulled: Pulled | None = None
        self._keeps_blocks = False  # leg 1 has handed over: its KV waits for the decode side

    async def run(self, http_request: web.Request) -> web.StreamResponse:
        """Answer the request. Ends the sequence whatever happens."""
        stream = EventStream(http_request, {HEADER_REQUEST_ID: self._leg.answer.request_id})
        if self._generation.finish_reason is not None:
            return await self._answer_ended(stream, self._generation.finish_reason)
        try:
            with engine_errors_as_answers():
                await self._start(stream)
            if not self._leg.streams:
                return await self._answer_whole()
            return await self._answer_stream(stream)
        except ApiError as error:
            if not stream.is_started:
                raise
            await stream.send(error.body())
            return await stream.finish(done=False)
        finally:
            # A leg 1 that could not say its token has finished, but its KV would wait for nobody.
            is_over = self._generation.is_finished and self._leg.request.kind is not RequestKind.PREFILL
            if not (is_over or self._keeps_blocks):
                self._abort()

    def _abort(self) -> None:
        """End the sequence. Nothing writes to reserved blocks any more: they may go as well."""
        request, engine = self._leg.request, self._parts.engine
        engine.abort(request.request_id, CANCELLED)
        if request.kind is RequestKind.DECODE:
            engine.release_held(request.request_id)

    # -- start ---------------------------------------------------------------------------------

    async def _start(self, stream: EventStream) -> None:
        request, engine = self._leg.request, self._parts.engine
        if request.kind is RequestKind.DECODE:
            await self._start_decode()
            return
        engine.submit(request, self._queue.on_output)
        if request.kind is RequestKind.PREFILL:
            params = self._parts.transfer.offer(request.request_id, request.num_known_tokens)
            layout = engine.facts.kv_layout
            accepted = PrefillAccepted(
                kv_transfer_params=params,
                num_prompt_tokens=len(request.prompt_token_ids),
                kv_bytes=request.num_known_tokens * layout.bytes_per_token,
            )
            await stream.send(accepted.model_dump(mode="json"))

    async def _start_decode(self) -> None:
        """Reserve, pull, verify, start; on any failure of the pull recompute here instead."""
        request, engine, params = self._leg.request, self._parts.engine, self._leg.transfer
        if params is None:  # leg_kind makes a DECODE request only of given parameters
            raise bad_request("kv_transfer_params: needed for leg 2.", "kv_transfer_params")
        if not await self._is_reserved(reservation := engine.reserve(request, self._queue.on_output)):
            return  # the engine has ended the request; the queue says why
        try:
            self._pulled = await self._pull(request, params, reservation.result())
        except PullFailedError as error:
            self._worker.metrics.observe_transfer_failure(error.reason)
            engine.recompute(request.request_id, error.reason, error.first_token)
            return
        self._worker.metrics.observe_transfer(
            peer=params.remote_pod or params.remote_host or "",
            transport=self._pulled.transport,
            num_bytes=self._pulled.num_bytes,
            seconds=self._pulled.seconds,
        )
        engine.start_remote(request.request_id, self._pulled.first_token, self._pulled.num_tokens)

    async def _is_reserved(self, reservation: Future[Reservation]) -> bool:
        try:
            return await self._queue.settled(reservation, RESERVATION_TIMEOUT_S)
        except TimeoutError as error:
            raise unavailable("No KV cache became free for the request in time.", 1) from error

    async def _pull(
        self, request: EngineRequest, params: KVTransferParams, reservation: Reservation
    ) -> Pulled:
        """Pull in a task of its own, so that `/admin/cancel` can end it before the blocks go."""
        pull = asyncio.ensure_future(self._parts.transfer.pull(request, params, reservation))
        self._queue.pull = pull
        try:
            return await pull
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise unavailable("The request was cancelled before its end.", 1) from None
        finally:
            self._queue.pull = None

    # -- answers -------------------------------------------------------------------------------

    async def _answer_ended(self, stream: EventStream, reason: str) -> web.StreamResponse:
        """The replayed tokens already were the whole answer: only its end is missing."""
        if not self._leg.streams:
            return self._whole(CollectedAnswer(finish_reason=reason))
        await stream.send(self._leg.answer.finish_chunk(reason))
        return await self._finish_stream(stream, includes_usage=True)

    async def _answer_whole(self) -> web.StreamResponse:
        collected = CollectedAnswer()
        async for piece in self._generation.pieces():
            collected.texts.append(piece.text)
            collected.token_ids.extend(piece.token_ids)
            collected.logprobs.extend(piece.logprobs)
            collected.finish_reason = piece.finish_reason
        return self._whole(collected)

    def _whole(self, collected: CollectedAnswer) -> web.Response:
        answer = self._leg.answer
        return web.json_response(
            answer.whole(collected, self._usage()), headers={HEADER_REQUEST_ID: answer.request_id}
        )

    async def _answer_stream(self, stream: EventStream) -> web.StreamResponse:
        is_prefill = self._leg.request.kind is RequestKind.PREFILL
        events = self._opening_events()
        async for piece in self._generation.pieces():
            events += self._piece_events(piece)
            if events:
                await stream.send(*events)
                events = []
            self._keeps_blocks = is_prefill
        is_end = self._generation.finish_reason is not None
        return await self._finish_stream(stream, includes_usage=is_end)

    def _opening_events(self) -> list[Json]:
        """The role chunk of a chat, unless an earlier leg has sent it."""
        request = self._leg.request
        is_first = request.kind is not RequestKind.DECODE and not request.output_token_ids
        return [self._leg.answer.role_chunk()] if self._leg.answer.is_chat and is_first else []

    def _piece_events(self, piece: Piece) -> list[Json]:
        answer = self._leg.answer
        if self._leg.request.kind is RequestKind.PREFILL:
            # One chunk says it all: the router knows at once whether there is a leg 2.
            return [answer.text_chunk(piece.text, piece.token_ids, piece.logprobs, piece.finish_reason)]
        events: list[Json] = []
        has_tokens = bool(piece.token_ids) and (self._leg.is_router or answer.wants_logprobs)
        if piece.text or has_tokens:
            events.append(answer.text_chunk(piece.text, piece.token_ids, piece.logprobs))
        if piece.finish_reason is not None:
            events.append(answer.finish_chunk(piece.finish_reason))
        return events

    async def _finish_stream(self, stream: EventStream, *, includes_usage: bool) -> web.StreamResponse:
        events: list[Json] = []
        if includes_usage and self._leg.answer.includes_usage:
            events.append(self._leg.answer.usage_chunk(self._usage()))
        if self._leg.is_router:
            events.append(self._report().model_dump(mode="json"))
        if events:
            await stream.send(*events)
        return await stream.finish(done=True)

    # -- accounts ------------------------------------------------------------------------------

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=len(self._leg.request.prompt_token_ids),
            num_output_tokens=self._generation.num_output_tokens,
            num_cached_tokens=self._generation.timings.num_cached_tokens,
        )

    def _report(self) -> LegReport:
        config, timings, pulled = self._worker.config, self._generation.timings, self._pulled
        return LegReport(
            request_id=self._leg.answer.request_id,
            pod=config.pod_name,
            node=config.node_name,
            role=str(self._worker.role.role),
            num_prompt_tokens=len(self._leg.request.prompt_token_ids),
            num_cached_tokens=timings.num_cached_tokens,
            num_output_tokens=self._generation.num_output_tokens,
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            kv_bytes=0 if pulled is None else pulled.num_bytes,
            kv_transport=None if pulled is None else pulled.transport,
            kv_transfer_s=None if pulled is None else pulled.seconds,
            kv_busy_s=None if pulled is None else pulled.busy_s,
            kv_exposed_s=None if pulled is None else pulled.exposed_s,
            recomputed=timings.recomputed,
            num_preemptions=timings.num_preemptions,
        )
