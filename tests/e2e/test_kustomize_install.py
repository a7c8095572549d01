"""Installed by `kubectl apply -k`, as the README says it, and gone again by `kubectl delete -k`."""

import json
from collections.abc import Iterator

import pytest

from demo.chat import SHORT_QUESTION, Chat
from demo.subject import Subject
from demo.target import OPERATOR_NAMESPACE, PortForward, Target, choose_target
from testbed.paths import repository_root

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BASE = repository_root() / "manifests" / "base"
OPERATOR = "deployment/phasesplit-operator"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    found = choose_target(print)
    found.kubectl("apply", "-k", BASE, timeout_s=60)
    images = {part: found.images[f"images.{part}.repository"] + ":dev" for part in ("control", "worker")}
    # The published images are not on the testbed's nodes.
    variables = [f"PHASESPLIT_{part.upper()}_IMAGE={image}" for part, image in images.items()]
    found.kubectl("set", "env", "-n", OPERATOR_NAMESPACE, OPERATOR, *variables)
    found.kubectl("set", "image", "-n", OPERATOR_NAMESPACE, OPERATOR, f"*={images['control']}")
    found.kubectl("rollout", "status", "-n", OPERATOR_NAMESPACE, OPERATOR, "--timeout=120s", timeout_s=130)
    yield found
    found.kubectl("delete", "-k", BASE, "--timeout=120s", timeout_s=130)
    # Other tests count on the definition being there.
    found.kubectl("apply", "--server-side", "-k", repository_root() / "crds")


def test_an_object_serves_without_helm_and_without_prometheus(target: Target) -> None:
    subject = Subject(target)
    subject.manifest["spec"].pop("metrics")
    subject.apply(mode="Colocated")
    try:
        subject.wait_ready(300)
        with PortForward(target.kubectl, subject.namespace, f"{subject.name}-router", 80) as forward:
            answer = Chat(forward.url, subject.model).ask("short", SHORT_QUESTION, 8)
        assert answer.text
        available = {item["type"]: item for item in subject.status()["conditions"]}["MetricsAvailable"]
        assert (available["status"], available["reason"]) == ("False", "NotConfigured"), json.dumps(available)
        table = target.kubectl("get", "dm", "-o", "wide", "-n", subject.namespace)
        assert "Colocated" in table
    finally:
        subject.delete()
