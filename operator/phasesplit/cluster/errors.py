"""What can go wrong when talking to the API server, as a few types that callers act on.

The only place that looks at the client library's exceptions.
"""

import json

import aiohttp
from kubernetes.aio.client.exceptions import ApiException

_MAX_MESSAGE = 500


class ClusterError(Exception):
    """Base of all errors of this package: one sentence saying what was attempted and why it failed."""

    retry_after_s: float | None = None


class NotFoundError(ClusterError):
    """404: the object, its namespace or its kind does not exist."""


class ConflictError(ClusterError):
    """409: it exists already, or it changed or was replaced since it was read."""


class ForbiddenError(ClusterError):
    """401 or 403: the operator's account may not do this."""


class InvalidError(ClusterError):
    """400 or 422: the API server refuses the object; repeating the same request cannot help."""


class ThrottledError(ClusterError):
    """429: too many requests, or the API server is still starting."""


class UnavailableError(ClusterError):
    """5xx, refused, reset or timed out: try again later."""


class NotLeaderError(ClusterError):
    """This copy of the operator does not hold the Lease, so it must not write."""


_BY_STATUS: dict[int, type[ClusterError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: ConflictError,
    422: InvalidError,
    429: ThrottledError,
}


def translate(error: Exception, attempted: str) -> ClusterError:
    """Our error for one of the client's; `attempted` completes the sentence "could not ..."."""
    if isinstance(error, ClusterError):
        return error
    if isinstance(error, TimeoutError):
        return UnavailableError(f"could not {attempted}: the API server did not answer in time")
    if isinstance(error, aiohttp.ClientError | OSError):
        return UnavailableError(f"could not {attempted}: {error or type(error).__name__}")
    if isinstance(error, ApiException):
        kind = _BY_STATUS.get(error.status or 0, UnavailableError)
        translated = kind(f"could not {attempted}: {_sentence(error)}")
        translated.retry_after_s = _retry_after_s(error)
        return translated
    raise TypeError(f"not an API error: {error!r}") from error


# What `translate` accepts; everything else is a bug and passes through.
API_ERRORS = (ClusterError, ApiException, TimeoutError, aiohttp.ClientError, OSError)


def _sentence(error: ApiException) -> str:
    """The API server's own message, without headers and HTML."""
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.body or error.reason or f"status {error.status}"
    return str(message)[:_MAX_MESSAGE]


def _retry_after_s(error: ApiException) -> float | None:
    try:
        return float((error.headers or {}).get("Retry-After", ""))
    except ValueError:
        return None
