"""The rights that the install grants cover the kinds that the operator and the router touch, and no more."""

from typing import Any

import pytest
import yaml

from helpers_resources import ROOT, build_context
from phasesplit.api.routing import RoutingTable
from phasesplit.cluster import kinds
from phasesplit.operator.settings import OperatorSettings
from phasesplit.resources.children import build_children

BASE = ROOT / "manifests" / "base"
Manifest = dict[str, Any]
READ = {"get", "list", "watch"}


def documents(name: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all((BASE / name).read_text()) if document]


def rules_of(kind: str, name: str, file: str = "rbac.yaml") -> list[Manifest]:
    (found,) = [d for d in documents(file) if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return list(found["rules"])


OPERATOR_RULES = [
    *rules_of("ClusterRole", "phasesplit-operator"),
    *rules_of("Role", "phasesplit-operator-lease"),
]


def verbs_on(kind: kinds.Kind, rules: list[Manifest] = OPERATOR_RULES) -> set[str]:
    return {
        verb
        for rule in rules
        if kind.group in rule["apiGroups"]
        and kind.plural in rule["resources"]
        and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


ALL_KINDS = [kind for kind in vars(kinds).values() if isinstance(kind, kinds.Kind)]


@pytest.mark.parametrize("kind", kinds.CHILD_KINDS, ids=lambda kind: kind.kind)
def test_children_can_be_watched_applied_and_deleted(kind: kinds.Kind) -> None:
    assert verbs_on(kind) >= READ | {"create", "patch", "delete"}


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.kind)
def test_every_kind_has_some_right(kind: kinds.Kind) -> None:
    assert verbs_on(kind)


def test_secrets_cannot_be_listed() -> None:
    assert verbs_on(kinds.SECRET) == {"get", "create", "patch"}


def test_users_object_is_read_only_but_for_its_status() -> None:
    assert verbs_on(kinds.MODEL) == READ
    status = [rule for rule in OPERATOR_RULES if "disaggregatedmodels/status" in rule["resources"]]
    assert [rule["verbs"] for rule in status] == [["patch"]]


def test_no_right_on_what_no_code_knows() -> None:
    known = {(kind.group, kind.plural) for kind in ALL_KINDS}
    for rule in OPERATOR_RULES:
        for resource in rule["resources"]:
            if "/" in resource or "resourceNames" in rule:
                continue
            assert any((group, resource) in known for group in rule["apiGroups"]), resource


def test_no_wildcards() -> None:
    for rule in [*OPERATOR_RULES, *rules_of("ClusterRole", "phasesplit-router", "router-clusterrole.yaml")]:
        assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}


def test_only_the_routers_role_can_be_bound() -> None:
    bind = [rule for rule in OPERATOR_RULES if "bind" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in bind] == [["phasesplit-router"]]
    (binding,) = [c for c in build_children(build_context(), RoutingTable()) if c["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == "phasesplit-router"
    assert not [rule for rule in OPERATOR_RULES if {"escalate", "impersonate"} & set(rule["verbs"])]


def test_router_can_list_and_watch_what_it_follows() -> None:
    rules = rules_of("ClusterRole", "phasesplit-router", "router-clusterrole.yaml")
    assert {(r["apiGroups"][0], r["resources"][0]): set(r["verbs"]) for r in rules} == {
        ("", "configmaps"): {"list", "watch"},
        ("discovery.k8s.io", "endpointslices"): {"list", "watch"},
    }


def test_children_are_of_known_kinds() -> None:
    for child in build_children(build_context(), RoutingTable()):
        assert kinds.kind_of(child) in kinds.CHILD_KINDS


def test_deployment_sets_only_variables_that_are_read() -> None:
    (deployment,) = documents("deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    prefix = "PHASESPLIT_"
    known = {prefix + field.upper() for field in OperatorSettings.model_fields}
    given = {variable["name"] for variable in container["env"]}
    assert {name for name in given if name.startswith(prefix)} <= known
    settings = OperatorSettings()
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["PHASESPLIT_WORKER_IMAGE"] == settings.worker_image
    assert values["PHASESPLIT_CONTROL_IMAGE"] == settings.control_image
    assert values["PHASESPLIT_ROUTER_CLUSTER_ROLE"] == settings.router_cluster_role
    assert values["PHASESPLIT_LEASE_NAME"] == settings.lease_name
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["health"] == settings.health_port
