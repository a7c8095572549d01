"""Objects, pods and values as the operator sees them, for unit tests of its pure parts."""

from typing import Any

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.cluster.snapshot import Child, ModelView

UID = "uid-chat"


def make_pod(
    name: str,
    *,
    pool: Pool | None = None,
    ready: bool = False,
    node: str | None = None,
    annotations: dict[str, str] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A worker pod (with a pool) or a router pod, in the shape that the watches keep."""
    labels = {
        names.LABEL_MODEL: "chat",
        names.LABEL_COMPONENT: str(Component.WORKER if pool else Component.ROUTER),
    }
    if pool is not None:
        labels[names.LABEL_POOL] = str(pool)
    spec: dict[str, Any] = {"containers": []}
    if node is not None:
        spec["nodeName"] = node
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}, *status.pop("conditions", [])]
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "labels": labels,
            "annotations": annotations or {},
        },
        "spec": spec,
        "status": {"phase": "Running", "conditions": conditions, **status},
    }


def make_model(spec: dict[str, Any] | None = None, **changes: Any) -> ModelView:
    """The user's object."""
    known: dict[str, Any] = {
        "namespace": "ns",
        "name": "chat",
        "uid": UID,
        "generation": 1,
        "version": 1,
        "spec": spec or {"model": {"source": {"path": "/models/m"}}},
    }
    return ModelView(**{**known, **changes})


def make_child(kind: str, name: str, *, version: int = 1, owner: str | None = UID, **body: Any) -> Child:
    """A child as it comes from the API server."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{kind}-{name}",
        "resourceVersion": str(version),
        "labels": {names.LABEL_MODEL: "chat"},
        **body.pop("metadata", {}),
    }
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": names.KIND, "name": "chat", "uid": owner, "controller": True}]
    return Child.from_body({"apiVersion": "v1", "kind": kind, "metadata": metadata, **body})
