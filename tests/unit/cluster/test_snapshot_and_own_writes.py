"""What was just written counts until the watch has caught up; watched objects are kept small."""

from typing import Any

from helpers_operator import UID, make_child, make_model, make_pod
from phasesplit.api.names import Pool
from phasesplit.cluster.kinds import CONFIG_MAP, STATEFUL_SET
from phasesplit.cluster.snapshot import Child, ClusterState, ModelView, owner_key, project_node, project_pod

KEY = ("ns", "chat")


class Watched:
    """The watches' side, filled by hand."""

    def __init__(self) -> None:
        self.models: dict[Any, list[ModelView]] = {KEY: [make_model()]}
        self.children: dict[Any, list[Child]] = {}
        self.pods: dict[Any, list[dict[str, Any]]] = {}
        self.now_s = 0.0
        self.state = ClusterState(
            models=self.models,
            children=self.children,
            pods=self.pods,
            nodes={},
            monotonic=lambda: self.now_s,
        )

    def config_map(self) -> Child | None:
        return self.state.snapshot(self.models[KEY][0]).child(CONFIG_MAP, "chat-routing")


def body(version: int) -> dict[str, Any]:
    metadata = {"name": "chat-routing", "namespace": "ns", "uid": "u", "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"v": str(version)}}


def test_a_write_counts_before_the_watch_shows_it() -> None:
    watched = Watched()
    watched.state.wrote_child(KEY, body(5))
    found = watched.config_map()
    assert found is not None and found.version == 5


def test_the_watch_wins_once_it_has_caught_up() -> None:
    watched = Watched()
    watched.state.wrote_child(KEY, body(5))
    watched.children[KEY] = [make_child("ConfigMap", "chat-routing", version=4)]
    assert watched.config_map().version == 5  # type: ignore[union-attr]
    watched.children[KEY] = [make_child("ConfigMap", "chat-routing", version=6)]
    assert watched.config_map().version == 6  # type: ignore[union-attr]
    watched.children[KEY] = []
    assert watched.config_map() is None


def test_what_was_written_and_then_vanished_is_noticed_after_seconds() -> None:
    watched = Watched()
    watched.state.wrote_child(KEY, body(5))
    watched.now_s = 6
    assert watched.config_map() is None


def test_a_deletion_counts_before_the_watch_shows_it() -> None:
    watched = Watched()
    child = make_child("ConfigMap", "chat-routing", version=4)
    watched.children[KEY] = [child]
    watched.state.deleted_child(KEY, child)
    assert watched.config_map() is None
    watched.children[KEY] = [make_child("ConfigMap", "chat-routing", version=9)]
    assert watched.config_map() is not None


def test_a_written_status_counts_before_the_watch_shows_it() -> None:
    watched = Watched()
    written = {"metadata": {"resourceVersion": "3"}, "status": {"mode": "Split"}}
    watched.state.wrote_status(KEY, written)
    assert watched.state.model(KEY).status == {"mode": "Split"}  # type: ignore[union-attr]
    watched.models[KEY] = [make_model(version=4, status={"mode": "Colocated"})]
    assert watched.state.model(KEY).status == {"mode": "Colocated"}  # type: ignore[union-attr]


def test_pods_are_found_by_component_and_pool() -> None:
    watched = Watched()
    watched.pods[KEY] = [
        make_pod("chat-router-x"),
        make_pod("chat-prefill-1", pool=Pool.PREFILL),
        make_pod("chat-prefill-0", pool=Pool.PREFILL),
        make_pod("chat-decode-0", pool=Pool.DECODE),
    ]
    snapshot = watched.state.snapshot(watched.models[KEY][0])
    names = [pod["metadata"]["name"] for pod in snapshot.worker_pods()]
    assert names == ["chat-decode-0", "chat-prefill-0", "chat-prefill-1"]
    assert len(snapshot.worker_pods(Pool.PREFILL)) == 2
    assert len(snapshot.router_pods()) == 1
    assert snapshot.child(STATEFUL_SET, "chat-prefill") is None


def test_a_child_keeps_our_fields_and_drops_all_others() -> None:
    managed = [
        {"manager": "phasesplit", "operation": "Apply", "fieldsV1": {"f:data": {}}},
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:x": {}}},
    ]
    child = make_child("ConfigMap", "c", metadata={"managedFields": managed}, data={"a": "b"})
    assert "managedFields" not in child.body["metadata"]
    assert child.fields["phasesplit"] == {"f:data": {}}
    assert (child.owner_uid, child.owner) == (UID, "DisaggregatedModel chat")
    assert child.owned()["data"] == {"a": "b"}


def test_a_heartbeat_of_a_node_is_no_change() -> None:
    node = {
        "metadata": {"name": "n", "labels": {"a": "b"}, "resourceVersion": "1"},
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {
            "allocatable": {"cpu": "2"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "1"}],
        },
    }
    later = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}}
    later["status"] = {
        "allocatable": {"cpu": "2"},
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2"}],
    }
    assert project_node(node) == project_node(later)


def test_a_pod_keeps_what_decisions_use() -> None:
    pod = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "managedFields": [1]},
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "c", "image": "i", "env": [], "resources": {"requests": {"cpu": "1"}}}],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "m", "persistentVolumeClaim": {"claimName": "x"}},
            ],
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1", "qosClass": "Burstable"},
    }
    kept = project_pod(pod)
    assert kept["metadata"] == {"name": "p", "namespace": "ns", "uid": "u"}
    assert kept["spec"]["containers"] == [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]
    assert [volume["name"] for volume in kept["spec"]["volumes"]] == ["m"]
    assert kept["status"] == {"phase": "Running", "podIP": "10.0.0.1"}


def test_the_owner_is_named_by_the_label() -> None:
    assert owner_key(make_pod("chat-router-x")) == KEY
    assert owner_key({"metadata": {"name": "x", "namespace": "ns"}}) is None
