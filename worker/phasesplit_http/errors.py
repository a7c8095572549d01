"""A failure that a client sees: an HTTP status and OpenAI's error fields.

Knows the OpenAI error format and aiohttp's own exceptions; knows nothing of workers, queues or engines.
"""

import json
import math
from typing import Any

from aiohttp import web

_MAX_MESSAGE_CHARS = 1000


class ApiError(Exception):
    """A failure that the client sees. `message` is one sentence naming field, value and remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason  # label of the router's `rejected_requests_total`; empty: not a rejection
        self.request_id = ""

    def body(self) -> dict[str, Any]:
        """The OpenAI error body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The body as bytes."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def response(self) -> web.Response:
        """The error as an HTTP answer."""
        return web.json_response(self.body(), status=self.status, headers=self.headers())


def _shortened(text: str) -> str:
    """What a client sent is named in its error, but never sent back at length."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, reason: str = "overloaded", retry_after_s: float = 1.0) -> ApiError:
    """429: the request would wait too long now."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
        reason=reason,
    )


def unavailable(message: str, retry_after_s: float = 5.0, reason: str = "unavailable") -> ApiError:
    """503: nothing can serve the request now."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="not_ready",
        retry_after_s=retry_after_s,
        reason=reason,
    )


def from_http(error: web.HTTPException, request: web.Request, too_large: ApiError) -> ApiError:
    """An exception of aiohttp's own; `too_large` says what this server's limit for a body is."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return too_large
    if error.status == 404:
        return ApiError(404, f"There is nothing at {request.path[:200]}.", code="not_found")
    if error.status == 405:
        return ApiError(
            405, f"{request.method} is not allowed at {request.path[:200]}.", code="method_not_allowed"
        )
    return ApiError(error.status, f"{error.reason}.", code="http_error")
