"""Probes, metrics and the admin endpoints: `/health`, `/ready`, `/metrics`, `/admin/*`, `/v1/kv/*`.

Knows bodies and paths; the worker does the work. Admin bodies are the models of `phasesplit.api`.
"""

import asyncio
from typing import TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from phasesplit.api.reports import CancelRequest, ProbeRequest, ProbeResult, RoleAssignment
from phasesplit_http.errors import ApiError
from phasesplit_worker.server.errors import read_json_object
from phasesplit_worker.server.generation import CANCELLED
from phasesplit_worker.server.schemas import validation_error
from phasesplit_worker.server.worker import Worker

MessageT = TypeVar("MessageT", bound=BaseModel)
PROBE_MARGIN_S = 1.0  # beyond the probe's own deadline, for connecting and closing


async def _read(request: web.Request, model: type[MessageT]) -> MessageT:
    try:
        return model.model_validate(await read_json_object(request))
    except ValidationError as error:
        raise validation_error(error) from error


def _json(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(), content_type="application/json")


class ProbeHandlers:
    """What kubelet and Prometheus ask; open to everybody."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Liveness: the event loop answers and the engine's heartbeat is fresh."""
        problem = self._worker.liveness_problem()
        return web.json_response(
            {"status": "ok" if problem is None else problem}, status=503 if problem else 200
        )

    async def ready(self, _: web.Request) -> web.StreamResponse:
        """Readiness: the worker takes requests."""
        problem = self._worker.readiness_problem()
        body = {"state": str(self._worker.state), "message": problem or ""}
        return web.json_response(body, status=200 if problem is None else 503)

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Prometheus exposition."""
        return web.Response(body=self._worker.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


class AdminHandlers:
    """Endpoints behind the admin token."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def state(self, request: web.Request) -> web.StreamResponse:
        """`GET /admin/state`."""
        self._worker.auth.require(request)
        return _json(self._worker.report())

    async def role(self, request: web.Request) -> web.StreamResponse:
        """`POST /admin/role`."""
        self._worker.auth.require(request)
        self._worker.adopt_role(await _read(request, RoleAssignment), has_limits=True)
        return _json(self._worker.report())

    async def probe(self, request: web.Request) -> web.StreamResponse:
        """`POST /admin/probe`: measure the link from a peer."""
        self._worker.auth.require(request)
        probe = await _read(request, ProbeRequest)
        parts = self._worker.live_parts()
        try:
            async with asyncio.timeout(probe.deadline_s + PROBE_MARGIN_S):
                return _json(await parts.transfer.probe(probe))
        except TimeoutError:
            return _json(ProbeResult(error=f"No answer within {probe.deadline_s} s."))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """`POST /admin/cancel`: end a request in any state and free its KV, held KV too."""
        self._worker.auth.require(request)
        cancel = await _read(request, CancelRequest)
        parts = self._worker.live_parts()
        was_known = self._worker.open_requests.is_known(cancel.request_id)
        for engine_id in self._worker.open_requests.engine_ids(cancel.request_id):
            pull = self._worker.open_requests.pull_of(engine_id)
            if pull is not None:
                pull.cancel()  # its handler ends the sequence once nothing writes to the blocks
            else:
                parts.engine.abort(engine_id, CANCELLED)
        return web.json_response({"cancelled": was_known})

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """`POST /admin/drain`: finish what runs, take nothing new."""
        self._worker.auth.require(request)
        self._worker.drain()
        return web.json_response({"state": str(self._worker.state)}, status=202)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/kv/{request_id}`: the manifest of a prefill's KV, newest try first."""
        self._worker.auth.require(request)
        request_id = request.match_info["request_id"]
        parts = self._worker.live_parts()
        for engine_id in reversed(self._worker.open_requests.engine_ids(request_id)):
            manifest = parts.transfer.manifest(engine_id)
            if manifest is not None:
                return _json(manifest)
        raise ApiError(404, f"No KV of request {request_id[:128]} is known here.", code="not_found")
