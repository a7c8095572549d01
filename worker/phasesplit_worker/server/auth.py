"""Who may use the admin endpoints and the fields between router and worker: holders of the admin token.

The comparison takes the same time whatever is sent. Without a token nobody is let in.
"""

import hashlib
import hmac
from pathlib import Path

from aiohttp import web

from phasesplit_worker.server.errors import ApiError

_SCHEME = "bearer "


class AdminAuth:
    """Checks `Authorization: Bearer <admin token>`."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

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
        header = request.headers.get("Authorization", "")
        sent = header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else ""
        # Hashing first makes both sides equally long, so that length leaks nothing either.
        digest = hashlib.sha256(sent.encode("utf-8", "surrogateescape")).digest()
        return self._digest is not None and hmac.compare_digest(digest, self._digest)

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
