"""kopf's part: it watches, fills the indexes, and wakes keys of the work queue. Nothing else.

Only `on.event` and `index` are used: kopf then writes nothing to the objects it watches, no finalizer
and no annotation. Selectors are applied by the API server, lists are read in chunks.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.kinds import CHILD_KINDS, MODEL, NODE, POD, Kind
from phasesplit.cluster.snapshot import Child, Key, ModelView, owner_key, project_node, project_pod

logger = logging.getLogger(__name__)

INDEX_MODELS = "models"
INDEX_CHILDREN = "children"
INDEX_PODS = "pods"
INDEX_NODES = "nodes"
_INDEXES = (INDEX_MODELS, INDEX_CHILDREN, INDEX_PODS, INDEX_NODES)

# Just above the server's own timeout, so that a connection that died silently is noticed.
_WATCH_SERVER_TIMEOUT_S = 300
_WATCH_CLIENT_TIMEOUT_S = 310
_CHUNK = 500


class NoMemory(kopf.DiffBaseStorage):
    """Remembers nothing of an object's former state: no handler here asks what has changed.

    kopf's own storage copies every object of every event for that question.
    """

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        """Nothing of the object is of interest."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Nothing is known."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing."""


def build_registry(
    wake: Callable[[Key], None],
    wake_all: Callable[[], None],
    on_startup: Callable[[Mapping[str, Any]], None],
    on_cleanup: Callable[[], Awaitable[None]],
    stale_s: Callable[[], float | None],
) -> kopf.OperatorRegistry:
    """All handlers. `stale_s` says for how long the loop has not moved, None while it does."""
    registry = kopf.OperatorRegistry()
    _register_activities(registry, on_startup, on_cleanup, stale_s)
    _register_models(registry, wake)
    for kind in CHILD_KINDS:
        _register_children(registry, kind, wake)
    _register_pods(registry, wake)
    _register_nodes(registry, wake_all)
    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    """Timeouts, selectors and silence, see the comments."""
    settings.posting.enabled = False  # events are written by us, on transitions only
    settings.scanning.disabled = True  # no rights on namespaces needed; the CRD is waited for before
    settings.watching.server_timeout = _WATCH_SERVER_TIMEOUT_S
    settings.watching.client_timeout = _WATCH_CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = _CHUNK
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.queueing.worker_limit = 50
    settings.process.ultimate_exiting_timeout = 20
    # Never written, because no handler that writes them is registered; ours all the same.
    settings.persistence.finalizer = f"{names.GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = NoMemory()
    for kind in (*CHILD_KINDS, POD):
        settings.watching.label_selectors[_selector(kind)] = names.LABEL_MODEL


def _register_activities(
    registry: kopf.OperatorRegistry,
    on_startup: Callable[[Mapping[str, Any]], None],
    on_cleanup: Callable[[], Awaitable[None]],
    stale_s: Callable[[], float | None],
) -> None:
    @kopf.on.login(registry=registry, id="login")
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry, id="startup")
    async def startup(*, settings: kopf.OperatorSettings, **indexes: Any) -> None:
        configure(settings)
        on_startup({name: indexes[name] for name in _INDEXES})

    @kopf.on.cleanup(registry=registry, id="cleanup")
    async def cleanup(**_: Any) -> None:
        # kopf would wait seconds for our tasks to end by themselves.
        await on_cleanup()

    @kopf.on.probe(registry=registry, id="loop")
    async def probe(**_: Any) -> str:
        stale = stale_s()
        if stale is not None:
            # Anything but a PermanentError would make kopf retry while the probe hangs.
            raise kopf.PermanentError(f"the work queue has not moved for {stale:.0f} s")
        return "ok"


def _register_models(registry: kopf.OperatorRegistry, wake: Callable[[Key], None]) -> None:
    @kopf.index(*_selector(MODEL), registry=registry, id=INDEX_MODELS)
    async def index_model(body: kopf.Body, **_: Any) -> dict[Key, ModelView]:
        model = ModelView.from_body(body)
        return {model.key: model}

    @kopf.on.event(*_selector(MODEL), registry=registry, id="wake-model")
    async def wake_model(*, namespace: str | None, name: str, **_: Any) -> None:
        wake((namespace or "", name))


def _register_children(registry: kopf.OperatorRegistry, kind: Kind, wake: Callable[[Key], None]) -> None:
    @kopf.index(*_selector(kind), registry=registry, id=INDEX_CHILDREN)
    async def index_child(body: kopf.Body, **_: Any) -> dict[Key, Child]:
        key = owner_key(body)
        # Items of a list lack kind and version.
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        return {key: Child.from_body(whole)} if key is not None else {}

    @kopf.on.event(*_selector(kind), registry=registry, id=f"wake-{kind.plural}")
    async def wake_owner(body: kopf.Body, **_: Any) -> None:
        _wake_owner(body, wake)


def _register_pods(registry: kopf.OperatorRegistry, wake: Callable[[Key], None]) -> None:
    @kopf.index(*_selector(POD), registry=registry, id=INDEX_PODS)
    async def index_pod(body: kopf.Body, **_: Any) -> dict[Key, Manifest]:
        key = owner_key(body)
        return {key: project_pod(body)} if key is not None else {}

    @kopf.on.event(*_selector(POD), registry=registry, id="wake-pods")
    async def wake_owner(body: kopf.Body, **_: Any) -> None:
        _wake_owner(body, wake)


def _register_nodes(registry: kopf.OperatorRegistry, wake_all: Callable[[], None]) -> None:
    known: dict[str, Manifest] = {}

    @kopf.index(*_selector(NODE), registry=registry, id=INDEX_NODES)
    async def index_node(body: kopf.Body, name: str, **_: Any) -> dict[str, Manifest]:
        return {name: project_node(body)}

    @kopf.on.event(*_selector(NODE), registry=registry, id="wake-nodes")
    async def wake_on_change(body: kopf.Body, name: str, type: str | None, **_: Any) -> None:  # noqa: A002
        # Kubelets report every few seconds; only what decisions use is news.
        node = None if type == "DELETED" else project_node(body)
        if known.get(name) == node:
            return
        if node is None:
            known.pop(name, None)
        else:
            known[name] = node
        wake_all()


def _wake_owner(body: Mapping[str, Any], wake: Callable[[Key], None]) -> None:
    key = owner_key(body)
    if key is not None:
        wake(key)


def _selector(kind: Kind) -> tuple[str, str, str]:
    return kind.group, kind.version, kind.plural
