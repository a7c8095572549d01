"""What restarts a pod, what changes a template, and what an operator upgrade must leave alone."""

from dataclasses import replace
from typing import Any

import pytest

from helpers_resources import SETTINGS, build_context
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit.resources.children import build_children, keep_template, template_hash
from phasesplit.resources.hashes import ANNOTATION_SPEC_HASH

TEAM = {"metadata": {"annotations": {"team": "search"}}}
OTHER_IMAGE = {"spec": {"containers": [{"name": "worker", "image": "example.org/other:2"}]}}

# (what changes, hashes of prefill and decode that change)
RESTARTS: list[tuple[str, dict[str, Any], set[Pool]]] = [
    ("image", {"engine": {"image": "example.org/other:2"}}, {Pool.PREFILL, Pool.DECODE}),
    ("flag", {"engine": {"args": ["--max-num-seqs", "8"]}}, {Pool.PREFILL, Pool.DECODE}),
    ("data type", {"model": {"source": {"path": "/m"}, "dtype": "Float32"}}, {Pool.PREFILL, Pool.DECODE}),
    ("deadline", {"transfer": {"deadlineMilliseconds": 700}}, {Pool.PREFILL, Pool.DECODE}),
    ("node of one pool", {"prefill": {"nodeSelector": {"a": "b"}}}, {Pool.PREFILL}),
    ("overlay of one pool", {"decode": {"template": TEAM}}, {Pool.DECODE}),
    ("image of one pool", {"decode": {"template": OTHER_IMAGE}}, {Pool.DECODE}),
    ("replicas", {"prefill": {"replicas": {"min": 1, "max": 9}}}, set()),
    ("targets", {"slo": [{"name": "fast", "tpotMilliseconds": 20}]}, set()),
    ("mode", {"mode": "Split", "fallback": "Never"}, set()),
    ("chunk budget", {"colocated": {"maxBatchedTokens": 64}}, set()),
    ("drain", {"rollout": {"drainSeconds": 7}}, set()),
    ("binding", {"placement": {"binding": "Gated"}}, set()),
    ("router", {"router": {"replicas": 3}}, set()),
    ("a default written out", {"engine": {"blockSize": 16}, "prefill": {"gpu": {"count": 1}}}, set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"), [case[1:] for case in RESTARTS], ids=[c[0] for c in RESTARTS]
)
def test_what_needs_a_restart(change: dict[str, Any], expected: set[Pool]) -> None:
    before, after = build_context(), build_context(change)
    changed = {pool for pool in Pool if template_hash(before, pool) != template_hash(after, pool)}
    assert changed == expected


def test_pods_carry_the_hash() -> None:
    context = build_context()
    for child in build_children(context, RoutingTable()):
        if child["kind"] == "StatefulSet":
            pool = Pool(child["metadata"]["labels"]["phasesplit.dev/pool"])
            annotations = child["spec"]["template"]["metadata"]["annotations"]
            assert annotations["phasesplit.dev/template-hash"] == template_hash(context, pool)


def test_an_operator_upgrade_keeps_every_template() -> None:
    newer = replace(SETTINGS, worker_image="example.org/worker:2", control_image="example.org/control:2")
    live = build_children(build_context(), RoutingTable())
    desired = build_children(build_context(settings=newer), RoutingTable())
    kept = [keep_template(new, old) for new, old in zip(desired, live, strict=True)]
    for new, old in zip(kept, live, strict=True):
        assert new["spec"].get("template") == old["spec"].get("template") if "spec" in new else True


@pytest.mark.parametrize(
    "change", [case[1] for case in RESTARTS if case[2]], ids=[c[0] for c in RESTARTS if c[2]]
)
def test_a_users_change_gets_the_new_template(change: dict[str, Any]) -> None:
    newer = replace(SETTINGS, worker_image="example.org/worker:2")
    live = build_children(build_context(), RoutingTable())
    desired = build_children(build_context(change, settings=newer), RoutingTable())
    for new, old in zip(desired, live, strict=True):
        same = new["metadata"].get("annotations", {}).get(ANNOTATION_SPEC_HASH) == old["metadata"].get(
            "annotations", {}
        ).get(ANNOTATION_SPEC_HASH)
        assert (keep_template(new, old) == new) or same
    assert any(
        keep_template(new, old) == new
        for new, old in zip(desired, live, strict=True)
        if new["kind"] == "StatefulSet"
    )


def test_gates_follow_the_decision_even_in_a_kept_template() -> None:
    gated = build_context(gated={Pool.PREFILL: True, Pool.DECODE: True})
    newer = replace(SETTINGS, worker_image="example.org/worker:2")
    live = [c for c in build_children(gated, RoutingTable()) if c["kind"] == "StatefulSet"]
    desired = [
        c for c in build_children(build_context(settings=newer), RoutingTable()) if c["kind"] == "StatefulSet"
    ]
    for new, old in zip(desired, live, strict=True):
        pod = keep_template(new, old)["spec"]["template"]["spec"]
        assert "schedulingGates" not in pod
        assert pod["containers"][0]["image"] == "example.org/worker:1"
        back = keep_template(old, new)["spec"]["template"]["spec"]
        assert back["schedulingGates"] == [{"name": "phasesplit.dev/placement"}]


def test_without_a_live_object_the_template_is_the_desired_one() -> None:
    for child in build_children(build_context(), RoutingTable()):
        assert keep_template(child, None) == child
