"""Who may use the admin endpoints and the fields between router and worker: holders of the admin token.

Without a token nobody is let in.
"""

from pathlib import Path

from aiohttp import web

from phasesplit_http.bearer import digest, is_sent
from phasesplit_http.errors import ApiError


class AdminAuth:
    """Checks `Authorization: Bearer <admin token>`."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else digest(token)

    @classmethod
    def from_file(cls, path: Path | None) -> "AdminAuth":
        """Read the token from its file (trailing white space ignored); an empty file is refused."""
        if path is None:
            return cls(None)
        token = path.read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError(f"--admin-token-file {path} is empty; write the admin token into it.")
        return cls(token)

    def is_admin(self, request: web.Request) -> bool:
        """Does the request carry the admin token?"""
        if self._digest is None:
            return False
        return is_sent(request.headers.get("Authorization"), (self._digest,))

    def require(self, request: web.Request) -> None:
        """Raise 403 or 401 unless the request carries the admin token."""
        if self._digest is None:
            raise ApiError(
                403,
                "The admin endpoints are disabled because the worker runs without --admin-token-file.",
                kind="permission_error",
                code="admin_disabled",
            )
        if not self.is_admin(request):
            raise ApiError(
                401,
                "The admin endpoints need the header `Authorization: Bearer <admin token>`.",
                kind="authentication_error",
                code="invalid_admin_token",
            )
