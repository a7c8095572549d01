"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`.

Reads and checks a request, then hands it to its leg. Who holds the admin token is a router and may
use the fields of `phasesplit.api.legs`.
"""

import re
import time
import uuid

from aiohttp import web

from phasesplit.api.names import HEADER_REQUEST_ID, HEADER_ROLE, HEADER_ROLE_VERSION
from phasesplit_http.errors import bad_request
from phasesplit_worker.server.answers import AnswerFormat, models_body
from phasesplit_worker.server.errors import read_json_object, unknown_model
from phasesplit_worker.server.legs import Leg, LegRun
from phasesplit_worker.server.prepare import Limits, build_request, encode_prompt
from phasesplit_worker.server.roles import assignment_from_headers
from phasesplit_worker.server.schemas import ChatBody, CompletionBody, parse_body, split_internal
from phasesplit_worker.server.worker import Worker

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def read_request_id(request: web.Request) -> str:
    """The caller's `x-request-id`, or a new one; a malformed one is refused."""
    value = request.headers.get(HEADER_REQUEST_ID)
    if value is None:
        return uuid.uuid4().hex
    if _REQUEST_ID.fullmatch(value) is None:
        raise bad_request(
            f"{HEADER_REQUEST_ID}: it must have 1 to 128 letters, digits or . _ : @ / + = -.",
            HEADER_REQUEST_ID,
        )
    return value


class OpenAIHandlers:
    """Handlers of the OpenAI endpoints."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def models(self, _: web.Request) -> web.StreamResponse:
        """`GET /v1/models`."""
        facts = self._worker.ready_parts().engine.facts
        name = self._worker.config.model_name
        return web.json_response(models_body(name, self._worker.created, facts.max_model_length))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionBody)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatBody)

    async def _answer(
        self, request: web.Request, model: type[CompletionBody] | type[ChatBody]
    ) -> web.StreamResponse:
        is_router = self._worker.auth.is_admin(request)
        if is_router:
            self._adopt_role(request)
        request_id = read_request_id(request)
        parts = self._worker.ready_parts()
        raw = await read_json_object(request)
        leg_body, transfer, internal = split_internal(raw, is_router)
        body = parse_body(model, leg_body)
        if body.model != self._worker.config.model_name:
            raise unknown_model(body.model, self._worker.config.model_name)
        limits = Limits(parts.engine.facts.max_model_length, parts.tokenizer.vocabulary_size)
        prompt = await encode_prompt(body, parts.tokenizer, limits)
        queue = self._worker.open_requests.open(request_id)
        try:
            engine_request = build_request(
                request_id=queue.request_id,
                body=body,
                prompt=prompt,
                transfer=transfer,
                internal=internal,
                limits=limits,
            )
            streams = body.stream or (transfer is not None and transfer.do_remote_decode)
            leg = Leg(
                request=engine_request,
                answer=self._format(request_id, body, is_router=is_router),
                streams=streams,
                is_router=is_router,
                transfer=transfer,
            )
            return await LegRun(self._worker, parts, leg, queue).run(request)
        finally:
            self._worker.open_requests.close(queue)

    def _format(self, request_id: str, body: CompletionBody | ChatBody, *, is_router: bool) -> AnswerFormat:
        is_chat = isinstance(body, ChatBody)
        return AnswerFormat(
            request_id=request_id,
            model=body.model,
            created=int(time.time()),
            is_chat=is_chat,
            wants_logprobs=body.logprobs if isinstance(body, ChatBody) else body.logprobs is not None,
            includes_usage=body.include_usage,
            includes_token_ids=is_router,
        )

    def _adopt_role(self, request: web.Request) -> None:
        assignment = assignment_from_headers(
            request.headers.get(HEADER_ROLE), request.headers.get(HEADER_ROLE_VERSION)
        )
        if assignment is not None:
            self._worker.adopt_role(assignment, has_limits=False)
