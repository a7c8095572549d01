"""What "differs" means: one row per kind of difference, and per kind of equality."""

from typing import Any

import pytest

from phasesplit.cluster.diff import Why, first_difference, owned_fields, owned_part


def stateful_set(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "chat-decode", "namespace": "default", "labels": {"a": "b"}},
        "spec": {"serviceName": "chat-decode", **spec},
    }


BASE_FIELDS = {"f:metadata": {"f:labels": {"f:a": {}}}, "f:spec": {"f:serviceName": {}}}


def fields(**spec: Any) -> dict[str, Any]:
    return {"f:metadata": {"f:labels": {"f:a": {}}}, "f:spec": {"f:serviceName": {}, **spec}}


CONTAINER_FIELDS = {
    "f:containers": {
        'k:{"name":"worker"}': {
            ".": {},
            "f:name": {},
            "f:image": {},
            "f:args": {},
            "f:resources": {"f:requests": {"f:cpu": {}, "f:memory": {}}},
            "f:env": {'k:{"name":"POD_NAME"}': {".": {}, "f:name": {}, "f:valueFrom": {"f:fieldRef": {}}}},
            "f:ports": {
                'k:{"containerPort":8000,"protocol":"TCP"}': {".": {}, "f:containerPort": {}, "f:name": {}}
            },
        }
    }
}


def container(**changes: Any) -> dict[str, Any]:
    return {
        "name": "worker",
        "image": "w:1",
        "args": ["--port", "8000"],
        "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}},
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"containerPort": 8000, "name": "http"}],
        **changes,
    }


def live_container(**changes: Any) -> dict[str, Any]:
    """The same container as the API server returns it."""
    stored = container(
        resources={"requests": {"cpu": "1", "memory": "1Gi"}},
        env=[
            {
                "name": "POD_NAME",
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
            }
        ],
        ports=[{"containerPort": 8000, "name": "http", "protocol": "TCP"}],
        terminationMessagePath="/dev/termination-log",
        imagePullPolicy="IfNotPresent",
    )
    return {**stored, **changes}


EQUAL = {
    "identical": (stateful_set(), stateful_set(), BASE_FIELDS),
    "server defaults beside ours": (
        stateful_set(),
        stateful_set(revisionHistoryLimit=10, podManagementPolicy="OrderedReady"),
        BASE_FIELDS,
    ),
    "replicas of another manager": (stateful_set(), stateful_set(replicas=7), BASE_FIELDS),
    "container with quantities, defaults and a default key": (
        stateful_set(containers=[container()]),
        stateful_set(containers=[live_container()]),
        fields(**CONTAINER_FIELDS),
    ),
    "another manager's container": (
        stateful_set(containers=[container()]),
        stateful_set(containers=[{"name": "sidecar", "image": "s"}, live_container()]),
        fields(**CONTAINER_FIELDS),
    ),
    "an empty list that the server leaves out": (
        stateful_set(tolerations=[], nodeSelector={}),
        stateful_set(),
        BASE_FIELDS,
    ),
    "an empty volume": (
        stateful_set(volumes=[{"name": "tmp", "emptyDir": {}}]),
        stateful_set(volumes=[{"name": "tmp", "emptyDir": {}}]),
        fields(**{"f:volumes": {'k:{"name":"tmp"}': {".": {}, "f:name": {}, "f:emptyDir": {}}}}),
    ),
    "claims with what the server adds": (
        stateful_set(
            volumeClaimTemplates=[
                {"metadata": {"name": "cache"}, "spec": {"resources": {"requests": {"storage": "1024Mi"}}}}
            ]
        ),
        stateful_set(
            volumeClaimTemplates=[
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "cache", "creationTimestamp": None},
                    "spec": {"resources": {"requests": {"storage": "1Gi"}}, "volumeMode": "Filesystem"},
                    "status": {"phase": "Pending"},
                }
            ]
        ),
        fields(**{"f:volumeClaimTemplates": {}}),
    ),
    "ports of a policy with the default protocol": (
        stateful_set(ingress=[{"ports": [{"port": 8000}]}]),
        stateful_set(ingress=[{"ports": [{"port": 8000, "protocol": "TCP"}]}]),
        fields(**{"f:ingress": {}}),
    ),
    "items that are owned as a whole": (
        stateful_set(ownerReferences=[{"uid": "1", "name": "chat", "controller": True}]),
        stateful_set(ownerReferences=[{"uid": "1", "name": "chat", "controller": True}]),
        fields(**{"f:ownerReferences": {'k:{"uid":"1"}': {}}}),
    ),
    "a set of values with others' beside": (
        stateful_set(finalizers=["ours"]),
        stateful_set(finalizers=["theirs", "ours"]),
        fields(**{"f:finalizers": {'v:"ours"': {}}}),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_no_difference(name: str) -> None:
    desired, live, owned = EQUAL[name]
    assert first_difference(desired, live, owned) is None


DIFFERENT = {
    "object absent": (stateful_set(), None, {}, "StatefulSet", Why.ABSENT),
    "field absent": (stateful_set(paused=True), stateful_set(), BASE_FIELDS, "spec.paused", Why.ABSENT),
    "other value": (
        stateful_set(paused=True),
        stateful_set(paused=False),
        fields(**{"f:paused": {}}),
        "spec.paused",
        Why.VALUE,
    ),
    "a number is no boolean": (
        stateful_set(paused=1),
        stateful_set(paused=True),
        fields(**{"f:paused": {}}),
        "spec.paused",
        Why.VALUE,
    ),
    "same value, taken over by somebody": (
        stateful_set(paused=True),
        stateful_set(paused=True),
        BASE_FIELDS,
        "spec.paused",
        Why.NOT_OURS,
    ),
    "a field below a parent that is not ours": (
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x"}, "spec": {"replicas": 2}},
        stateful_set(replicas=1),
        {},
        "spec.replicas",
        Why.NOT_OURS,
    ),
    "an item that is owned as a whole": (
        stateful_set(ownerReferences=[{"uid": "1", "controller": True}]),
        stateful_set(ownerReferences=[{"uid": "1", "controller": False}]),
        fields(**{"f:ownerReferences": {'k:{"uid":"1"}': {}}}),
        "spec.ownerReferences[uid=1].controller",
        Why.VALUE,
    ),
    "ours and no longer wanted": (
        stateful_set(),
        stateful_set(replicas=3),
        fields(**{"f:replicas": {}}),
        "spec.replicas",
        Why.UNWANTED,
    ),
    "label no longer wanted": (
        {**stateful_set(), "metadata": {"name": "chat-decode"}},
        stateful_set(),
        BASE_FIELDS,
        "metadata.labels",
        Why.UNWANTED,
    ),
    "image": (
        stateful_set(containers=[container(image="w:2")]),
        stateful_set(containers=[live_container()]),
        fields(**CONTAINER_FIELDS),
        "spec.containers[name=worker].image",
        Why.VALUE,
    ),
    "one argument less": (
        stateful_set(containers=[container(args=["--port"])]),
        stateful_set(containers=[live_container()]),
        fields(**CONTAINER_FIELDS),
        "spec.containers[name=worker].args",
        Why.VALUE,
    ),
    "another quantity": (
        stateful_set(containers=[container(resources={"requests": {"cpu": "2", "memory": "1Gi"}})]),
        stateful_set(containers=[live_container()]),
        fields(**CONTAINER_FIELDS),
        "spec.containers[name=worker].resources.requests.cpu",
        Why.VALUE,
    ),
    "one container more wanted": (
        stateful_set(containers=[container(), {"name": "extra"}]),
        stateful_set(containers=[live_container()]),
        fields(**CONTAINER_FIELDS),
        "spec.containers[name=extra]",
        Why.ABSENT,
    ),
    "a container of ours no longer wanted": (
        stateful_set(containers=[{"name": "extra"}]),
        stateful_set(containers=[live_container(), {"name": "extra"}]),
        fields(
            **{
                "f:containers": {
                    **CONTAINER_FIELDS["f:containers"],
                    'k:{"name":"extra"}': {".": {}, "f:name": {}},
                }
            }
        ),
        "spec.containers[name=worker]",
        Why.UNWANTED,
    ),
    "a node selector's key no longer wanted": (
        stateful_set(nodeSelector={"a": "b"}),
        stateful_set(nodeSelector={"a": "b", "c": "d"}),
        fields(**{"f:nodeSelector": {}}),
        "spec.nodeSelector.c",
        Why.UNWANTED,
    ),
    "a whole map no longer wanted": (
        stateful_set(nodeSelector={}),
        stateful_set(nodeSelector={"a": "b"}),
        fields(**{"f:nodeSelector": {}}),
        "spec.nodeSelector",
        Why.UNWANTED,
    ),
    "a gate to be lifted": (
        stateful_set(),
        stateful_set(schedulingGates=[{"name": "g"}]),
        fields(**{"f:schedulingGates": {'k:{"name":"g"}': {".": {}, "f:name": {}}}}),
        "spec.schedulingGates",
        Why.UNWANTED,
    ),
    "an element of a set": (
        stateful_set(finalizers=[]),
        stateful_set(finalizers=["ours"]),
        fields(**{"f:finalizers": {'v:"ours"': {}}}),
        "spec.finalizers",
        Why.UNWANTED,
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_are_found_and_named(name: str) -> None:
    desired, live, owned, path, why = DIFFERENT[name]
    found = first_difference(desired, live, owned)
    assert found is not None
    assert (found.path, found.why) == (path, why)


def test_owned_fields_are_those_of_the_managers_apply_to_the_main_resource() -> None:
    mine = {"f:spec": {"f:replicas": {}}}
    managed = [
        {"manager": "phasesplit", "operation": "Update", "fieldsV1": {"f:a": {}}},
        {"manager": "phasesplit", "operation": "Apply", "subresource": "status", "fieldsV1": {"f:b": {}}},
        {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:c": {}}},
        {"manager": "phasesplit", "operation": "Apply", "fieldsV1": mine},
    ]
    assert owned_fields(managed, "phasesplit") == mine
    assert owned_fields(managed, "nobody") == {}


def test_the_owned_part_has_the_shape_of_the_manifest() -> None:
    live = stateful_set(containers=[{"name": "sidecar"}, live_container()], replicas=3)
    part = owned_part(live, fields(**CONTAINER_FIELDS))
    assert part["metadata"] == {"name": "chat-decode", "namespace": "default", "labels": {"a": "b"}}
    assert "replicas" not in part["spec"]
    assert [item["name"] for item in part["spec"]["containers"]] == ["worker"]
    assert "imagePullPolicy" not in part["spec"]["containers"][0]
    assert first_difference(part, live, fields(**CONTAINER_FIELDS)) is None


def test_the_difference_reads_as_a_sentence() -> None:
    found = first_difference(
        stateful_set(paused=True), stateful_set(paused=False), fields(**{"f:paused": {}})
    )
    assert str(found) == "spec.paused has another value (false instead of true)"
