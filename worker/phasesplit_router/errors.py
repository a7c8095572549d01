"""Errors of the router. Those a client sees carry an HTTP status and OpenAI's error fields.

Knows the OpenAI error format; does not know aiohttp.
"""

import json
import math
from typing import Any


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
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason  # label of `rejected_requests_total`; empty: not a rejection
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


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param)


def overloaded(message: str, reason: str, retry_after_s: float) -> ApiError:
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


def lost(message: str) -> ApiError:
    """502: workers failed and the retries are used up."""
    return ApiError(502, message, kind="server_error", code="worker_lost")


class LegError(Exception):
    """A leg did not deliver. `pod` is the worker it ran on."""

    def __init__(self, pod: str, message: str) -> None:
        super().__init__(f"{pod}: {message}")
        self.pod = pod


class LegLostError(LegError):
    """The worker died, stalled or broke off: the request goes on elsewhere."""


class LegBusyError(LegError):
    """The worker refused for now (429, 503): try another one; the worker itself is well."""


class LegRejectedError(LegError):
    """The worker says the request itself is wrong: its answer goes to the client as it is."""

    def __init__(self, pod: str, status: int, body: bytes) -> None:
        super().__init__(pod, f"status {status}")
        self.status = status
        self.body = body
