"""From objects of the API server to what the operator keeps of them, and one object's snapshot.

Only the fields that a decision, a comparison or the status uses are kept. The mappings given to
`ClusterState` are filled by the watches; what the operator itself wrote counts at once, until the
watch has caught up with it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.cluster.diff import Fields, owned_fields, owned_part
from phasesplit.cluster.kinds import Kind

Key = tuple[str, str]  # namespace, name of the user's object
_MANAGERS = (names.FIELD_MANAGER, names.SCALER_FIELD_MANAGER)
# Far longer than a watch lags; short, in case somebody else deletes what was just written.
_OWN_WRITES_KEPT_S = 5.0


@dataclass(frozen=True)
class ModelView:
    """The user's object."""

    namespace: str
    name: str
    uid: str
    generation: int
    version: int
    spec: Manifest
    status: Manifest = field(default_factory=dict)
    deleting: bool = False

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "ModelView":
        """From the whole object."""
        metadata = body["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            version=resource_version(metadata),
            spec=dict(body.get("spec") or {}),
            status=dict(body.get("status") or {}),
            deleting="deletionTimestamp" in metadata,
        )


@dataclass(frozen=True)
class Child:
    """An object that belongs to the user's object. `body` lacks managedFields; `fields` has ours."""

    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    body: Manifest
    fields: Mapping[str, Fields]
    owner_uid: str | None = None  # of the controller
    owner: str | None = None  # "Kind name" of the controller
    deleting: bool = False

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "Child":
        """From the whole object."""
        metadata = dict(body["metadata"])
        managed = metadata.pop("managedFields", ())
        controllers = [ref for ref in metadata.get("ownerReferences", ()) if ref.get("controller")]
        controller = controllers[0] if controllers else None
        return cls(
            kind=body["kind"],
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            version=resource_version(metadata),
            body={**body, "metadata": metadata},
            fields={manager: owned_fields(managed, manager) for manager in _MANAGERS},
            owner_uid=controller["uid"] if controller else None,
            owner=f"{controller['kind']} {controller['name']}" if controller else None,
            deleting="deletionTimestamp" in metadata,
        )

    def owned(self, manager: str = names.FIELD_MANAGER) -> Manifest:
        """The part that a manager of ours has set."""
        return owned_part(self.body, self.fields.get(manager, {}))


def project_pod(body: Mapping[str, Any]) -> Manifest:
    """A pod, in its own shape, without what nobody here reads."""
    metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    return {
        "metadata": _only(
            metadata,
            "name",
            "namespace",
            "uid",
            "labels",
            "annotations",
            "deletionTimestamp",
            "creationTimestamp",
        ),
        "spec": {
            **_only(spec, "nodeName", "nodeSelector", "schedulingGates", "overhead"),
            "containers": [_only(container, "name", "resources") for container in spec.get("containers", ())],
            "initContainers": [
                _only(container, "name", "resources", "restartPolicy")
                for container in spec.get("initContainers", ())
            ],
            "volumes": [
                _only(volume, "name", "persistentVolumeClaim")
                for volume in spec.get("volumes", ())
                if "persistentVolumeClaim" in volume
            ],
        },
        "status": _only(status, "phase", "reason", "message", "podIP", "conditions", "containerStatuses"),
    }


def project_node(body: Mapping[str, Any]) -> Manifest:
    """A node, in its own shape; heartbeats are left out, so that equal means unchanged."""
    metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    conditions = [
        _only(condition, "type", "status")
        for condition in status.get("conditions", ())
        if condition.get("type") == "Ready"
    ]
    return {
        "metadata": _only(metadata, "name", "labels", "deletionTimestamp"),
        "spec": _only(spec, "taints", "unschedulable"),
        "status": {**_only(status, "allocatable"), "conditions": conditions},
    }


def owner_key(body: Mapping[str, Any]) -> Key | None:
    """The user's object that a labelled child or pod belongs to."""
    metadata = body["metadata"]
    model = (metadata.get("labels") or {}).get(names.LABEL_MODEL)
    return (metadata["namespace"], model) if model and metadata.get("namespace") else None


def resource_version(metadata: Mapping[str, Any]) -> int:
    """Resource versions of one kind are ordered numbers."""
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True)
class Snapshot:
    """Everything known about one object at one moment."""

    model: ModelView
    children: Mapping[tuple[str, str], Child]  # by kind and name
    pods: tuple[Manifest, ...]
    nodes: tuple[Manifest, ...]

    def child(self, kind: Kind, name: str) -> Child | None:
        """One child."""
        return self.children.get((kind.kind, name))

    def children_of(self, kind: Kind) -> tuple[Child, ...]:
        """All children of a kind."""
        return tuple(child for (of, _), child in self.children.items() if of == kind.kind)

    def worker_pods(self, pool: Pool | None = None) -> tuple[Manifest, ...]:
        """Worker pods, in the order of their names."""
        found = [
            pod
            for pod in self.pods
            if _label(pod, names.LABEL_COMPONENT) == Component.WORKER
            and (pool is None or _label(pod, names.LABEL_POOL) == pool)
        ]
        return tuple(sorted(found, key=lambda pod: str(pod["metadata"]["name"])))

    def router_pods(self) -> tuple[Manifest, ...]:
        """Router pods."""
        return tuple(pod for pod in self.pods if _label(pod, names.LABEL_COMPONENT) == Component.ROUTER)


class ClusterState:
    """What the watches know, corrected by what was just written."""

    def __init__(
        self,
        *,
        models: Mapping[Key, Iterable[ModelView]],
        children: Mapping[Key, Iterable[Child]],
        pods: Mapping[Key, Iterable[Manifest]],
        nodes: Mapping[str, Iterable[Manifest]],
        monotonic: Callable[[], float],
    ) -> None:
        self._models = models
        self._children = children
        self._pods = pods
        self._nodes = nodes
        self._monotonic = monotonic
        self._written: dict[tuple[Key, str, str], tuple[float, Child | None, int]] = {}
        self._statuses: dict[Key, tuple[float, int, Manifest]] = {}

    def all_keys(self) -> tuple[Key, ...]:
        """All objects that exist."""
        return tuple(self._models)

    def model(self, key: Key) -> ModelView | None:
        """One object, with the status that was last written."""
        model = next(iter(self._models.get(key, ())), None)
        written = self._statuses.get(key)
        if model is None or written is None:
            return model
        at_s, version, status = written
        if model.version >= version or self._monotonic() - at_s > _OWN_WRITES_KEPT_S:
            del self._statuses[key]
            return model
        return ModelView(**{**model.__dict__, "status": status})

    def snapshot(self, model: ModelView) -> Snapshot:
        """Everything about one object."""
        key = model.key
        children = {(child.kind, child.name): child for child in self._children.get(key, ())}
        for of, kind, name in [written for written in self._written if written[0] == key]:
            child = self._effective((of, kind, name), children.get((kind, name)))
            if child is not None:
                children[kind, name] = child
            else:
                children.pop((kind, name), None)
        return Snapshot(model, children, tuple(self._pods.get(key, ())), self.nodes())

    def _effective(self, which: tuple[Key, str, str], seen: Child | None) -> Child | None:
        """What was written, until the watch shows that or something newer."""
        at_s, written, version = self._written[which]
        if written is None:
            caught_up = seen is None or seen.version > version
        else:
            caught_up = seen is not None and seen.version >= version
        if caught_up or self._monotonic() - at_s > _OWN_WRITES_KEPT_S:
            del self._written[which]
            return seen
        return written

    def nodes(self) -> tuple[Manifest, ...]:
        """All nodes, by name."""
        return tuple(next(iter(self._nodes[name])) for name in sorted(self._nodes))

    def all_pods(self) -> tuple[Manifest, ...]:
        """Pods of all our objects."""
        return tuple(pod for pods in self._pods.values() for pod in pods)

    def wrote_child(self, key: Key, body: Manifest) -> Child:
        """Remember what an apply returned."""
        child = Child.from_body(body)
        self._written[key, child.kind, child.name] = (self._monotonic(), child, child.version)
        return child

    def deleted_child(self, key: Key, child: Child) -> None:
        """Remember that a child was deleted."""
        self._written[key, child.kind, child.name] = (self._monotonic(), None, child.version)

    def wrote_status(self, key: Key, body: Manifest) -> None:
        """Remember what a status write returned."""
        status = dict(body.get("status") or {})
        self._statuses[key] = (self._monotonic(), resource_version(body["metadata"]), status)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._statuses.pop(key, None)
        for written in [written for written in self._written if written[0] == key]:
            del self._written[written]


def _label(pod: Manifest, label: str) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(label)


def _only(source: Mapping[str, Any], *keys: str) -> Manifest:
    return {key: source[key] for key in keys if key in source}
