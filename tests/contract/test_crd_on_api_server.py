"""A real API server takes the CRD, refuses what must be refused with our sentence, and takes every child."""

import json
from typing import Any

import pytest

from helpers_bad_objects import BAD_OBJECTS, BadObject
from helpers_cluster import ClusterUnderTest, wait_for
from helpers_resources import ROOT, build_context, read_sample, sample_names
from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.status import DisaggregatedModelStatus, PoolStatus
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.resources.children import (
    build_accepted_revision,
    build_children,
    build_scale,
    build_transfer_secret,
)
from testbed.errors import TestbedError

pytestmark = pytest.mark.cluster

CRD = ROOT / "crds" / "phasesplit.dev_disaggregatedmodels.yaml"


@pytest.fixture(scope="module")
def crd(cluster: ClusterUnderTest) -> ClusterUnderTest:
    """The cluster with the CRD; it stays, as it would after an uninstall."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", CRD)
    name = f"crd/{names.PLURAL}.{names.GROUP}"
    cluster.kubectl("wait", "--for=condition=Established", name, "--timeout=20s")

    # For a second after its creation the API server answers 429 to requests for the new kind.
    def is_served() -> bool:
        try:
            cluster.kubectl("get", names.PLURAL, "-A")
        except TestbedError:
            return False
        return True

    wait_for(is_served, 20, "the new kind to be served")
    return cluster


def create(cluster: ClusterUnderTest, manifest: dict[str, Any], *flags: str) -> dict[str, Any]:
    text = cluster.kubectl("create", "-f", "-", "-o", "json", *flags, stdin=json.dumps(manifest))
    created: dict[str, Any] = json.loads(text)
    return created


@pytest.mark.parametrize("bad", BAD_OBJECTS, ids=lambda bad: bad.what)
def test_bad_object(crd: ClusterUnderTest, namespace: str, bad: BadObject) -> None:
    flags = ("--dry-run=server", "--validate=false")
    if bad.server_says is None:
        create(crd, bad.manifest(namespace), *flags)
        return
    with pytest.raises(TestbedError) as refused:
        create(crd, bad.manifest(namespace), *flags)
    assert bad.server_says in str(refused.value)


@pytest.mark.parametrize("sample", sample_names())
def test_sample_and_its_children(crd: ClusterUnderTest, namespace: str, sample: str) -> None:
    document = read_sample(sample)
    document["metadata"]["namespace"] = namespace
    live = create(crd, document, "--dry-run=server")
    # The defaults of the API server are those of the models.
    assert DisaggregatedModelSpec.model_validate(live["spec"]) == DisaggregatedModelSpec.model_validate(
        document["spec"]
    )
    context = build_context(
        live["spec"],
        live["metadata"]["name"],
        namespace=namespace,
        uid=live["metadata"]["uid"],
        gated=dict.fromkeys(Pool, sample == "full"),
    )
    children = [
        *build_children(context, RoutingTable()),
        build_transfer_secret(context, "key", "token"),
        build_accepted_revision(context),
    ]
    flags = ("--server-side", "--field-manager=phasesplit", "--dry-run=server", "-f", "-")
    items = {"apiVersion": "v1", "kind": "List", "items": children}
    applied = crd.kubectl("apply", *flags, stdin=json.dumps(items), timeout_s=60)
    assert applied.count("serverside-applied") == len(children)


def test_status_is_a_subresource_and_columns_show_it(crd: ClusterUnderTest, namespace: str) -> None:
    document = read_sample("smollm2-cpu")
    document["metadata"]["namespace"] = namespace
    document["spec"]["paused"] = True
    created = create(crd, document)
    name = created["metadata"]["name"]
    status = DisaggregatedModelStatus(
        observed_generation=1,
        pools=[
            PoolStatus(name=Pool.PREFILL, desired=2, ready=1, summary="1/2"),
            PoolStatus(name=Pool.DECODE, desired=3, summary="0/3"),
        ],
    )
    crd.kubectl(
        "patch", names.SINGULAR, name, "-n", namespace, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": status.to_manifest()}),
    )  # fmt: skip
    after = crd.kubectl.get(names.SINGULAR, name, "-n", namespace)
    assert after["metadata"]["generation"] == 1
    line = crd.kubectl("get", names.SHORT_NAME, name, "-n", namespace, "--no-headers")
    assert "1/2" in line
    assert "0/3" in line
    crd.kubectl("delete", names.SINGULAR, name, "-n", namespace, "--timeout=20s")


def test_two_managers_share_a_pool(crd: ClusterUnderTest, namespace: str) -> None:
    """The builder's manager changes the template without touching the scaler's replicas."""
    # Owned by nothing and wanting no pod: the controller has nothing to start.
    context = build_context({"engine": {"image": "example.org/none:1"}}, namespace=namespace)
    (pool,) = [
        child
        for child in build_children(context, RoutingTable())
        if child["metadata"]["name"] == "chat-prefill" and child["kind"] == "StatefulSet"
    ]
    del pool["metadata"]["ownerReferences"]

    def apply(manifest: dict[str, Any], manager: str) -> dict[str, Any]:
        flags = ("--server-side", f"--field-manager={manager}", "--show-managed-fields", "-o", "json")
        answer: dict[str, Any] = json.loads(
            crd.kubectl("apply", *flags, "-f", "-", stdin=json.dumps(manifest))
        )
        return answer

    apply({**pool, "spec": {**pool["spec"], "replicas": 0}}, names.FIELD_MANAGER)
    apply(build_scale(context, Pool.PREFILL, 0), names.SCALER_FIELD_MANAGER)
    applied = apply(pool, names.FIELD_MANAGER)
    assert applied["spec"]["replicas"] == 0
    owners = {
        entry["manager"]
        for entry in applied["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }
    assert owners == {names.SCALER_FIELD_MANAGER}
