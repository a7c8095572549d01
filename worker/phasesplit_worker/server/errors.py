"""Errors as answers: every failure a client sees is an OpenAI error body of the right status.

Knows HTTP and the OpenAI error format; knows nothing of engine or transfer.
"""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from phasesplit_http.bodies import json_object, read_body
from phasesplit_http.errors import ApiError, from_http

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def unknown_model(asked: str, served: str) -> ApiError:
    """404: another model is served here."""
    return ApiError(
        404,
        f"The model `{asked}` does not exist here; this server serves `{served}`.",
        param="model",
        code="model_not_found",
    )


def too_large() -> ApiError:
    """413: the body is over the limit."""
    return ApiError(
        413,
        f"The request body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt.",
        code="request_too_large",
    )


def internal_error(message: str = "The server met an unexpected error; its log says more.") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, kind="server_error", code="internal_error")


@web.middleware
async def error_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn every exception of a handler into an OpenAI error body."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return from_http(error, request, too_large()).response()
    except ConnectionResetError:
        # The client is gone. Raised on, aiohttp would log it as a server error with a stack trace.
        if request.transport is not None:
            request.transport.abort()
        return web.Response()  # nobody reads it
    except Exception:  # the one place where an unforeseen failure becomes an answer instead of a hang
        logger.exception("unexpected error while serving %s %s", request.method, request.path)
        return internal_error().response()


async def read_json_object(request: web.Request) -> dict[str, object]:
    """The body as a JSON object, or an `ApiError`."""
    return json_object(await read_body(request, BODY_TIMEOUT_S))
