"""The HTTP application: routes and limits. Knows paths and handlers only."""

from aiohttp import web

from phasesplit.api import names
from phasesplit_worker.server.admin_api import AdminHandlers, ProbeHandlers
from phasesplit_worker.server.errors import MAX_BODY_BYTES, error_middleware
from phasesplit_worker.server.openai_api import OpenAIHandlers
from phasesplit_worker.server.worker import Worker


def build_app(worker: Worker) -> web.Application:
    """All routes of a worker."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware])
    openai, probes, admin = OpenAIHandlers(worker), ProbeHandlers(worker), AdminHandlers(worker)
    router = app.router
    router.add_get("/v1/models", openai.models)
    router.add_post("/v1/completions", openai.completions)
    router.add_post("/v1/chat/completions", openai.chat_completions)
    router.add_get(names.PATH_HEALTH, probes.health)
    router.add_get(names.PATH_READY, probes.ready)
    router.add_get(names.PATH_METRICS, probes.metrics)
    router.add_get(names.PATH_ADMIN_STATE, admin.state)
    router.add_post(names.PATH_ADMIN_ROLE, admin.role)
    router.add_post(names.PATH_ADMIN_PROBE, admin.probe)
    router.add_post(names.PATH_ADMIN_CANCEL, admin.cancel)
    router.add_post(names.PATH_ADMIN_DRAIN, admin.drain)
    router.add_get(names.PATH_KV + "/{request_id:.+}", admin.manifest)
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client is gone, so that the sequence ends too."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
