"""The chart as helm renders it, and the kustomize base as kubectl builds it. Runs both programs."""

import functools
import json
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from helpers_resources import ROOT
from testbed.binaries import binary, ensure_binaries

pytestmark = pytest.mark.integration

CHART = ROOT / "helm" / "phasesplit"
NAMESPACE = "phasesplit-system"
Manifest = dict[str, Any]
TIMEOUT_S = 60


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    """helm and kubectl, built once and cached."""
    ensure_binaries()


def run(program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [str(binary(program)), *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=TIMEOUT_S)


@functools.cache
def render(*settings: str) -> list[Manifest]:
    flags = [f"--set={setting}" for setting in settings]
    done = run("helm", "template", "phasesplit", str(CHART), "--namespace", NAMESPACE, *flags)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def build(folder: str) -> list[Manifest]:
    done = run("kubectl", "kustomize", str(ROOT / "manifests" / folder))
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def comparable(documents: Iterable[Manifest]) -> dict[tuple[str, str], Manifest]:
    """By kind and name, without what differs on purpose."""
    found = {}
    for document in documents:
        kind, metadata = document["kind"], document["metadata"]
        annotations = metadata.get("annotations", {})
        if kind == "Namespace" or "helm.sh/hook" in annotations:
            continue
        helms, ours = '"app.kubernetes.io/managed-by": "Helm"', '"app.kubernetes.io/managed-by": "kustomize"'
        copy = json.loads(json.dumps(document).replace(helms, ours))
        copy["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None)
        found[kind, metadata["name"]] = copy
    return found


def one(documents: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def variables(documents: list[Manifest]) -> dict[str, Any]:
    deployment = one(documents, "Deployment", "phasesplit-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_base_equals_the_charts_defaults() -> None:
    assert comparable(build("base")) == comparable(render())


def test_overlay_with_prometheus_equals_the_chart() -> None:
    ours, charts = (
        comparable(build("overlays/with-prometheus")),
        comparable(render("prometheus.enabled=true")),
    )
    for documents in (ours, charts):
        (container,) = documents["Deployment", "phasesplit-operator"]["spec"]["template"]["spec"][
            "containers"
        ]
        container["env"].sort(key=lambda variable: variable["name"])
    assert ours == charts


def test_helm_finds_nothing_to_say() -> None:
    assert "0 chart(s) failed" in run("helm", "lint", "--strict", str(CHART)).stdout


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("images.pullPolicy=Sometimes", "/images/pullPolicy"),
        ("operator.replicas=2", "replicas"),
        ("operator.logLevel=LOUD", "/operator/logLevel"),
        ("prometheus.address=prometheus:9090", "/prometheus/address"),
        ("prometheus.scrapeIntervalSeconds=0", "/prometheus/scrapeIntervalSeconds"),
        ("crds.enabled=maybe", "/crds/enabled"),
        ("images.control.pullPolicy=Never", "pullPolicy"),
        ("operator.tolerations[0].kye=x", "kye"),
        ("prometheus.tolerations[0].effect=NoShedule", "NoExecute"),
        ("operator.env[0].nam=x", "nam"),
        ("operator.affinity.nodeAfinity.x=y", "nodeAfinity"),
    ],
)
def test_wrong_values_are_refused(setting: str, says: str) -> None:
    done = run("helm", "template", "phasesplit", str(CHART), f"--set={setting}", check=False)
    assert done.returncode != 0
    assert says in done.stderr


def test_the_crd_stays_unless_told_otherwise() -> None:
    name = "disaggregatedmodels.phasesplit.dev"
    kept = one(render(), "CustomResourceDefinition", name)
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    loose = one(render("crds.keep=false"), "CustomResourceDefinition", name)
    assert "helm.sh/resource-policy" not in loose["metadata"]["annotations"]
    assert not [d for d in render("crds.enabled=false") if d["kind"] == "CustomResourceDefinition"]


def test_one_namespace_means_no_rights_elsewhere() -> None:
    documents = render("operator.watchNamespace=ai")
    everywhere = one(documents, "ClusterRole", "phasesplit-operator")["rules"]
    assert {resource for rule in everywhere for resource in rule["resources"]} == {
        "nodes", "persistentvolumes", "runtimeclasses", "customresourcedefinitions",
    }  # fmt: skip
    assert one(documents, "Role", "phasesplit-operator")["metadata"]["namespace"] == "ai"
    assert variables(documents)["PHASESPLIT_WATCH_NAMESPACE"] == "ai"


def test_prometheus_address() -> None:
    name = "PHASESPLIT_PROMETHEUS_ADDRESS"
    assert name not in variables(render())
    bundled = render("prometheus.enabled=true")
    assert variables(bundled)[name] == f"http://prometheus.{NAMESPACE}:9090"
    assert one(bundled, "Service", "prometheus")["spec"]["ports"][0]["port"] == 9090
    named = render("prometheus.enabled=true", "prometheus.address=http://mine:9090")
    assert variables(named)[name] == "http://mine:9090"


def test_prometheus_has_no_rights_and_asks_the_operator() -> None:
    documents = render("prometheus.enabled=true", "prometheus.scrapeIntervalSeconds=7")
    pod = one(documents, "Deployment", "phasesplit-prometheus")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    text = one(documents, "ConfigMap", "phasesplit-prometheus")["data"]["prometheus.yml"]
    config = yaml.safe_load(text)
    assert config["global"]["scrape_interval"] == "7s"
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    assert discovery["url"] == f"http://phasesplit-operator.{NAMESPACE}:8082/targets"
    service = one(documents, "Service", "phasesplit-operator")
    assert service["spec"]["ports"][0]["port"] == 8082


def test_uninstall_hook_lifts_gates_as_the_operator() -> None:
    hook = one(render(), "Job", "phasesplit-lift-gates")
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    pod = hook["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "phasesplit-operator"
    assert pod["containers"][0]["command"] == ["phasesplit-operator", "lift-gates"]
    assert not [d for d in render("hooks.liftGates.enabled=false") if d["kind"] == "Job"]


def test_pull_secrets_reach_operator_and_children() -> None:
    documents = render("imagePullSecrets={one,two}")
    pod = one(documents, "Deployment", "phasesplit-operator")["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert variables(documents)["PHASESPLIT_IMAGE_PULL_SECRETS"] == "one,two"


def test_another_release_name_keeps_names_apart() -> None:
    done = run("helm", "template", "other", str(CHART))
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert variables_of(documents, "other-phasesplit-operator")["PHASESPLIT_ROUTER_CLUSTER_ROLE"] == (
        "other-phasesplit-router"
    )
    assert one(documents, "ClusterRole", "other-phasesplit-router")


def variables_of(documents: list[Manifest], name: str) -> dict[str, Any]:
    (container,) = one(documents, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_samples_are_valid_yaml_for_kubectl() -> None:
    assert {d["kind"] for d in build("samples")} == {"DisaggregatedModel"}
