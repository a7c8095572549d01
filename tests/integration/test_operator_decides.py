"""What the operator decides about modes and nodes, seen in the status and the table; pods are on paper.

A real API server, scheduler and controllers. One operator serves all tests of this file.
"""

import time
from datetime import datetime

import pytest

from helpers_operator_cluster import Stage, apart, pool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_a_slow_link_ends_the_split_within_15_s_and_a_good_one_brings_it_back(s: Stage) -> None:
    s.apply("link", mode="Split", adoption={"dwellSeconds": 3}, transfer={"minBandwidth": "20Mi"}, **apart(s))
    s.wait_mode("link", "Split")
    s.wait_condition("link", "LinkHealthy", "True")
    slow_since_s = time.time()
    s.kubelet.script.link_bytes_per_s = 6e6
    try:
        s.wait_mode("link", "Colocated")
        decision = s.get("link")["status"]["decision"]
        assert decision["reason"] == "LinkDegraded"
        decided_s = datetime.fromisoformat(decision["since"].replace("Z", "+00:00")).timestamp()
        assert decided_s - slow_since_s < 15
        assert "48 Mbit/s" in decision["message"] and "168 Mbit/s" in decision["message"]
        assert s.table("link")["default_roles"] == {"prefill": "colocated", "decode": "colocated"}
        assert any("from Split to Colocated" in note for note in s.events("LinkDegraded"))
    finally:
        s.kubelet.script.link_bytes_per_s = 2e9
    s.wait_mode("link", "Split", timeout_s=60)


def test_without_fallback_the_table_says_that_nothing_may_serve(s: Stage) -> None:
    s.apply("never", mode="Split", fallback="Never", transfer={"minBandwidth": "20Mi"}, **apart(s))
    s.wait_mode("never", "Split")
    s.kubelet.script.link_bytes_per_s = 6e6
    try:
        s.wait_condition("never", "Available", "False", "NothingServes")
        table = s.table("never")
        assert (table["mode"], table["colocated_allowed"]) == ("Split", False)
        assert table["reason"].startswith("LinkDegraded: ")
    finally:
        s.kubelet.script.link_bytes_per_s = 2e9
    s.wait_condition("never", "Available", "True", timeout_s=60)
    assert s.table("never")["reason"] == ""


def test_pools_that_do_not_match_are_not_paired(s: Stage) -> None:
    s.apply("mismatch", mode="Split", adoption={"dwellSeconds": 1}, **apart(s))
    s.wait_mode("mismatch", "Split")
    s.kubelet.script.fingerprints["decode"] = "other"
    try:
        s.wait_mode("mismatch", "Colocated")
        assert s.get("mismatch")["status"]["decision"]["reason"] == "Mismatch"
    finally:
        s.kubelet.script.fingerprints.clear()
    s.wait_mode("mismatch", "Split")


def test_a_lost_pool_ends_the_split_and_is_told(s: Stage) -> None:
    s.apply("lost", mode="Split", adoption={"dwellSeconds": 1}, **apart(s))
    s.wait_mode("lost", "Split")
    starts = s.kubelet.starts
    s.kubelet.starts = lambda pod: pod["metadata"]["name"] != "lost-decode-0" and starts(pod)
    try:
        s.wait_mode("lost", "Colocated", timeout_s=15)
        assert s.get("lost")["status"]["decision"]["reason"] == "PoolUnavailable"
    finally:
        s.kubelet.starts = starts
    s.wait_mode("lost", "Split")


def test_gated_pods_are_pinned_to_the_planned_nodes(s: Stage) -> None:
    near = {"placement": {"binding": "Gated", "levels": [{"nodeLabel": "topology.kubernetes.io/zone"}]}}
    gpus = {"prefill": pool(s, gpu={"count": 1}), "decode": pool(s, gpu={"count": 1})}
    s.apply("gated", mode="Split", **near, **gpus)
    s.wait_condition("gated", "Ready", "True")
    pods = s.pods("gated")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 1, "both in one zone, where KV travels least"
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] == pod["spec"]["nodeName"]
        assert not pod["spec"].get("schedulingGates")


def test_more_gpus_than_there_are_is_said_and_the_rest_serves(s: Stage) -> None:
    many = {
        "prefill": pool(s, gpu={"count": 1}, replicas={"min": 9, "max": 9}),
        "decode": pool(s, gpu={"count": 1}),
    }
    s.apply("gpus", mode="Colocated", **many)
    placed = s.wait_condition("gpus", "Placed", "False")
    assert "nvidia.com/gpu" in placed["message"]
    s.kubectl("delete", "dm", "gpus", "-n", s.namespace)


def test_a_claim_for_one_node_is_refused_for_workers_on_two(s: Stage) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": s.namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    s.kubectl.apply(claim)
    s.apply("shared", mode="Split", model={"source": {"volume": {"claimName": "models"}}}, **apart(s))
    accepted = s.wait_condition("shared", "Accepted", "False", "Invalid")
    assert "a claim of access mode ReadWriteOnce that nodes paper-a, paper-b need" in accepted["message"]
    s.kubectl("delete", "dm", "shared", "-n", s.namespace)
