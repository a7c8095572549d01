"""Restarts, second copies, and an operator that is gone: one writer, nothing lost, nothing held hostage."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cluster import ClusterUnderTest, PaperNode
from helpers_operator_cluster import OperatorProcess, Stage, stage
from phasesplit.api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NODES = [PaperNode("paper-c", labels={"topology.kubernetes.io/zone": "z1"}), PaperNode("paper-d")]


@pytest.fixture
def s(cluster: ClusterUnderTest, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with stage(cluster, namespace, tmp_path, NODES) as found:
        yield found


def apart(s: Stage) -> dict[str, object]:
    """Prefill on one node, decode on the other."""
    pool = s.manifest("x")["spec"]["prefill"]
    return {
        "prefill": {**pool, "nodeSelector": {names.HOSTNAME_LABEL: "paper-c"}},
        "decode": {**pool, "nodeSelector": {names.HOSTNAME_LABEL: "paper-d"}},
    }


def test_a_second_copy_waits_and_takes_over_when_the_first_is_killed(s: Stage, tmp_path: Path) -> None:
    s.apply("two", mode="Colocated")
    s.wait_condition("two", "Ready", "True")
    second = OperatorProcess(s.cluster, s.namespace, tmp_path)
    second.spawn()
    try:
        s.wait(lambda: "waiting: the lease" in second.log(), 30, "the second copy to wait")
        s.kubectl("delete", "service/two-decode", "-n", s.namespace)
        s.wait(
            lambda: s.kubectl.find("service", "two-decode", "-n", s.namespace) is not None, 20, "the service"
        )
        assert "applying" not in second.log()
        s.operator.kill()
        s.kubectl("delete", "service/two-decode", "-n", s.namespace)
        s.wait(
            lambda: s.kubectl.find("service", "two-decode", "-n", s.namespace) is not None,
            40,
            "the service, from the second copy",
        )
        assert "applying Service two-decode" in second.log()
    finally:
        second.stop()


def test_a_restart_changes_nothing_and_keeps_a_fallback(s: Stage) -> None:
    s.apply("again", mode="Split", transfer={"minBandwidth": "20Mi"}, **apart(s))
    s.wait_mode("again", "Split")
    s.kubelet.script.link_bytes_per_s = 6e6
    s.wait_mode("again", "Colocated", timeout_s=20)
    before = s.get("again")["status"]["decision"]
    version = s.table("again")["version"]
    s.operator.kill()
    s.kubelet.script.link_bytes_per_s = 2e9
    mark = s.cluster.audit.mark()
    s.operator.start()
    time.sleep(12)
    # The link is good again, but the dwell of 600 s has only begun.
    assert s.get("again")["status"]["mode"] == "Colocated"
    assert s.get("again")["status"]["decision"]["since"] == before["since"]
    assert s.table("again")["version"] <= version + 1
    written = {(event.verb, event.resource, event.subresource) for event in s.operator.writes(mark)}
    allowed = {
        ("patch", "disaggregatedmodels", "status"),
        ("create", "events", ""),
        ("patch", "configmaps", ""),
    }
    assert written <= allowed


def test_an_object_can_be_deleted_while_the_operator_is_gone(s: Stage) -> None:
    s.apply("orphaned", mode="Colocated")
    s.wait_condition("orphaned", "Ready", "True")
    s.operator.kill()
    s.kubectl("delete", "dm", "orphaned", "-n", s.namespace, "--timeout=20s")
    selector = f"{names.LABEL_MODEL}=orphaned"

    def gone() -> bool:
        kinds = "statefulsets,deployments,services,configmaps,secrets,pods"
        return not s.kubectl.get(kinds, "-n", s.namespace, "-l", selector)["items"]

    s.wait(gone, 60, "all children to be gone")


def test_gates_are_lifted_before_the_operator_is_removed(s: Stage, tmp_path: Path) -> None:
    s.apply("gated", mode="Colocated", placement={"binding": "Gated"})
    s.wait_condition("gated", "Ready", "True")
    s.operator.stop()
    s.kubectl("delete", "pod", "gated-decode-0", "-n", s.namespace, "--wait=false")

    def waits() -> bool:
        pods = {pod["metadata"]["name"]: pod for pod in s.pods("gated")}
        pod = pods.get("gated-decode-0", {"spec": {}})
        return bool(pod["spec"].get("schedulingGates")) and not pod["spec"].get("nodeName")

    s.wait(waits, 20, "the new pod to wait behind its gate")
    lifter = OperatorProcess(s.cluster, s.namespace, tmp_path)
    lifter.spawn("lift-gates")
    assert lifter.wait(60) == 0, lifter.log()

    def scheduled() -> bool:
        return all(pod["spec"].get("nodeName") for pod in s.pods("gated"))

    s.wait(scheduled, 20, "the pod to be scheduled")
    for name in ("gated-prefill", "gated-decode"):
        found = s.kubectl.get("statefulset", name, "-n", s.namespace)
        assert not found["spec"]["template"]["spec"].get("schedulingGates")
