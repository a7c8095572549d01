"""Composition of the running operator: who gets what, and who runs when."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp
import kopf

from phasesplit.api import names
from phasesplit.api.crd import ANNOTATION_SCHEMA_VERSION, CRD_NAME, SCHEMA_VERSION
from phasesplit.cluster.client import Cluster, connect
from phasesplit.cluster.errors import ClusterError, ForbiddenError, NotFoundError
from phasesplit.cluster.events import EventWriter
from phasesplit.cluster.kinds import CUSTOM_RESOURCE_DEFINITION, MODEL, RUNTIME_CLASS
from phasesplit.cluster.lease import LeaseKeeper, LeaseSettings
from phasesplit.cluster.router_client import RouterClient
from phasesplit.cluster.scrape_targets import build_targets
from phasesplit.cluster.snapshot import ClusterState
from phasesplit.cluster.usage import OtherPods
from phasesplit.cluster.volumes import VolumeReader
from phasesplit.cluster.worker_admin import WorkerAdmin
from phasesplit.operator import instruments
from phasesplit.operator.children import ChildrenWriter
from phasesplit.operator.health_server import serve_waiting
from phasesplit.operator.memory import Memories
from phasesplit.operator.metrics_server import serve_metrics
from phasesplit.operator.placing import Placer
from phasesplit.operator.pods import PodActor
from phasesplit.operator.prober import Prober
from phasesplit.operator.queue import Key, WorkQueue
from phasesplit.operator.reconcile import Collaborators, Reconciler
from phasesplit.operator.registry import (
    INDEX_CHILDREN,
    INDEX_MODELS,
    INDEX_NODES,
    INDEX_PODS,
    build_registry,
)
from phasesplit.operator.replays import ReplayRunner
from phasesplit.operator.report import Reporter
from phasesplit.operator.secrets import SecretReader
from phasesplit.operator.settings import OperatorSettings
from phasesplit.operator.tick import MetricsTick
from phasesplit.operator.traffic_reader import TrafficReader
from phasesplit.resources.pods import NVIDIA_RUNTIME_CLASS

logger = logging.getLogger(__name__)

# A burst of events of one object (a StatefulSet and its pods) becomes one pass.
_DEBOUNCE_S = 0.1
_CRD_POLL_S = 3.0


class Operator:
    """One running copy."""

    def __init__(
        self,
        settings: OperatorSettings,
        cluster: Cluster,
        session: aiohttp.ClientSession,
        *,
        has_nvidia_runtime_class: bool,
    ) -> None:
        self._has_nvidia_runtime_class = has_nvidia_runtime_class
        self._settings = settings
        self._cluster = cluster
        self._session = session
        self._queue: WorkQueue | None = None
        self._state: ClusterState | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._replays: ReplayRunner | None = None
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop, or until a part fails."""
        registry = build_registry(self._wake, self._wake_all, self._start, self._end, self._stale_s)
        port = self._settings.health_port
        namespace = self._settings.watch_namespace
        try:
            async with serve_metrics(self._settings.metrics_port, self._targets):
                await kopf.operator(
                    registry=registry,
                    standalone=True,
                    clusterwide=namespace is None,
                    namespaces=[namespace] if namespace is not None else [],
                    liveness_endpoint=f"http://0.0.0.0:{port}/healthz" if port else None,
                    stop_flag=self.stop,
                )
        finally:
            await self._end()

    async def _end(self) -> None:
        """End what was started; again is fine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._replays is not None:
            await self._replays.close()

    def _start(self, indexes: Mapping[str, Any]) -> None:
        """Called by kopf before it watches: the indexes exist, and are filled before any wake-up."""
        state = ClusterState(
            models=indexes[INDEX_MODELS],
            children=indexes[INDEX_CHILDREN],
            pods=indexes[INDEX_PODS],
            nodes=indexes[INDEX_NODES],
            monotonic=time.monotonic,
        )
        self._state = state
        memories = Memories()
        secrets = SecretReader(self._cluster, time.monotonic)
        tick = MetricsTick(state, memories, secrets, self._settings, time.monotonic)
        routers = RouterClient(self._session)
        prober = Prober(routers, WorkerAdmin(self._session), self._wake, time.time)
        self._replays = ReplayRunner(self._wake)
        reconciler = Reconciler(
            Collaborators(
                state=state,
                children=ChildrenWriter(self._cluster, state),
                pods=PodActor(self._cluster, time.monotonic),
                reporter=Reporter(self._cluster, state, EventWriter(self._cluster, identity()), time.time),
                secrets=secrets,
                prober=prober,
                traffic=TrafficReader(routers, time.time),
                replays=self._replays,
                others=OtherPods(self._cluster, self._settings.watch_namespace, time.monotonic),
                volumes=VolumeReader(self._cluster, state.nodes, time.monotonic),
                memories=memories,
                placer=Placer(),
                metrics=tick.state_of,
                wall_clock=time.time,
            ),
            self._settings,
            self._settings.images(operator_version()),
            has_nvidia_runtime_class=self._has_nvidia_runtime_class,
        )
        self._queue = WorkQueue(instruments.measured(reconciler.process), time.monotonic)
        instruments.OBJECTS.set_function(lambda: len(state.all_keys()))
        self._tasks = [
            asyncio.create_task(self._guard(self._queue.run(self._settings.workers)), name="work queue"),
            asyncio.create_task(self._guard(tick.run(self._queue)), name="metrics tick"),
        ]

    async def _guard(self, work: Any) -> None:
        """A part that ends takes the whole operator with it: Kubernetes starts it anew."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a part of the operator failed")
            raise
        finally:
            self.stop.set()

    def _targets(self) -> list[dict[str, Any]]:
        return build_targets(self._state.all_pods()) if self._state is not None else []

    def _wake(self, key: Key) -> None:
        if self._queue is not None:
            self._queue.add(key, _DEBOUNCE_S)

    def _wake_all(self) -> None:
        if self._queue is not None and self._state is not None:
            for key in self._state.all_keys():
                self._queue.add(key, _DEBOUNCE_S)

    def _stale_s(self) -> float | None:
        if self._queue is None:
            return None
        age_s = time.monotonic() - self._queue.last_progress_s
        return age_s if age_s > self._settings.stale_seconds else None


async def run(settings: OperatorSettings) -> None:
    """Wait for the CRD and the Lease, then serve."""
    api = await connect()
    lease = LeaseKeeper(
        Cluster(api),
        LeaseSettings(
            settings.namespace,
            settings.lease_name,
            identity(),
            duration_s=settings.lease_seconds,
            renew_s=settings.lease_seconds / 6,
            attempt_s=settings.lease_seconds / 4,
        ),
        time.monotonic,
    )
    cluster = Cluster(api, lease.is_held)
    try:
        async with serve_waiting(settings.health_port):
            await _wait_for_crd(cluster, settings.watch_namespace)
            await _tell_about_old_crd(cluster)
            await lease.acquire()
        async with aiohttp.ClientSession() as session:
            nvidia = await _has_nvidia_runtime_class(cluster)
            operator = Operator(settings, cluster, session, has_nvidia_runtime_class=nvidia)

            async def lost() -> None:
                operator.stop.set()

            keeping = asyncio.create_task(lease.keep(lost), name="lease")
            try:
                await operator.run()
            finally:
                keeping.cancel()
                await lease.release()
    finally:
        await cluster.close()


def identity() -> str:
    """Name of this copy: the pod's, else the host's, always with the process id."""
    return f"{os.environ.get('POD_ID') or socket.gethostname()}-{os.getpid()}"


def operator_version() -> str:
    """Version of this program."""
    try:
        return version(names.PART_OF)
    except PackageNotFoundError:
        return "0.0.0"


async def _wait_for_crd(cluster: Cluster, namespace: str | None) -> None:
    told = False
    while True:
        try:
            async for _ in cluster.list(MODEL, namespace):
                break
        except NotFoundError:
            if not told:
                logger.warning("waiting: the CustomResourceDefinition %s is not installed", names.KIND)
                told = True
        except ForbiddenError:
            return  # a namespaced install may not list all namespaces, and kopf will say what it lacks
        except ClusterError as error:
            logger.warning("%s", error)
        else:
            return
        await asyncio.sleep(_CRD_POLL_S)


async def _tell_about_old_crd(cluster: Cluster) -> None:
    """Helm never upgrades what lies in `crds/`: an older CRD drops fields without a word."""
    try:
        found = await cluster.find(CUSTOM_RESOURCE_DEFINITION, None, CRD_NAME)
    except ClusterError as error:
        logger.info("%s", error)
        return
    annotations = ((found or {}).get("metadata") or {}).get("annotations") or {}
    version = str(annotations.get(ANNOTATION_SCHEMA_VERSION, "0"))
    if found is not None and (not version.isdigit() or int(version) < SCHEMA_VERSION):
        logger.warning(
            "the CustomResourceDefinition %s is of schema version %s, this operator knows %d: "
            "newer fields are dropped until it is applied again",
            CRD_NAME,
            version,
            SCHEMA_VERSION,
        )


async def _has_nvidia_runtime_class(cluster: Cluster) -> bool:
    try:
        return await cluster.find(RUNTIME_CLASS, None, NVIDIA_RUNTIME_CLASS) is not None
    except ClusterError as error:
        logger.info("%s; pods get no runtime class", error)
        return False
