"""The testbed is a real cluster: pods, names, Services, logs, volumes, GPUs, slow links, the audit log."""

import json
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers_cluster import ClusterUnderTest, PaperNode, wait_for
from testbed import cluster as testbeds
from testbed.audit import MUTATING_VERBS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

IMAGE = "phasesplit.dev/worker:dev"
START_TIMEOUT_S = 60
RESTRICTED = {
    "runAsUser": 65532,
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# Serves its host name over HTTP, and swallows bytes on a second port.
SERVER = textwrap.dedent("""
    import http.server, os, socket, threading
    def swallow():
        listener = socket.create_server(("", 9000))
        while True:
            peer, _ = listener.accept()
            while peer.recv(1 << 20): pass
            peer.sendall(b"done")
            peer.close()
    class Name(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers(); self.wfile.write(os.uname().nodename.encode())
    threading.Thread(target=swallow, daemon=True).start()
    print("serving", flush=True)
    http.server.ThreadingHTTPServer(("", 8000), Name).serve_forever()
""")
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
SEND = textwrap.dedent("""
    import socket, sys, time
    data = bytes(1 << 20)
    with socket.create_connection((sys.argv[1], 9000), timeout=60) as peer:
        start = time.monotonic()
        for _ in range(int(sys.argv[2])): peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(4)
    print(int(sys.argv[2]) * len(data) / (time.monotonic() - start))
""")


def pod(name: str, command: list[str], **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": IMAGE, "command": command, "securityContext": RESTRICTED}
    container |= {
        key: spec.pop(key) for key in ("resources", "volumeMounts", "readinessProbe") if key in spec
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "echo"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
    }


def service(name: str, **spec: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": 8000}]
    spec |= {"selector": {"app": "echo"}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def apply(cluster: ClusterUnderTest, namespace: str, *objects: dict[str, Any]) -> None:
    items = [{**item, "metadata": {**item["metadata"], "namespace": namespace}} for item in objects]
    cluster.kubectl.apply(*items)


def wait_for_pods(cluster: ClusterUnderTest, namespace: str, *names: str, condition: str = "Ready") -> None:
    cluster.kubectl(
        "wait", f"--for=condition={condition}", "-n", namespace, *(f"pod/{name}" for name in names),
        f"--timeout={START_TIMEOUT_S}s", timeout_s=START_TIMEOUT_S + 10,
    )  # fmt: skip


@pytest.fixture
def pair(cluster: ClusterUnderTest, namespace: str) -> str:
    """Two servers on two nodes behind one headless Service and one ordinary one; their namespace."""
    names = cluster.node_names[:2]
    ready = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    servers = [
        pod(f"echo-{number}", ["python", "-c", SERVER], nodeName=node, hostname=f"echo-{number}",
            subdomain="each", readinessProbe=ready)
        for number, node in enumerate(names)
    ]  # fmt: skip
    services = [service("each", clusterIP="None"), service("any")]
    apply(cluster, namespace, *servers, *services)
    wait_for_pods(cluster, namespace, "echo-0", "echo-1")
    return namespace


def execute(
    cluster: ClusterUnderTest, namespace: str, name: str, *command: str, timeout_s: float = 30
) -> str:
    return cluster.kubectl("exec", "-n", namespace, name, "--", *command, timeout_s=timeout_s).strip()


def test_pods_of_two_nodes_reach_each_other_by_name_and_by_service(
    cluster: ClusterUnderTest, pair: str
) -> None:
    nodes = {item["spec"]["nodeName"] for item in cluster.kubectl.get("pods", "-n", pair)["items"]}
    assert len(nodes) == 2
    for name in ("echo-1.each", f"echo-1.each.{pair}.svc.cluster.local"):
        assert execute(cluster, pair, "echo-0", "python", "-c", FETCH, f"http://{name}:8000/") == "echo-1"
    answers = {execute(cluster, pair, "echo-0", "python", "-c", FETCH, "http://any/") for _ in range(12)}
    assert answers == {"echo-0", "echo-1"}


def test_logs_exec_and_a_user_without_rights(cluster: ClusterUnderTest, pair: str) -> None:
    assert "serving" in cluster.kubectl("logs", "-n", pair, "echo-1")
    assert execute(cluster, pair, "echo-1", "id", "-u") == "65532"
    assert execute(cluster, pair, "echo-1", "sh", "-c", "touch /x 2>/dev/null || echo refused") == "refused"
    assert (
        execute(cluster, pair, "echo-1", "sh", "-c", "touch /models/x 2>/dev/null || echo refused")
        == "refused"
    )


def test_the_product_is_installed_in_its_images(cluster: ClusterUnderTest, pair: str) -> None:
    assert "--model-path" in execute(cluster, pair, "echo-0", "phasesplit-worker", "--help", timeout_s=60)
    code = "import phasesplit, phasesplit_router; print(phasesplit.__file__)"
    assert execute(cluster, pair, "echo-0", "python", "-c", code).startswith("/opt/phasesplit/operator/")
    assert "prometheus, version" in execute(cluster, pair, "echo-0", "sh", "-c", "prometheus --version 2>&1")


@pytest.fixture
def lifted_limit(cluster: ClusterUnderTest) -> Iterator[str]:
    node = cluster.node_names[1]
    yield node
    cluster.shape(node, None)


def test_a_shaped_link_has_the_speed_asked_for(
    cluster: ClusterUnderTest, pair: str, lifted_limit: str
) -> None:
    address = cluster.kubectl.get("pod", "echo-1", "-n", pair)["status"]["podIP"]

    def bytes_per_second(mebibytes: int) -> float:
        words = ("python", "-c", SEND, address, str(mebibytes))
        return float(execute(cluster, pair, "echo-0", *words, timeout_s=90))

    unshaped = bytes_per_second(256)
    cluster.shape(lifted_limit, "50mbit")
    assert 0.8 * 50e6 / 8 < bytes_per_second(24) < 1.1 * 50e6 / 8
    cluster.shape(lifted_limit, None)
    assert bytes_per_second(256) > max(20 * 50e6 / 8, unshaped / 4)


def test_a_killed_container_is_back_within_seconds(cluster: ClusterUnderTest, namespace: str) -> None:
    apply(cluster, namespace, pod("brief", ["sh", "-c", "exit 1"]))

    def restarts() -> int:
        statuses = cluster.kubectl.get("pod", "brief", "-n", namespace)["status"].get("containerStatuses", [])
        return sum(status["restartCount"] for status in statuses)

    # The kubelet's usual delays would allow three restarts in this time.
    wait_for(lambda: restarts() >= 5, 40, "five restarts")


def test_gpus_appear_are_given_out_and_disappear(cluster: ClusterUnderTest, namespace: str) -> None:
    node = cluster.node_names[0]
    cluster.set_gpus(node, 2)
    try:
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        names = [f"gpu-{number}" for number in range(3)]
        command = ["sh", "-c", "echo $TESTBED_GPUS; sleep 600"]
        apply(cluster, namespace, *(pod(name, command, **limits) for name in names))

        def running() -> list[str]:
            items = cluster.kubectl.get("pods", "-n", namespace)["items"]
            return [item["metadata"]["name"] for item in items if item["status"]["phase"] == "Running"]

        wait_for(lambda: len(running()) == 2, START_TIMEOUT_S, "two pods on two GPUs")
        given = {cluster.kubectl("logs", "-n", namespace, name).strip() for name in running()}
        assert given == {"fake-0", "fake-1"}
        [waiting] = set(names) - set(running())
        condition = cluster.kubectl.get("pod", waiting, "-n", namespace)["status"]["conditions"][0]
        assert condition["reason"] == "Unschedulable"
        assert "nvidia.com/gpu" in condition["message"]
    finally:
        cluster.kubectl("delete", "pods", "--all", "-n", namespace, timeout_s=60)
        cluster.set_gpus(node, 0)
    assert "nvidia.com/gpu.product" not in cluster.kubectl.get("node", node)["metadata"]["labels"]


def test_a_claim_gets_a_volume_of_the_pods_node(cluster: ClusterUnderTest, namespace: str) -> None:
    node = cluster.node_names[1]
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cache"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}},
    }
    writer = pod(
        "writer",
        ["sh", "-c", "echo kept > /cache/file && sleep 600"],
        nodeSelector={"kubernetes.io/hostname": node},
        volumes=[{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
        volumeMounts=[{"name": "cache", "mountPath": "/cache"}],
    )
    apply(cluster, namespace, claim, writer)
    wait_for_pods(cluster, namespace, "writer")
    assert execute(cluster, namespace, "writer", "cat", "/cache/file") == "kept"
    volume = cluster.kubectl.get("pvc", "cache", "-n", namespace)["spec"]["volumeName"]
    assert volume.startswith(f"{node}-")


def test_the_audit_log_shows_what_was_written_and_nothing_at_rest(
    cluster: ClusterUnderTest, namespace: str
) -> None:
    mark = cluster.audit.mark()
    cluster.kubectl("create", "configmap", "noted", "-n", namespace)
    [event] = cluster.audit.events(since=mark, user="admin", verbs=MUTATING_VERBS)
    assert (event.verb, event.resource, event.name, event.code) == ("create", "configmaps", "noted", 201)
    mark = cluster.audit.mark()
    time.sleep(5)
    assert cluster.audit.events(since=mark, verbs=MUTATING_VERBS) == []


def test_the_scheduler_believes_in_nodes_on_paper(cluster: ClusterUnderTest, namespace: str) -> None:
    nodes = [PaperNode(f"paper-{number}", {"rack": "x"}, gpus=8) for number in range(20)]
    with cluster.paper_nodes(nodes):
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        pods = [pod(f"big-{number}", ["true"], nodeSelector={"rack": "x"}, **limits) for number in range(5)]
        apply(cluster, namespace, *pods)
        wait_for_pods(cluster, namespace, *(f"big-{number}" for number in range(5)), condition="PodScheduled")
        items = cluster.kubectl.get("pods", "-n", namespace)["items"]
        assert len({item["spec"]["nodeName"] for item in items}) == 5
        time.sleep(28)  # longer than the controller manager believes in a silent node
        ready = cluster.kubectl(
            "get",
            "nodes",
            "-l",
            "rack=x",
            "-o",
            "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}",
        )
        assert ready.split() == ["True"] * 20
    assert not any(name.startswith("paper-") for name in cluster.node_names)


def test_a_second_up_returns_the_running_cluster_at_once(cluster: ClusterUnderTest) -> None:
    before = json.dumps(testbeds.status()["processes"])
    start_s = time.monotonic()
    again = testbeds.ensure_up()
    assert time.monotonic() - start_s < 15
    assert again.spec == cluster.testbed.spec
    assert json.dumps(testbeds.status()["processes"]) == before
