"""Rules that hold for every child whatever the spec, and the choices that depend on it."""

import base64
import json
from typing import Any

import pytest

from helpers_resources import build_context, read_sample, sample_names, worker_container
from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.children import (
    build_accepted_revision,
    build_children,
    build_scale,
    build_transfer_secret,
    read_accepted_spec,
)

LONGEST = "a" * names.MAX_NAME_LENGTH


def children(raw_spec: Manifest | None = None, **changes: Any) -> list[Manifest]:
    return build_children(build_context(raw_spec, **changes), RoutingTable(version=2))


def one(kind: str, name: str, raw_spec: Manifest | None = None, **changes: Any) -> Manifest:
    found = [c for c in children(raw_spec, **changes) if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1
    return found[0]


def pods(raw_spec: Manifest | None = None, **changes: Any) -> list[Manifest]:
    return [
        c["spec"]["template"]["spec"]
        for c in children(raw_spec, **changes)
        if "template" in c.get("spec", {})
    ]


def all_specs() -> list[Any]:
    return [pytest.param(read_sample(name)["spec"], id=name) for name in sample_names()]


@pytest.mark.parametrize("spec", all_specs())
def test_every_child_is_owned_named_and_labelled(spec: Manifest) -> None:
    built = children(spec)
    assert len({(c["kind"], c["metadata"]["name"]) for c in built}) == len(built)
    for child in [*built, build_accepted_revision(build_context(spec))]:
        metadata = child["metadata"]
        assert metadata["namespace"] == "ai"
        assert metadata["labels"][names.LABEL_MODEL] == "chat"
        assert metadata["labels"][names.LABEL_PART_OF] == names.PART_OF
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == (names.KIND, "0000-1111", True)


def test_longest_name_fits_where_names_end() -> None:
    for child in children(name=LONGEST):
        name = child["metadata"]["name"]
        assert len(name) <= 63
        if child["kind"] == "StatefulSet":
            # Pods carry `<name>-<10 characters>` as a label of at most 63.
            assert len(name) + 11 <= 63
    assert len(build_accepted_revision(build_context(name=LONGEST))["metadata"]["name"]) <= 63


@pytest.mark.parametrize("spec", all_specs())
def test_no_replicas_in_the_pools(spec: Manifest) -> None:
    for child in children(spec):
        if child["kind"] == "StatefulSet":
            assert "replicas" not in child["spec"]
            assert child["spec"]["podManagementPolicy"] == "Parallel"
            assert child["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_scale_says_only_how_many() -> None:
    scale = build_scale(build_context(), Pool.DECODE, 3)
    assert scale == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "chat-decode", "namespace": "ai"},
        "spec": {"replicas": 3},
    }


@pytest.mark.parametrize("spec", all_specs())
def test_every_pod_is_locked_down(spec: Manifest) -> None:
    for pod in pods(spec):
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 65532)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        mounted = {
            mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]
        }
        assert "/tmp" in mounted
        for container in pod["containers"]:
            rules = container["securityContext"]
            assert rules["readOnlyRootFilesystem"]
            assert not rules["allowPrivilegeEscalation"]
            assert rules["capabilities"] == {"drop": ["ALL"]}


def test_workers_get_no_token_and_routers_no_transfer_key() -> None:
    worker, router = one("StatefulSet", "chat-prefill"), one("Deployment", "chat-router")
    assert worker["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    volumes = {v["name"]: v for v in router["spec"]["template"]["spec"]["volumes"]}
    assert [item["key"] for item in volumes["transfer"]["secret"]["items"]] == [names.SECRET_KEY_ADMIN]


def test_cpu_pool_asks_for_no_gpu() -> None:
    spec = {"prefill": {"gpu": {"count": 0, "products": ["NVIDIA-L4"]}}}
    built = one("StatefulSet", "chat-prefill", spec, has_nvidia_runtime_class=True)
    container = worker_container(built)
    assert "resources" not in container
    assert container["args"][container["args"].index("--device") + 1] == "cpu"
    pod = built["spec"]["template"]["spec"]
    assert "runtimeClassName" not in pod
    assert "affinity" not in pod


def test_gpu_pool_asks_for_its_resource_twice() -> None:
    spec = {
        "decode": {
            "gpu": {"count": 1, "resourceName": "amd.com/gpu"},
            "resources": {"requests": {"cpu": "2"}},
        }
    }
    container = worker_container(one("StatefulSet", "chat-decode", spec))
    assert container["resources"] == {
        "requests": {"cpu": "2", "amd.com/gpu": "1"},
        "limits": {"amd.com/gpu": "1"},
    }
    assert container["args"][container["args"].index("--device") + 1] == "cuda"


@pytest.mark.parametrize(
    ("class_exists", "wanted", "expected"),
    [(True, None, "nvidia"), (False, None, None), (False, "kata", "kata"), (True, "kata", "kata")],
)
def test_runtime_class(class_exists: bool, wanted: str | None, expected: str | None) -> None:
    spec: Manifest = {"prefill": {"runtimeClassName": wanted} if wanted else {}}
    built = one("StatefulSet", "chat-prefill", spec, has_nvidia_runtime_class=class_exists)
    assert built["spec"]["template"]["spec"].get("runtimeClassName") == expected


def test_startup_probe_waits_twenty_minutes() -> None:
    probe = worker_container(one("StatefulSet", "chat-prefill"))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1200


def test_grace_is_longer_than_the_drain() -> None:
    for pod in pods({"rollout": {"drainSeconds": 45}}):
        assert pod["terminationGracePeriodSeconds"] == 55


def test_gpu_affinity_joins_the_users_terms() -> None:
    term = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}
    users = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = {"prefill": {"gpu": {"products": ["NVIDIA-L4"]}, "affinity": {"nodeAffinity": users}}}
    affinity = one("StatefulSet", "chat-prefill", spec)["spec"]["template"]["spec"]["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [[e["key"] for e in t["matchExpressions"]] for t in terms] == [
        ["disk", "nvidia.com/gpu.product"]
    ] * 2
    # Labelled with the product, or not labelled at all as on plain k3s.
    assert [t["matchExpressions"][1]["operator"] for t in terms] == ["In", "DoesNotExist"]


def test_binding_affinity_draws_the_pools_together_by_level() -> None:
    spec = {"placement": {"binding": "Affinity", "levels": [{"nodeLabel": "a"}, {"nodeLabel": "b"}]}}
    affinity = one("StatefulSet", "chat-prefill", spec)["spec"]["template"]["spec"]["affinity"]
    near = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(n["weight"], n["podAffinityTerm"]["topologyKey"]) for n in near] == [(100, "a"), (50, "b")]
    labels = near[0]["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels[names.LABEL_POOL] == "decode"


@pytest.mark.parametrize(
    ("source", "cache", "claims", "mounts"),
    [
        ({"path": "/models/m"}, None, 0, set()),
        ({"volume": {"claimName": "models", "path": "m"}}, None, 0, {"/model"}),
        ({"huggingFace": {"repository": "a/b"}}, None, 0, {"/cache"}),
        ({"huggingFace": {"repository": "a/b"}}, {"storage": "5Gi"}, 1, {"/cache"}),
    ],
)
def test_model_sources(source: Manifest, cache: Manifest | None, claims: int, mounts: set[str]) -> None:
    model = {"source": source} | ({"cache": cache} if cache else {})
    built = one("StatefulSet", "chat-prefill", {"model": model})
    assert len(built["spec"].get("volumeClaimTemplates", [])) == claims
    paths = {m["mountPath"] for m in worker_container(built)["volumeMounts"]}
    assert paths - {"/tmp", "/etc/phasesplit/transfer"} == mounts
    declared = {v["name"] for v in built["spec"]["template"]["spec"]["volumes"]}
    declared |= {c["metadata"]["name"] for c in built["spec"].get("volumeClaimTemplates", [])}
    assert {m["name"] for m in worker_container(built)["volumeMounts"]} == declared


def test_volume_is_read_only() -> None:
    built = one("StatefulSet", "chat-decode", {"model": {"source": {"volume": {"claimName": "models"}}}})
    (volume,) = [v for v in built["spec"]["template"]["spec"]["volumes"] if v["name"] == "model"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    args = worker_container(built)["args"]
    assert args[args.index("--model-path") + 1] == "/model"


def test_services_publish_workers_before_they_are_ready() -> None:
    service = one("Service", "chat-decode")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == names.selector_labels("chat", names.Component.WORKER, Pool.DECODE)


def test_router_service_is_the_users() -> None:
    service = one("Service", "chat-router", {"router": {"service": {"type": "NodePort", "port": 8000}}})[
        "spec"
    ]
    assert (service["type"], service["ports"][0]["port"]) == ("NodePort", 8000)


def test_only_workers_of_the_object_reach_the_transfer_port() -> None:
    policy = one("NetworkPolicy", "chat-worker")["spec"]
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}
    assert by_port[names.WORKER_TRANSFER_PORT] == [
        {"podSelector": {"matchLabels": names.selector_labels("chat", names.Component.WORKER)}}
    ]
    sources = [peer["podSelector"]["matchLabels"] for peer in by_port[names.WORKER_API_PORT]]
    assert names.selector_labels("chat", names.Component.ROUTER) in sources
    assert {names.LABEL_NAME: "prometheus"} in sources
    assert one("NetworkPolicy", "chat-router")["spec"]["ingress"] == [
        {"ports": [{"port": names.ROUTER_API_PORT, "protocol": "TCP"}]}
    ]


def test_one_budget_spans_both_pools() -> None:
    budget = one("PodDisruptionBudget", "chat-worker")["spec"]
    assert budget["maxUnavailable"] == 1
    assert names.LABEL_POOL not in budget["selector"]["matchLabels"]


def test_routing_table_round_trips() -> None:
    table = RoutingTable(version=9, name="chat", model="m", roles={"chat-prefill-0": names.Role.PREFILL})
    built = build_children(build_context(), table)
    (config,) = [c for c in built if c["kind"] == "ConfigMap"]
    assert RoutingTable.model_validate_json(config["data"][names.ROUTING_KEY]) == table


def test_secret_holds_both_keys_and_cannot_change() -> None:
    secret = build_transfer_secret(build_context(), "key", "token")
    assert {k: base64.b64decode(v).decode() for k, v in secret["data"].items()} == {
        names.SECRET_KEY_TRANSFER: "key",
        names.SECRET_KEY_ADMIN: "token",
    }
    assert secret["immutable"] is True


def test_an_object_made_anew_shares_no_secret_with_the_old_one_of_its_name() -> None:
    old, new = build_context(), build_context(uid="2222-3333")
    longest = "m" * names.MAX_NAME_LENGTH
    for context in (old, new):
        name = build_transfer_secret(context, "key", "token")["metadata"]["name"]
        assert name.startswith("chat-transfer-")
        assert name == names.transfer_secret_name(context.name, context.uid)
        mounted = [
            volume["secret"]["secretName"]
            for child in build_children(context, RoutingTable())
            if child["kind"] in ("StatefulSet", "Deployment")
            for volume in child["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        ]
        assert set(mounted) == {name} and len(mounted) == 3
    assert names.transfer_secret_name("chat", old.uid) != names.transfer_secret_name("chat", new.uid)
    assert len(names.transfer_secret_name(longest, old.uid)) <= 63


def test_accepted_spec_comes_back() -> None:
    context = build_context(read_sample("full")["spec"])
    revision = build_accepted_revision(context)
    assert revision["revision"] == context.generation
    assert read_accepted_spec(json.loads(json.dumps(revision))) == context.spec


def test_a_new_spec_is_a_new_revision() -> None:
    first, second = (
        build_accepted_revision(build_context()),
        build_accepted_revision(build_context({"mode": "Split"})),
    )
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_pull_secrets_of_user_and_operator_once_each() -> None:
    spec = {"engine": {"imagePullSecrets": [{"name": "a"}, {"name": "b"}]}}
    context = build_context(spec)
    settings = context.settings.__class__("w", "c", image_pull_secrets=("b", "d"))
    for pod in pods(spec, settings=settings):
        assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}, {"name": "d"}]


def test_overlay_reaches_the_template() -> None:
    sidecar = {"name": "sidecar", "image": "example.org/sidecar"}
    spec = {"prefill": {"template": {"spec": {"containers": [sidecar], "hostIPC": True}}}}
    pod = one("StatefulSet", "chat-prefill", spec)["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["worker", "sidecar"]
    assert pod["hostIPC"] is True
