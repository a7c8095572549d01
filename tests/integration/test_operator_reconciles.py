"""The operator against a real API server, scheduler and controllers; pods are on paper.

One operator serves all tests of this file, each test has an object of its own.
"""

import json
import time

import pytest

from helpers_operator_cluster import Stage, apart, pool
from phasesplit.api import names
from phasesplit.operator.health import is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_an_object_becomes_ready_leaves_no_mark_and_then_nothing_is_written(s: Stage) -> None:
    s.apply("settled", mode="Split", **apart(s))
    s.wait_condition("settled", "Ready", "True", "AllServing")
    s.wait_mode("settled", "Split")
    found = s.get("settled")
    assert "finalizers" not in found["metadata"]
    assert set(found["metadata"].get("annotations", {})) <= {
        "kubectl.kubernetes.io/last-applied-configuration"
    }
    status = found["status"]
    assert status["observedGeneration"] == found["metadata"]["generation"]
    assert {item["type"]: item["status"] for item in status["conditions"]} | {
        "Accepted": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Available": "True",
    } == {item["type"]: item["status"] for item in status["conditions"]}
    assert [item["summary"] for item in status["pools"]] == ["1/1", "1/1"]
    assert s.table("settled")["default_roles"] == {"prefill": "prefill", "decode": "decode"}
    time.sleep(3)
    assert s.is_quiet(20) == []


def test_a_manual_change_is_reverted_and_reported(s: Stage) -> None:
    s.apply("drift", mode="Colocated")
    s.wait_condition("drift", "Ready", "True")
    s.kubectl("scale", "statefulset/drift-decode", "-n", s.namespace, "--replicas=3")
    s.kubectl(
        "label", "service/drift-router", "-n", s.namespace, "--overwrite", f"{names.LABEL_MANAGED_BY}=me"
    )
    s.kubectl("delete", "service/drift-prefill", "-n", s.namespace)

    def reverted() -> bool:
        sets = s.kubectl.get("statefulset", "drift-decode", "-n", s.namespace)
        service = s.kubectl.get("service", "drift-router", "-n", s.namespace)
        again = s.kubectl.find("service", "drift-prefill", "-n", s.namespace)
        label = service["metadata"]["labels"][names.LABEL_MANAGED_BY]
        return sets["spec"]["replicas"] == 1 and label != "me" and again is not None

    s.wait(reverted, 20, "the manual changes to be reverted")
    notes = s.events("ManualDrift")
    assert any("drift-decode" in note and "spec.replicas" in note for note in notes)
    assert any("drift-router" in note for note in notes)


def test_an_invalid_spec_is_refused_while_the_old_one_serves_on(s: Stage) -> None:
    s.apply("invalid", mode="Colocated")
    s.wait_condition("invalid", "Ready", "True")
    wrong = pool(s, resources={"requests": {"cpu": "lots"}})
    s.apply("invalid", mode="Colocated", prefill=wrong)
    accepted = s.wait_condition("invalid", "Accepted", "False", "Invalid")
    assert "spec.prefill.resources.requests[cpu] is lots" in accepted["message"]
    ready = s.condition("invalid", "Ready")
    assert ready["status"] == "False" and "the last accepted spec is served meanwhile" in ready["message"]
    assert s.condition("invalid", "Available")["status"] == "True"
    assert s.condition("invalid", "Stalled")["status"] == "True"
    # The old spec goes on being reconciled.
    s.kubectl("delete", "service/invalid-router", "-n", s.namespace)
    s.wait(
        lambda: s.kubectl.find("service", "invalid-router", "-n", s.namespace) is not None,
        20,
        "the service of the accepted spec",
    )
    s.apply("invalid", mode="Colocated")
    s.wait_condition("invalid", "Accepted", "True")
    s.wait_condition("invalid", "Ready", "True")


def test_what_only_the_api_server_refuses_is_refused_before_anything_is_changed(s: Stage) -> None:
    s.apply("refused", mode="Colocated")
    s.wait_condition("refused", "Ready", "True")
    mount = {"name": "nowhere", "mountPath": "/x"}
    overlay = {"spec": {"containers": [{"name": "worker", "volumeMounts": [mount]}]}}
    both = {"prefill": pool(s, template=overlay), "decode": pool(s)}
    s.apply("refused", mode="Colocated", **both)
    accepted = s.wait_condition("refused", "Accepted", "False", "Invalid")
    assert "nowhere" in accepted["message"]
    sets = s.kubectl.get("statefulset", "refused-prefill", "-n", s.namespace)
    container = sets["spec"]["template"]["spec"]["containers"][0]
    assert "nowhere" not in [item["name"] for item in container["volumeMounts"]]


def test_what_another_owner_holds_is_not_touched(s: Stage) -> None:
    taken = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "taken-routing", "namespace": s.namespace},
        "data": {"mine": "yes"},
    }
    s.kubectl("create", "-f", "-", stdin=json.dumps(taken))
    s.apply("taken", mode="Colocated")
    accepted = s.wait_condition("taken", "Accepted", "False", "OwnedByAnother")
    assert "ConfigMap taken-routing exists and was not made by this operator" in accepted["message"]
    assert s.kubectl.get("configmap", "taken-routing", "-n", s.namespace)["data"] == {"mine": "yes"}
    assert s.kubectl.find("statefulset", "taken-decode", "-n", s.namespace) is None
    s.kubectl("delete", "configmap", "taken-routing", "-n", s.namespace)
    s.wait_condition("taken", "Ready", "True")


def test_a_bad_image_is_told_in_ten_seconds_and_never_blocks_its_correction(s: Stage) -> None:
    s.apply("image", mode="Colocated", engine={"image": "phasesplit.dev/broken:1"})
    s.wait(lambda: bool(s.pods("image")), 20, "pods")
    ready = s.wait_condition("image", "Ready", "False", "ImagePullBackOff", timeout_s=10)
    assert "Back-off pulling image phasesplit.dev/broken:1" in ready["message"]
    s.apply("image", mode="Colocated", engine={"image": "phasesplit.dev/worker:2"})
    s.wait_condition("image", "Ready", "True", timeout_s=40)


def test_a_failed_model_load_is_told_in_the_workers_words(s: Stage) -> None:
    s.kubelet.script.failed["load-decode-0"] = "The model at /models/none has no config.json."
    s.apply("load", mode="Colocated")
    ready = s.wait_condition("load", "Ready", "False", "ModelLoadFailed", timeout_s=20)
    assert "load-decode-0: The model at /models/none has no config.json." in ready["message"]
    del s.kubelet.script.failed["load-decode-0"]
    s.wait_condition("load", "Ready", "True")


def test_a_new_template_reaches_the_pods_one_at_a_time_with_something_serving(s: Stage) -> None:
    s.apply("rollout", mode="Split", adoption={"dwellSeconds": 1}, **apart(s))
    s.wait_condition("rollout", "Ready", "True")
    before = {pod["metadata"]["uid"] for pod in s.pods("rollout")}
    s.apply("rollout", mode="Split", adoption={"dwellSeconds": 1}, engine={"blockSize": 32}, **apart(s))
    lowest = 2

    def replaced() -> bool:
        nonlocal lowest
        pods = s.pods("rollout")
        ready = [pod for pod in pods if is_ready(pod)]
        lowest = min(lowest, len(ready))
        return not before & {pod["metadata"]["uid"] for pod in pods} and len(ready) == 2

    s.wait(replaced, 60, "both pods to be replaced")
    assert lowest >= 1  # a look may come too late for the pod that is away
    s.wait_condition("rollout", "Ready", "True")


def test_a_change_of_replicas_or_targets_restarts_nothing(s: Stage) -> None:
    s.apply("grow", mode="Colocated")
    s.wait_condition("grow", "Ready", "True")
    before = {pod["metadata"]["uid"] for pod in s.pods("grow")}
    more = {"prefill": pool(s), "decode": pool(s, replicas={"min": 2, "max": 3})}
    s.apply("grow", mode="Colocated", slo=[{"name": "fast", "ttftMilliseconds": 100}], **more)
    s.wait(lambda: len(s.pods("grow")) == 3, 20, "a third worker")
    s.wait_condition("grow", "Ready", "True")
    assert before < {pod["metadata"]["uid"] for pod in s.pods("grow")}
    assert s.table("grow")["classes"][0]["name"] == "fast"


def test_a_paused_object_gets_status_and_nothing_else(s: Stage) -> None:
    s.apply("paused", mode="Colocated")
    s.wait_condition("paused", "Ready", "True")
    s.apply("paused", mode="Colocated", paused=True, router={"replicas": 2})
    s.wait_condition("paused", "Reconciling", "False", "Paused")
    s.kubectl("delete", "service/paused-decode", "-n", s.namespace)
    written = [event for event in s.is_quiet(5) if event.name.startswith("paused")]
    assert {(event.resource, event.subresource) for event in written} <= {("disaggregatedmodels", "status")}
    assert s.kubectl.find("service", "paused-decode", "-n", s.namespace) is None
    s.apply("paused", mode="Colocated")
    s.wait(
        lambda: s.kubectl.find("service", "paused-decode", "-n", s.namespace) is not None, 20, "the service"
    )


def test_replicas_belong_to_others_when_the_policy_says_so(s: Stage) -> None:
    wide = {"prefill": pool(s), "decode": pool(s, replicas={"min": 1, "max": 4})}
    s.apply("external", mode="Colocated", scaling={"policy": "External"}, **wide)
    s.wait_condition("external", "Ready", "True")
    s.kubectl("scale", "statefulset/external-decode", "-n", s.namespace, "--replicas=2")
    s.wait(lambda: len(s.pods("external")) == 3, 20, "the autoscaler's worker")
    s.wait_condition("external", "Ready", "True")
    time.sleep(3)
    found = s.kubectl.get("statefulset", "external-decode", "-n", s.namespace)
    assert found["spec"]["replicas"] == 2


def test_an_immutable_change_makes_the_statefulset_anew_and_adopts_its_pods(s: Stage) -> None:
    hub = {"source": {"huggingFace": {"repository": "a/b"}}, "cache": {"storage": "1Gi"}}
    s.apply("claims", mode="Colocated", model={"source": {"huggingFace": {"repository": "a/b"}}})
    s.wait_condition("claims", "Ready", "True")
    first = s.kubectl.get("statefulset", "claims-decode", "-n", s.namespace)["metadata"]["uid"]
    s.apply("claims", mode="Colocated", model=hub)

    def remade() -> bool:
        found = s.kubectl.find("statefulset", "claims-decode", "-n", s.namespace)
        return found is not None and found["metadata"]["uid"] != first

    s.wait(remade, 40, "the StatefulSet to be made anew")
    owners = {
        reference["uid"]
        for pod in s.pods("claims")
        for reference in pod["metadata"].get("ownerReferences", ())
        if pod["metadata"]["name"] == "claims-decode-0"
    }
    assert first not in owners


def test_under_load_numbers_are_written_every_30_s_at_most(s: Stage) -> None:
    s.apply("busy", mode="Colocated")
    s.wait_condition("busy", "Ready", "True")
    s.kubelet.script.in_flight, s.kubelet.script.idle_s = 3, 0.0
    try:
        s.wait_condition("busy", "SLOMet", "True")
        time.sleep(2)
        written = [event for event in s.is_quiet(20) if event.name == "busy"]
        assert len(written) <= 1
    finally:
        s.kubelet.script.in_flight, s.kubelet.script.idle_s = 0, 1e6


def test_deleting_the_object_takes_its_children_along(s: Stage) -> None:
    s.apply("leaving", mode="Colocated")
    s.wait_condition("leaving", "Ready", "True")
    s.kubectl("delete", "dm", "leaving", "-n", s.namespace, "--timeout=20s")
    kinds = "statefulsets,deployments,services,configmaps,secrets,controllerrevisions,pods"

    def gone() -> bool:
        selector = f"{names.LABEL_MODEL}=leaving"
        return not s.kubectl.get(kinds, "-n", s.namespace, "-l", selector)["items"]

    s.wait(gone, 60, "all children to be gone")
