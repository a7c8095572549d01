"""Secrets: the one each object has for its workers, made once, and those that an object refers to.

Read by name and remembered for a while; the operator cannot list Secrets.
"""

import base64
import secrets
from collections.abc import Callable

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.client import Cluster
from phasesplit.cluster.errors import ConflictError
from phasesplit.cluster.kinds import SECRET
from phasesplit.cluster.snapshot import Child, Key, ModelView
from phasesplit.operator.apply import check_owner
from phasesplit.resources.children import build_transfer_secret
from phasesplit.resources.context import BuildContext

_KEPT_S = 300.0
_TOKEN_BYTES = 32


class SecretReader:
    """Reads Secrets by name, and makes an object's own."""

    def __init__(self, cluster: Cluster, monotonic: Callable[[], float]) -> None:
        self._cluster = cluster
        self._monotonic = monotonic
        self._known: dict[tuple[str, str], tuple[float, Manifest]] = {}
        self._own: dict[Key, str] = {}  # names of the objects' own

    async def value(self, namespace: str, name: str, key: str) -> str | None:
        """One value of a Secret; None if there is no such Secret or key."""
        body = await self._read(namespace, name)
        return _decode(body, key) if body is not None else None

    async def ensure_own(self, context: BuildContext, owner: ModelView) -> str:
        """The admin token of an object, from its Secret, which is made if it does not exist."""
        name = names.transfer_secret_name(context.name, context.uid)
        if self._own.get(owner.key) != name:
            self.forget(owner.key)
            self._own[owner.key] = name
        body = await self._read(context.namespace, name)
        if body is None:
            manifest = build_transfer_secret(
                context, secrets.token_hex(_TOKEN_BYTES), secrets.token_hex(_TOKEN_BYTES)
            )
            try:
                body = await self._cluster.create(manifest, names.FIELD_MANAGER)
            except ConflictError:
                body = await self._cluster.get(SECRET, context.namespace, name)
            self._known[context.namespace, name] = (self._monotonic(), body)
        check_owner(Child.from_body({"kind": SECRET.kind, **body}), owner)
        return _decode(body, names.SECRET_KEY_ADMIN) or ""

    def forget(self, key: Key) -> None:
        """The object is gone."""
        name = self._own.pop(key, None)
        if name is not None:
            self._known.pop((key[0], name), None)

    async def _read(self, namespace: str, name: str) -> Manifest | None:
        known = self._known.get((namespace, name))
        if known is not None and self._monotonic() - known[0] < _KEPT_S:
            return known[1]
        body = await self._cluster.find(SECRET, namespace, name)
        if body is not None:
            self._known[namespace, name] = (self._monotonic(), body)
        else:
            self._known.pop((namespace, name), None)
        return body


def _decode(body: Manifest, key: str) -> str | None:
    encoded = (body.get("data") or {}).get(key)
    return base64.b64decode(encoded).decode().strip() if encoded else None
