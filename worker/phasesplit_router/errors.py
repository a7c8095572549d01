"""Errors of the router: legs that did not deliver, and what a client is told when retries are used up."""

from phasesplit_http.errors import ApiError


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
