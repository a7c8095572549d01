"""No worker is asked for that has no node, and the status says what is missing. The real planner decides."""

from collections.abc import Mapping
from typing import Any

import pytest

from helpers_operator import make_child, make_model, make_pod
from phasesplit.api import names
from phasesplit.api.conditions import Reason
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import (
    ClassReport,
    ModelFacts,
    RouterReport,
    StepProfile,
    WorkerReport,
    WorkerState,
)
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.decide import decide
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import observe
from phasesplit.operator.placing import Placer
from phasesplit.operator.situation import Decisions, MetricsState, Situation

GPU = "nvidia.com/gpu"
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
PROFILE = StepProfile(base_s=0.005, per_prefill_token_s=0.002, per_decode_sequence_s=0.01, num_samples=100)
# More than any of the clusters below can serve.
BUSY = ClassReport(
    name="default",
    arrival_rate_per_s=40,
    finished=500,
    attained=100,
    mean_prompt_tokens=600,
    mean_output_tokens=100,
)


def node(name: str, cpus: int, gpus: int = 0) -> dict[str, Any]:
    offered = {"cpu": str(cpus), "memory": "64Gi", "pods": "110"} | ({GPU: str(gpus)} if gpus else {})
    return {
        "metadata": {"name": name, "labels": {names.HOSTNAME_LABEL: name}},
        "spec": {},
        "status": {"allocatable": offered, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def template(cpus: int, gpus: int = 0) -> dict[str, Any]:
    requests = {"cpu": str(cpus)} | ({GPU: str(gpus)} if gpus else {})
    return {"containers": [{"resources": {"requests": requests}}]}


class Cluster:
    """One object on a few nodes; what is decided is scheduled, each pod where it fits first."""

    def __init__(self, nodes: Mapping[str, tuple[int, int]], cpus: Mapping[Pool, int], **spec: Any) -> None:
        self.nodes = {name: node(name, *size) for name, size in nodes.items()}
        self.free = {name: size[0] for name, size in nodes.items()}
        self.cpus = cpus
        gpus = {"gpu": {"count": spec.pop("gpus", 0)}}
        bounds = {pool: {"replicas": spec.pop(pool.value, {"min": 1, "max": 1})} for pool in Pool}
        self.num_gpus = gpus["gpu"]["count"]
        self.spec = DisaggregatedModelSpec.model_validate(
            {
                "model": {"source": {"path": "/m"}},
                "prefill": gpus | bounds[Pool.PREFILL],
                "decode": gpus | bounds[Pool.DECODE],
                **spec,
            }
        )
        self.replicas: dict[Pool, int] = {}
        self.node_of: dict[tuple[Pool, int], str | None] = {}
        self.memory, self.placer, self.now_s = ObjectMemory("uid-chat"), Placer(), 1000.0

    @property
    def num_pending(self) -> int:
        return sum(name is None for name in self.node_of.values())

    def decide(self) -> Decisions:
        """One pass, and what the StatefulSets and the scheduler make of it."""
        self.now_s += 5
        workers = [self._report(*key, name) for key, name in self.node_of.items() if name is not None]
        report = RouterReport(workers=workers, classes=[BUSY], idle_s=0)
        self.memory.answers = (RouterAnswer("router", report),)
        children = {
            ("StatefulSet", f"chat-{pool}"): make_child(
                "StatefulSet", f"chat-{pool}", spec={"replicas": count}
            )
            for pool, count in self.replicas.items()
        }
        pods = tuple(self._pod(pool, ordinal, name) for (pool, ordinal), name in self.node_of.items())
        snapshot = Snapshot(make_model(), children, pods, tuple(self.nodes.values()))
        decisions = decide(
            Situation(
                now_s=self.now_s,
                snapshot=snapshot,
                spec=self.spec,
                observation=observe(snapshot, self.memory.answers, dict.fromkeys(Pool, "h"), managed=True),
                live_table=None,
                metrics=MetricsState(configured=False),
                other_pods=(),
                pod_specs={pool: template(self.cpus[pool], self.num_gpus) for pool in Pool},
            ),
            self.memory,
            self.placer,
        )
        self.replicas = dict(decisions.scaling.replicas) or self.replicas
        self._schedule()
        return decisions

    def _pod(self, pool: Pool, ordinal: int, node_name: str | None) -> Any:
        pod = make_pod(
            f"chat-{pool}-{ordinal}",
            pool=pool,
            ready=node_name is not None,
            node=node_name,
            annotations={names.ANNOTATION_TEMPLATE_HASH: "h"},
        )
        return {**pod, "spec": pod["spec"] | template(self.cpus[pool], self.num_gpus)}

    @staticmethod
    def _report(pool: Pool, ordinal: int, node_name: str) -> WorkerReport:
        return WorkerReport(
            pod=f"chat-{pool}-{ordinal}",
            node=node_name,
            pool=pool,
            role=Role.COLOCATED,
            role_version=3,
            state=WorkerState.READY,
            engine_id="e",
            model=ModelFacts(
                name="m", fingerprint="f", weights_bytes=10, kv_layout=LAYOUT, max_model_length=2048
            ),
            kv_total_blocks=100,
            profile=PROFILE,
        )

    def _schedule(self) -> None:
        for key in [key for key in self.node_of if key[1] >= self.replicas[key[0]]]:
            gone = self.node_of.pop(key)
            if gone is not None:
                self.free[gone] += self.cpus[key[0]]
        for pool, count in self.replicas.items():
            for ordinal in range(count):
                if self.node_of.get((pool, ordinal)) is None:
                    self.node_of[pool, ordinal] = self._fit(pool)

    def _fit(self, pool: Pool) -> str | None:
        for name, free in self.free.items():
            has_gpu = not self.num_gpus or GPU in self.nodes[name]["status"]["allocatable"]
            if free >= self.cpus[pool] and has_gpu:
                self.free[name] -= self.cpus[pool]
                return name
        return None


WIDE = {"min": 1, "max": 8}
# Nodes as (cpus, gpus); the workers' cpus; the spec; the most workers that ever fit.
CROWDED = {
    "two nodes, both pools may grow": (
        {"a": (3, 0), "b": (3, 0)},
        (1, 1),
        {"prefill": WIDE, "decode": WIDE},
        6,
    ),
    "decode workers are larger": ({"a": (5, 0), "b": (4, 0)}, (1, 2), {"prefill": WIDE, "decode": WIDE}, 8),
    "prefill workers are larger": ({"a": (5, 0), "b": (4, 0)}, (3, 1), {"prefill": WIDE, "decode": WIDE}, 7),
    "room for one": ({"a": (1, 0)}, (1, 1), {"prefill": WIDE, "decode": WIDE}, 1),
    "colocated": (
        {"a": (3, 0), "b": (2, 0)},
        (1, 1),
        {"mode": "Colocated", "prefill": WIDE, "decode": WIDE},
        5,
    ),
    "split": ({"a": (3, 0), "b": (2, 0)}, (1, 1), {"mode": "Split", "prefill": WIDE, "decode": WIDE}, 5),
}


@pytest.mark.parametrize("name", CROWDED)
def test_no_worker_waits_for_a_node_that_does_not_exist(name: str) -> None:
    nodes, (prefill, decode), spec, most = CROWDED[name]
    cluster = Cluster(nodes, {Pool.PREFILL: prefill, Pool.DECODE: decode}, **spec)
    seen = []
    for _ in range(8):
        decisions = cluster.decide()
        assert cluster.num_pending == 0
        seen.append(dict(cluster.replicas))
    assert seen[-1] == seen[-2] == seen[-3]
    assert cluster.replicas[Pool.DECODE] >= 1
    assert sum(cluster.replicas.values()) <= most
    assert decisions.scaling.reason is Reason.AT_LIMIT
    assert "are what fits" in decisions.scaling.message


SHORT: dict[str, tuple[dict[str, tuple[int, int]], dict[str, Any], Reason, str]] = {
    "fewer nodes than the bounds ask for": (
        {"a": (4, 0)},
        {"prefill": {"min": 3, "max": 3}, "decode": {"min": 3, "max": 3}},
        Reason.UNSCHEDULABLE,
        "of its 3 workers",
    ),
    "no node offers a GPU": (
        {"a": (8, 0)},
        {"gpus": 1},
        Reason.NO_GPU_RESOURCE,
        "no node offers nvidia.com/gpu: install its device plugin, or set prefill.gpu.count: 0",
    ),
    "one GPU for two pools": ({"a": (8, 1)}, {"gpus": 1}, Reason.NOT_ENOUGH_GPUS, "lacks 1 nvidia.com/gpu"),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_has_no_room_is_told_pass_after_pass(name: str) -> None:
    nodes, spec, reason, sentence = SHORT[name]
    cluster = Cluster(nodes, {Pool.PREFILL: 1, Pool.DECODE: 1}, **spec)
    for _ in range(4):
        plan = cluster.decide().plan
        assert plan.condition_status == "False"
        assert plan.reason is reason
        assert sentence in plan.message


def test_nothing_is_told_when_all_have_room_or_others_choose_the_number() -> None:
    cpus = {Pool.PREFILL: 1, Pool.DECODE: 1}
    assert Cluster({"a": (4, 0)}, cpus).decide().plan.condition_status == "True"
    external = Cluster({"a": (1, 0)}, cpus, scaling={"policy": "External"})
    external.replicas = {Pool.PREFILL: 0, Pool.DECODE: 1}
    assert external.decide().plan.condition_status == "True"
