"""Probes, ports, commands and scrape annotations of the pods meet what the programs serve."""

import tomllib

import pytest

from helpers_resources import ROOT, build_context
from helpers_worker_server import config, make_parts
from phasesplit.api import names
from phasesplit.api.routing import RoutingTable
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.children import build_children
from phasesplit_router.router import Router
from phasesplit_router.server import RouterServer
from phasesplit_router.settings import RouterSettings
from phasesplit_worker.server.app import build_app
from phasesplit_worker.server.auth import AdminAuth
from phasesplit_worker.server.worker import Worker

CHILDREN = build_children(build_context(), RoutingTable())
WORKLOADS = [child for child in CHILDREN if "template" in child.get("spec", {})]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def container_of(workload: Manifest) -> Manifest:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def probe_paths(workload: Manifest) -> set[str]:
    container = container_of(workload)
    return {container[probe]["httpGet"]["path"] for probe in PROBES if probe in container}


def ids(workload: Manifest) -> str:
    return str(workload["metadata"]["name"])


async def test_worker_serves_what_is_probed_and_scraped() -> None:
    worker = Worker(config(), AdminAuth("token"), "engine-1", lambda *_: make_parts())
    served = {route.resource.canonical for route in build_app(worker).router.routes() if route.resource}
    for workload in WORKLOADS:
        if workload["kind"] == "StatefulSet":
            assert probe_paths(workload) <= served
    assert {
        names.PATH_METRICS,
        names.PATH_ADMIN_STATE,
        names.PATH_ADMIN_ROLE,
        names.PATH_ADMIN_PROBE,
    } <= served


async def test_router_serves_what_is_probed_and_scraped() -> None:
    router = Router(RouterSettings(object_name="chat", namespace="ai"))
    server = RouterServer(router)
    await router.close()
    served = {route.resource.canonical for route in server.app.router.routes() if route.resource}
    for workload in WORKLOADS:
        if workload["kind"] == "Deployment":
            assert probe_paths(workload) <= served
    assert {names.PATH_METRICS, names.PATH_ROUTER_STATUS} <= served


@pytest.mark.parametrize("workload", WORKLOADS, ids=ids)
def test_probes_name_a_port_that_is_there(workload: Manifest) -> None:
    container = container_of(workload)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in PROBES:
        if probe in container:
            assert container[probe]["httpGet"]["port"] in ports
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == ports["http"]
    assert annotations["prometheus.io/path"] == names.PATH_METRICS


@pytest.mark.parametrize("workload", WORKLOADS, ids=ids)
def test_services_find_the_pods(workload: Manifest) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    selectors = [c["spec"]["selector"] for c in CHILDREN if c["kind"] == "Service"]
    matching = [s for s in selectors if s.items() <= labels.items()]
    assert len(matching) == 1
    container = container_of(workload)
    port_names = {port["name"] for port in container["ports"]}
    for service in CHILDREN:
        if service["kind"] == "Service" and service["spec"]["selector"] == matching[0]:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names


@pytest.mark.parametrize("workload", WORKLOADS, ids=ids)
def test_commands_are_installed_programs(workload: Manifest) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert container_of(workload)["command"][0] in scripts


def test_headless_services_are_named_as_routers_look_for_them() -> None:
    headless = {
        c["metadata"]["name"] for c in CHILDREN if c["kind"] == "Service" and c["spec"].get("clusterIP")
    }
    assert headless == {names.pool_name("chat", pool) for pool in names.Pool}
