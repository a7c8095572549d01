"""The router's HTTP face: OpenAI endpoints, probes, metrics, status, traces.

Knows aiohttp on the client's side. Every failure a client sees is an OpenAI error body, or an error
event without `[DONE]` when the stream has begun.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from phasesplit.api import names
from phasesplit_http.bodies import read_body
from phasesplit_http.errors import ApiError, bad_request, from_http, unavailable
from phasesplit_router.answers import Answer
from phasesplit_router.attempt import Progress
from phasesplit_router.auth import AdminToken, ApiKeys
from phasesplit_router.errors import LegRejectedError
from phasesplit_router.flow import Flow, error_event
from phasesplit_router.records import Record
from phasesplit_router.request import ClientRequest, Endpoint, clean_request_id, parse_request
from phasesplit_router.router import Router

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_SEED = 2**62
READ_TIMEOUT_S = 60.0  # for a request's body
WRITE_TIMEOUT_S = 60.0  # for a client that does not read its stream
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StreamSink:
    """A client's event stream. Headers go out with the first event."""

    def __init__(self, request: web.Request, headers: Callable[[], dict[str, str]]) -> None:
        self._request = request
        self._headers = headers
        self.response: web.StreamResponse | None = None

    async def send(self, data: bytes) -> None:
        """Send bytes at once. Raises ConnectionResetError when the client is gone."""
        if self.response is None:
            self.response = web.StreamResponse(headers=self._headers())
            self.response.content_type = "text/event-stream"
            self.response.charset = "utf-8"
            await self.response.prepare(self._request)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self.response.write(data)
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error


class RouterServer:
    """The aiohttp application of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._keys = ApiKeys(router.settings.api_keys_dir)
        self._admin = AdminToken(router.settings.admin_token)
        self._ids: set[str] = set()
        self.is_leaving = False  # not ready any more, but requests that still arrive are served
        self.is_draining = False
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get(names.PATH_ROUTER_STATUS, self._status),
                web.get(names.PATH_ROUTER_TRACE, self._trace_batch),
                web.get(names.PATH_KV + "/{request_id}", self._trace),
            ]
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Endpoint.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Endpoint.COMPLETION)

    async def _serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        arrival_s = time.monotonic()
        router = self._router
        self._keys.require(request.headers.get("Authorization"))
        if self.is_draining:
            raise unavailable("The router is shutting down; retry, another one will answer.", 1.0)
        table = router.book.table
        if table is None:
            raise router.queues.no_worker()
        sent_id = clean_request_id(request.headers.get(names.HEADER_REQUEST_ID))
        own_id = uuid.uuid4().hex
        # An id that is in use would mix up two requests in the ledger.
        request_id = sent_id if sent_id is not None and sent_id not in self._ids else own_id
        client = parse_request(
            await read_body(request, READ_TIMEOUT_S),
            endpoint,
            table,
            request_id=request_id,
            # A client may send an id again, here or to another router, before the workers have heard that the
            # first request is cancelled: that must not end the second one.
            leg_id=request_id if request_id == own_id else f"{request_id}.{own_id[:8]}",
            asked_class=request.headers.get(names.HEADER_SLO_CLASS),
            random_seed=router.draw.randrange(MAX_SEED),
        )
        record = Record(request_id, client.latency_class, arrival_s)
        router.ledger.arrived(client.latency_class.name, arrival_s)
        self._ids.add(request_id)
        router.count_in_flight(1)
        router.trace_ring.begin(record)
        try:
            return await self._answer(request, client, record)
        except asyncio.CancelledError:
            record.abandoned = True
            raise
        except ApiError as error:
            record.rejected, record.failed = error.reason, not error.reason
            error.request_id = request_id
            raise
        finally:
            self._ids.discard(request_id)
            router.count_in_flight(-1)
            router.ledger.ended(record, time.monotonic())
            router.trace_ring.add(record)
            router.metrics.ended(record)

    async def _answer(
        self, request: web.Request, client: ClientRequest, record: Record
    ) -> web.StreamResponse:
        router = self._router
        answer = Answer(
            endpoint=client.endpoint,
            request_id=client.request_id,
            model=client.model,
            created=int(time.time()),
            include_usage=client.include_usage,
            keep_text=not client.stream or router.settings.trace_text,
        )

        def headers() -> dict[str, str]:
            return {
                names.HEADER_REQUEST_ID: client.request_id,
                names.HEADER_MODE: str(record.mode),
                names.HEADER_PAIR: flow.pods,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }

        sink = StreamSink(request, headers) if client.stream else None
        flow = Flow(router.services, Progress(client, record, answer, sink))
        prompt_tokens = router.services.lengths.prompt_tokens(client.prompt_bytes)
        record.drawn = router.services.halves.assign(client.latency_class.name, prompt_tokens)
        demand = flow.demand()
        record.expected_prompt_tokens = demand.prompt_tokens
        record.expected_output_tokens = router.services.lengths.usual_output_tokens(client.max_tokens)
        refusal = router.admit(demand, client.latency_class)
        if refusal is not None:
            raise refusal
        try:
            await flow.run()
        except ConnectionResetError:  # the client left between two tokens
            record.abandoned = True
            return sink.response if sink and sink.response else web.Response()
        except LegRejectedError as error:
            # The client's mistake, which only the worker could see: neither attained nor missed.
            record.invalid = True
            return web.Response(
                status=error.status,
                body=error.body,
                content_type="application/json",
                headers={names.HEADER_REQUEST_ID: client.request_id},
            )
        except ApiError as error:
            if sink is None or sink.response is None:
                raise
            # The stream has begun: say so in it, and leave `[DONE]` out.
            record.failed = True
            await sink.send(error_event(error))
            await sink.response.write_eof()
            return sink.response
        record.finish_reason = answer.finish_reason
        if router.settings.trace_text:
            record.text = answer.text
        if sink is None:
            return web.Response(
                body=answer.whole(flow.usage()), content_type="application/json", headers=headers()
            )
        await sink.send(flow.ending())
        assert sink.response is not None  # noqa: S101  `send` has made it
        await sink.response.write_eof()
        return sink.response

    async def _models(self, request: web.Request) -> web.Response:
        self._keys.require(request.headers.get("Authorization"))
        table = self._router.book.table
        if table is None:
            raise self._router.queues.no_worker()
        model = {
            "id": table.model,
            "object": "model",
            "created": 0,
            "owned_by": "phasesplit",
            "max_model_len": table.max_model_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Ready once the table was read. Never depends on workers."""
        if self.is_leaving:
            raise unavailable("The router is shutting down.", 1.0)
        if self._router.book.table is None:
            raise self._router.queues.no_worker()
        return web.json_response({"status": "ready"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._router.metrics.exposition(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _status(self, request: web.Request) -> web.Response:
        self._admin.require(request.headers.get("Authorization"))
        return web.Response(text=self._router.report().model_dump_json(), content_type="application/json")

    async def _trace_batch(self, request: web.Request) -> web.Response:
        self._admin.require(request.headers.get("Authorization"))
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise bad_request(f"after: {after[:40]!r} is no cursor; send `next` of the last answer.", "after")
        batch = self._router.trace_ring.after(request.query.get("epoch", ""), int(after), time.monotonic())
        return web.Response(text=batch.model_dump_json(), content_type="application/json")

    async def _trace(self, request: web.Request) -> web.Response:
        self._admin.require(request.headers.get("Authorization"))
        request_id = request.match_info["request_id"]
        trace = self._router.ledger.find_trace(request_id)
        if trace is None:
            raise ApiError(
                404,
                f"No recent request has the id {request_id[:128]!r}; the last 1,000 are kept.",
                code="not_found",
            )
        return web.Response(text=trace.model_dump_json(), content_type="application/json")


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt.",
        code="too_large",
    )


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every failure as an OpenAI error body."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = from_http(error, request, _too_large())
    except ConnectionResetError:
        return web.Response()  # the client is gone: nobody reads this
    except Exception:  # the one place where the unforeseen becomes an answer instead of a hang
        logger.exception("unexpected error while serving %s %s", request.method, request.path)
        failure = ApiError(
            500,
            "The router met an unexpected error; its log says more.",
            kind="server_error",
            code="internal",
        )
    headers = failure.headers()
    if failure.request_id:
        headers[names.HEADER_REQUEST_ID] = failure.request_id
    return web.Response(
        status=failure.status, body=failure.encoded(), content_type="application/json", headers=headers
    )
