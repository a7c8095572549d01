"""Errors as answers: every failure a client sees is an OpenAI error body of the right status.

Knows HTTP and the OpenAI error format; knows nothing of engine or transfer.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """A failure with its HTTP status and OpenAI error fields. `message` is one sentence for a person."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The OpenAI error body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> web.Response:
        """The error as an HTTP answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response(self.body(), status=self.status, headers=headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param, code=code)


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


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """429: the queue is full now."""
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """503: loading, draining or failed."""
    return ApiError(
        503, message, kind="service_unavailable_error", code="not_ready", retry_after_s=retry_after_s
    )


def internal_error(message: str = "The server met an unexpected error; its log says more.") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def _from_http(error: web.HTTPException, request: web.Request) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return too_large()
    if error.status == 404:
        return ApiError(404, f"There is nothing at {request.path[:200]}.", code="not_found")
    if error.status == 405:
        return ApiError(
            405, f"{request.method} is not allowed at {request.path[:200]}.", code="method_not_allowed"
        )
    return ApiError(error.status, f"{error.reason}.", code="http_error")


@web.middleware
async def error_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn every exception of a handler into an OpenAI error body."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return _from_http(error, request).response()
    except ConnectionResetError:
        # The client is gone. Raised on, aiohttp would log it as a server error with a stack trace.
        if request.transport is not None:
            request.transport.abort()
        return web.Response()  # nobody reads it
    except Exception:  # the one place where an unforeseen failure becomes an answer instead of a hang
        logger.exception("unexpected error while serving %s %s", request.method, request.path)
        return internal_error().response()


async def read_json_object(request: web.Request) -> dict[str, object]:
    """The body as a JSON object, or an `ApiError`. aiohttp enforces the size limit while reading."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError as error:
        raise ApiError(
            408, f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} s.", code="request_timeout"
        ) from error
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, json.JSONDecodeError) else "it is not JSON text"
        raise bad_request(f"The request body is not valid JSON: {detail}.") from error
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.")
    return value
