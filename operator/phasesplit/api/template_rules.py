"""What a pool's template overlay may not change, because the pool would no longer be ours.

Arguments above all: through them the two pools could differ in data type or block size, and then no
KV could pass between them.
"""

from collections.abc import Iterator
from typing import Any

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest

Finding = tuple[str, str, str]

WORKER_CONTAINER = "worker"
OWNED_ENV = ("POD_NAME", "NODE_NAME", "POD_IP")
OWNED_LABELS = (names.LABEL_PART_OF, names.LABEL_COMPONENT)
OWNED_POD_FIELDS = {
    "schedulingGates": "placement decides it; use spec.placement.binding",
    "serviceAccountName": "the operator makes the account",
    "serviceAccount": "the operator makes the account",
    "terminationGracePeriodSeconds": "it follows spec.rollout.drainSeconds; use that",
    "restartPolicy": "pods of a StatefulSet always restart",
    "nodeName": "placement decides it; use nodeSelector or affinity of the pool",
    "runtimeClassName": "use runtimeClassName of the pool",
    "nodeSelector": "placement must see it; use nodeSelector of the pool",
    "affinity": "placement must see it; use affinity of the pool",
    "tolerations": "placement must see them; use tolerations of the pool",
    "topologySpreadConstraints": "placement must see them; use topologySpreadConstraints of the pool",
}
OWNED_CONTAINER_FIELDS = {
    "command": "the program is ours; use spec.engine.image for another build of it",
    "args": "both pools need equal flags; use spec.engine.args",
    "ports": "ports are fixed",
    "resources": "placement must see them; use resources and gpu of the pool",
}


def find_template_problems(field: str, template: Manifest) -> Iterator[Finding]:
    """(field, value, what is wrong and what to do) for one overlay."""
    yield from _find_patches(field, template)
    metadata = template.get("metadata") or {}
    pod = template.get("spec") or {}
    for part, value in (("metadata", metadata), ("spec", pod)):
        if not isinstance(value, dict):
            yield f"{field}.{part}", str(value), "but must be a map"
            return
    for part in template:
        if part not in ("metadata", "spec"):
            yield f"{field}.{part}", "", "is no part of a pod template; use metadata and spec"
    yield from _find_label_problems(field, metadata)
    for key, remedy in OWNED_POD_FIELDS.items():
        if key in pod:
            yield f"{field}.spec.{key}", _show(pod[key]), f"but {remedy}"
    yield from _find_container_problems(field, pod)


def _find_label_problems(field: str, metadata: Manifest) -> Iterator[Finding]:
    for kind in ("labels", "annotations"):
        for key, value in (metadata.get(kind) or {}).items():
            if key in OWNED_LABELS or key.startswith(f"{names.GROUP}/"):
                remedy = "but the operator knows its pods by it; remove it"
                yield f"{field}.metadata.{kind}[{key}]", _show(value), remedy


def _find_container_problems(field: str, pod: Manifest) -> Iterator[Finding]:
    containers = pod.get("containers") or []
    for index, container in enumerate(containers):
        where = f"{field}.spec.containers[{index}]"
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            yield where, "", f"has no name; containers merge by name, and ours is named {WORKER_CONTAINER}"
            continue
        if container["name"] == WORKER_CONTAINER:
            yield from _find_worker_problems(f"{field}.spec.containers[{WORKER_CONTAINER}]", container)


def _find_worker_problems(where: str, container: Manifest) -> Iterator[Finding]:
    for key, remedy in OWNED_CONTAINER_FIELDS.items():
        if key in container:
            yield f"{where}.{key}", _show(container[key]), f"but {remedy}"
    for variable in container.get("env") or []:
        if isinstance(variable, dict) and variable.get("name") in OWNED_ENV:
            yield f"{where}.env", str(variable["name"]), "but the operator sets it; remove it"


def _find_patches(field: str, value: Any) -> Iterator[Finding]:
    if isinstance(value, dict):
        for key, child in value.items():
            if str(key).startswith("$"):
                remedy = "a directive that overlays do not have; write the whole value, or null to remove it"
                yield field, str(key), remedy
            yield from _find_patches(f"{field}.{key}", child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _find_patches(f"{field}[{index}]", child)


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
