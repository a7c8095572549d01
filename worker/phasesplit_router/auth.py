"""Who may call: API keys from a directory of files, the admin token for the router's own endpoints.

Files are read again when the directory changes,
as a mounted Secret does.
"""

import time
from pathlib import Path

from phasesplit_http.bearer import digest, is_sent
from phasesplit_http.errors import ApiError

_CHECK_S = 5.0


class ApiKeys:
    """Keys of clients; each file of the directory holds one. Without a directory anybody may call."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._digests: tuple[bytes, ...] = ()
        self._seen: object = None
        self._checked_s = float("-inf")

    def require(self, authorization: str | None) -> None:
        """Raise 401 unless a known key was sent."""
        if self._directory is None:
            return
        self._reload(self._directory, time.monotonic())
        if not is_sent(authorization, self._digests):
            raise ApiError(
                401,
                "The API key is missing or unknown; send the header `Authorization: Bearer <key>`.",
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _reload(self, directory: Path, now_s: float) -> None:
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        try:
            files = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
            seen = [(path.name, path.stat().st_mtime_ns) for path in files if path.is_file()]
            if seen == self._seen:
                return
            keys = [path.read_text(encoding="utf-8").strip() for path in files if path.is_file()]
        except OSError:
            return  # a Secret being swapped: the keys read before stay valid until the next look
        self._seen = seen
        self._digests = tuple(digest(key) for key in keys if key)


class AdminToken:
    """The object's admin token."""

    def __init__(self, token: str | None) -> None:
        self.token = token or ""
        self._known = digest(token) if token else None

    def require(self, authorization: str | None) -> None:
        """Raise 403 when there is no token, 401 when it was not sent."""
        if self._known is None:
            raise ApiError(
                403,
                "This endpoint is disabled because the router runs without --admin-token-file.",
                kind="permission_error",
                code="admin_disabled",
            )
        if not is_sent(authorization, (self._known,)):
            raise ApiError(
                401,
                "This endpoint needs the header `Authorization: Bearer <admin token>`.",
                kind="authentication_error",
                code="invalid_admin_token",
            )
