"""The part of a Kubernetes API that the router watches: list and watch with resourceVersions, over HTTP.

For what a real API server does not do on demand: go away, forget history (410), break a watch.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from helpers_fake_worker import FakeWorker
from phasesplit.api.routing import RoutingTable

KINDS = {"configmaps": "/api/v1", "endpointslices": "/apis/discovery.k8s.io/v1"}


class WatchApi:
    """Serves ConfigMaps and EndpointSlices of one namespace."""

    def __init__(self, token: str = "api-token") -> None:
        self.token = token
        self.version = 100
        self.oldest = 0  # watches from before this get 410
        self.items: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self.log: dict[str, list[tuple[int, dict[str, Any]]]] = {kind: [] for kind in KINDS}
        self.lists = 0
        self.watches = 0
        self.port = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> "WatchApi":
        """Listen; on the same port after `stop`."""
        app = web.Application()
        for kind, prefix in KINDS.items():
            app.router.add_get(f"{prefix}/namespaces/ns/{kind}", self._handler(kind))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return self

    async def stop(self) -> None:
        """Go away: connections break, the port refuses."""
        if self._runner is not None and self._runner.server is not None:
            for site in list(self._runner.sites):
                await site.stop()
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for it."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "test", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(json.dumps(config))
        return path

    # Changes

    def put(self, kind: str, name: str, item: dict[str, Any]) -> None:
        """Create or replace an object."""
        self.version += 1
        event = "MODIFIED" if name in self.items[kind] else "ADDED"
        metadata = {"name": name, "resourceVersion": str(self.version), "uid": f"uid-{name}"}
        item = item | {"metadata": item.get("metadata", {}) | metadata}
        self.items[kind][name] = item
        self._log(kind, event, item)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object."""
        self.version += 1
        item = self.items[kind].pop(name)
        item["metadata"]["resourceVersion"] = str(self.version)
        self._log(kind, "DELETED", item)

    def forget(self) -> None:
        """Drop history, as etcd compaction does, and end running watches with 410."""
        self.version += 1
        self.oldest = self.version
        self._wake()

    def put_table(self, table: RoutingTable) -> None:
        """The routing ConfigMap."""
        self.put("configmaps", "obj-routing", {"data": {"routing.json": table.model_dump_json()}})

    def put_workers(self, service: str, workers: list[FakeWorker], **conditions: bool) -> None:
        """Endpoints of a headless Service; one slice per worker, since their ports differ."""
        for worker in workers:
            self.put_endpoint(service, worker.endpoint(), **conditions)

    def put_endpoint(self, service: str, worker: dict[str, Any], **conditions: bool) -> None:
        """The slice of one worker, given as in a routing file."""
        endpoint = {
            "addresses": [worker["host"]],
            "nodeName": worker["node"],
            "targetRef": {"kind": "Pod", "name": worker["pod"]},
            "conditions": {"ready": True, "serving": True, "terminating": False} | conditions,
        }
        item = {
            "metadata": {"labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [
                {"name": "http", "port": worker["port"]},
                {"name": "transfer", "port": worker["transfer_port"]},
            ],
            "endpoints": [endpoint],
        }
        self.put("endpointslices", f"{worker['pod']}-slice", item)

    def _log(self, kind: str, event: str, item: dict[str, Any]) -> None:
        self.log[kind].append((self.version, {"type": event, "object": item}))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Serving

    def _handler(self, kind: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
                return web.json_response({"message": "Unauthorized"}, status=401)
            if request.query.get("watch") == "true":
                return await self._watch(kind, request)
            self.lists += 1
            items = [item for item in self.items[kind].values() if _selected(item, request)]
            return web.json_response(
                {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items}
            )

        return handle

    async def _watch(self, kind: str, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        while True:
            if seen < self.oldest:
                error = {"kind": "Status", "code": 410, "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
                return response
            changed = self._changed
            for version, event in self.log[kind]:
                if version > seen and _selected(event["object"], request):
                    await response.write(json.dumps(event).encode() + b"\n")
            seen = max([seen, *(version for version, _ in self.log[kind])])
            await changed.wait()


def _selected(item: dict[str, Any], request: web.Request) -> bool:
    """Field and label selectors, as far as the router uses them."""
    metadata = item["metadata"]
    field = request.query.get("fieldSelector", "")
    if field and field != f"metadata.name={metadata['name']}":
        return False
    label = request.query.get("labelSelector", "")
    if not label:
        return True
    key, _, values = label.partition(" in ")
    return (metadata.get("labels") or {}).get(key) in values.strip("()").split(",")
