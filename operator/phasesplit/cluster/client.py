"""The API server, seen by the operator: reads, server-side apply, patches, deletes.

Plain dicts in and out. Every request has a timeout, every error is one of `cluster.errors`. Knows
nothing of what is written and why; `may_write` is asked before every write, so that a copy of the
operator that has lost the Lease cannot change anything.
"""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config, dynamic

from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.errors import API_ERRORS, NotFoundError, NotLeaderError, translate
from phasesplit.cluster.kinds import MODEL, Kind, kind_of

REQUEST_TIMEOUT_S = 15.0
CHUNK_SIZE = 500
_TOKEN_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


def in_cluster() -> bool:
    """Is this process a pod with a service account, and not told otherwise by $KUBECONFIG?"""
    return _TOKEN_PATH.exists() and not os.environ.get("KUBECONFIG")


async def connect() -> client.ApiClient:
    """A client from the service account of the pod, else from $KUBECONFIG or ~/.kube/config."""
    configuration = client.Configuration()
    if in_cluster():
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration=configuration)


class Cluster:
    """Reads and writes through one API client."""

    def __init__(self, api: client.ApiClient, may_write: Callable[[], bool] = lambda: True) -> None:
        self._api = api
        self._dynamic = dynamic.DynamicClient(api)
        self._may_write = may_write

    async def close(self) -> None:
        """End all connections."""
        await self._api.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest:
        """One object. Raises NotFoundError."""
        attempted = f"read {kind.kind} {_id(namespace, name)}"
        return await self._request("get", kind.path(namespace, name), attempted)

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """One object, None if there is none."""
        try:
            return await self.get(kind, namespace, name)
        except NotFoundError:
            return None

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Manifest]:
        """All objects that match, fetched in chunks."""
        more: str | None = None
        while True:
            page = await self._request(
                "get",
                kind.path(namespace),
                f"list {kind.plural}",
                limit=CHUNK_SIZE,
                _continue=more,
                label_selector=labels or None,
                field_selector=fields or None,
            )
            for item in page.get("items", ()):
                yield item
            more = page.get("metadata", {}).get("continue")
            if not more:
                return

    async def apply(self, manifest: Manifest, manager: str, *, dry_run: bool = False) -> Manifest:
        """Server-side apply; conflicts are taken over, since differences were decided before."""
        kind, namespace, name = kind_of(manifest), *_identity(manifest)
        return await self._write(
            "patch",
            kind.path(namespace, name),
            f"apply {kind.kind} {_id(namespace, name)}",
            body=manifest,
            content_type=APPLY,
            field_manager=manager,
            force_conflicts="true",
            dry_run="All" if dry_run else None,
        )

    async def create(self, manifest: Manifest, manager: str) -> Manifest:
        """Create. Raises ConflictError when it exists."""
        kind, namespace, name = kind_of(manifest), *_identity(manifest)
        path, attempted = kind.path(namespace), f"create {kind.kind} {_id(namespace, name)}"
        return await self._write("post", path, attempted, body=manifest, field_manager=manager)

    async def replace(self, manifest: Manifest, manager: str) -> Manifest:
        """Replace; with a resourceVersion in the manifest, raises ConflictError if it has changed."""
        kind, namespace, name = kind_of(manifest), *_identity(manifest)
        path, attempted = kind.path(namespace, name), f"replace {kind.kind} {_id(namespace, name)}"
        return await self._write("put", path, attempted, body=manifest, field_manager=manager)

    async def merge_patch(
        self, kind: Kind, namespace: str | None, name: str, patch: Manifest, *, manager: str
    ) -> Manifest:
        """JSON merge patch: null removes, lists are replaced."""
        return await self._write(
            "patch",
            kind.path(namespace, name),
            f"patch {kind.kind} {_id(namespace, name)}",
            body=patch,
            content_type=MERGE_PATCH,
            field_manager=manager,
        )

    async def write_status(
        self, namespace: str, name: str, uid: str, status: Manifest, *, manager: str
    ) -> Manifest:
        """Replace the status of the user's object, unless it was deleted and made anew since."""
        return await self._write(
            "patch",
            MODEL.path(namespace, name, "status"),
            f"write the status of {_id(namespace, name)}",
            body=[
                {"op": "test", "path": "/metadata/uid", "value": uid},
                {"op": "add", "path": "/status", "value": status},
            ],
            content_type=JSON_PATCH,
            field_manager=manager,
        )

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, orphan: bool = False
    ) -> None:
        """Delete; with `uid` only that very object, with `orphan` not what it owns. Gone already is fine."""
        body: Manifest = {"propagationPolicy": "Orphan" if orphan else "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            attempted = f"delete {kind.kind} {_id(namespace, name)}"
            await self._write("delete", kind.path(namespace, name), attempted, body=body)
        except NotFoundError:
            return

    async def _write(self, method: str, path: str, attempted: str, **params: Any) -> Manifest:
        if not self._may_write():
            raise NotLeaderError(f"did not {attempted}: another copy of the operator holds the lease")
        return await self._request(method, path, attempted, **params)

    async def _request(self, method: str, path: str, attempted: str, **params: Any) -> Manifest:
        try:
            response = await self._dynamic.request(
                method, path, serialize=False, _request_timeout=REQUEST_TIMEOUT_S, **params
            )
            answer: Manifest = await response.json()
        except API_ERRORS as error:
            raise translate(error, attempted) from error
        return answer


def _identity(manifest: Manifest) -> tuple[str | None, str]:
    return manifest["metadata"].get("namespace"), manifest["metadata"]["name"]


def _id(namespace: str | None, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name
