"""Discovery from Kubernetes: the routing ConfigMap and the EndpointSlices of both pools.

Lists, then watches from the listed resourceVersion; lists again on 410 and after any error, with
backoff. While the API server is away the last snapshot stays. Only the raw ApiClient is used: the
generated API classes would take over 100 MiB.
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from pydantic import ValidationError

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit_router.snapshot import Address, Publish, Snapshot, addresses_of_slices

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 10
WATCH_SECONDS = 240  # the server ends a watch after this long; a new one follows
SILENT_SECONDS = 300  # no byte for longer: the connection is dead
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 15.0
Json = dict[str, Any]


class WatchError(Exception):
    """A list or watch failed; it is tried again."""


async def new_client() -> ApiClient:
    """A client from $KUBECONFIG if that is set, else from the pod's service account.

    Raises `WatchError` with one sentence when neither is there.
    """
    configuration = Configuration()
    try:
        if os.environ.get("KUBECONFIG"):
            await config.load_kube_config(client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise WatchError(
            f"There is no Kubernetes to watch ({error}); set KUBECONFIG or pass --routing-file."
        ) from error
    return ApiClient(configuration)


class KubernetesWatch:
    """Watches what one object's router needs."""

    def __init__(self, client: ApiClient, *, namespace: str, name: str, draw: random.Random) -> None:
        self._client = client
        self._namespace = namespace
        self._draw = draw
        self._routing_name = names.routing_name(name)
        self._pools = {names.pool_name(name, pool): pool for pool in Pool}
        self._table: RoutingTable | None = None
        self._table_uid = ""
        self._slices: dict[str, Json] = {}
        self._publish: Publish = lambda _: None
        self._last: Snapshot | None = None

    async def run(self, publish: Publish) -> None:
        """Publish snapshots until cancelled."""
        self._publish = publish
        table_path = f"/api/v1/namespaces/{self._namespace}/configmaps"
        slices_path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        services = ",".join(self._pools)
        try:
            await asyncio.gather(
                self._forever(
                    table_path, {"fieldSelector": f"metadata.name={self._routing_name}"}, self._take_maps
                ),
                self._forever(
                    slices_path,
                    {"labelSelector": f"kubernetes.io/service-name in ({services})"},
                    self._take_slices,
                ),
            )
        finally:
            await self._client.close()

    async def _forever(
        self, path: str, selector: dict[str, str], take: Callable[[dict[str, Json]], None]
    ) -> None:
        failures = 0
        while True:
            try:
                items, version = await self._list(path, selector)
                take(items)
                failures = 0
                await self._watch(path, selector, items, version, take)
            except (WatchError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
                failures += 1
                wait_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), LONGEST_BACKOFF_S)
                log = logger.warning if failures > 1 else logger.info
                log("%s cannot be watched, trying again: %s", path, error or type(error).__name__)
                await asyncio.sleep(wait_s * self._draw.uniform(0.5, 1.0))

    async def _list(self, path: str, selector: dict[str, str]) -> tuple[dict[str, Json], str]:
        response = await self._get(path, selector, aiohttp.ClientTimeout(total=LIST_TIMEOUT_S))
        try:
            listed = json.loads(await response.read())
        finally:
            response.release()
        items = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        return items, listed["metadata"]["resourceVersion"]

    async def _watch(
        self,
        path: str,
        selector: dict[str, str],
        items: dict[str, Json],
        version: str,
        take: Callable[[dict[str, Json]], None],
    ) -> None:
        """Follow changes until an error; a watch that ends in time is continued."""
        while True:
            query = selector | {
                "watch": "true",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=LIST_TIMEOUT_S, sock_read=SILENT_SECONDS)
            response = await self._get(path, query, timeout)
            try:
                while line := await response.content.readline():
                    version = self._take_event(json.loads(line), items, version)
                    take(items)
            finally:
                response.close()

    @staticmethod
    def _take_event(event: Json, items: dict[str, Json], version: str) -> str:
        """Apply one event to `items`; the resourceVersion to go on from."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise WatchError(f"{item.get('code')} {item.get('message', '')}")
        metadata = item["metadata"]
        if kind == "DELETED":
            items.pop(metadata["name"], None)
        elif kind in {"ADDED", "MODIFIED"}:
            items[metadata["name"]] = item
        new_version: str = metadata.get("resourceVersion", version)
        return new_version

    async def _get(
        self, path: str, query: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        method, url, headers, _, _ = await self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        call: Awaitable[Any] = self._client.call_api(method, url, headers, _request_timeout=timeout)
        response: aiohttp.ClientResponse = (await call).response
        if response.status != 200:
            text = (await response.content.read(300)).decode("utf-8", "replace")
            response.close()
            raise WatchError(f"status {response.status}: {text}")
        return response

    def _take_maps(self, items: dict[str, Json]) -> None:
        item = items.get(self._routing_name)
        text = (item.get("data") or {}).get(names.ROUTING_KEY) if item else None
        if item is None or text is None:
            return  # deleted: the last table stays
        try:
            table = RoutingTable.model_validate_json(text)
        except ValidationError as error:
            logger.warning("the routing table in ConfigMap %s cannot be read: %s", self._routing_name, error)
            return
        uid = item["metadata"].get("uid", "")
        if self._table is not None and uid == self._table_uid and table.version < self._table.version:
            return  # an older copy, from an API server that lags behind
        self._table, self._table_uid = table, uid
        self._changed()

    def _take_slices(self, items: dict[str, Json]) -> None:
        self._slices = items
        self._changed()

    def _changed(self) -> None:
        addresses: tuple[Address, ...] = addresses_of_slices(self._slices.values(), self._pools)
        snapshot = Snapshot(self._table, addresses)
        if snapshot != self._last:
            self._last = snapshot
            self._publish(snapshot)
