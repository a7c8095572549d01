"""All decisions of one pass, with the real planner: what is desired, and that a second pass agrees."""

from dataclasses import replace
from typing import Any

from helpers_operator import make_child, make_model, make_pod
from phasesplit.api import names
from phasesplit.api.conditions import Reason
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import (
    ClassReport,
    LinkSample,
    ModelFacts,
    RouterReport,
    StepProfile,
    WorkerReport,
    WorkerState,
)
from phasesplit.api.routing import RoutingTable, ServedMode
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.decide import decide
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import observe
from phasesplit.operator.placing import Placer
from phasesplit.operator.situation import Decisions, MetricsState, Situation

NODE_OF = {Pool.PREFILL: "a", Pool.DECODE: "b"}
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
PROFILE = StepProfile(base_s=0.005, per_prefill_token_s=0.002, per_decode_sequence_s=0.01, num_samples=100)
NO_PROMETHEUS = MetricsState(configured=False)


def node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {names.HOSTNAME_LABEL: name}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", "memory": "16Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def worker(pool: Pool, fingerprint: str = "f") -> WorkerReport:
    return WorkerReport(
        pod=f"chat-{pool}-0",
        node=NODE_OF[pool],
        pool=pool,
        role=Role.COLOCATED,
        role_version=3,
        state=WorkerState.READY,
        engine_id="e",
        model=ModelFacts(
            name="m", fingerprint=fingerprint, weights_bytes=10, kv_layout=LAYOUT, max_model_length=2048
        ),
        kv_total_blocks=100,
        profile=PROFILE,
    )


class Scene:
    """One object whose two workers and router serve; tests change parts of it."""

    def __init__(self, **spec: Any) -> None:
        self.now_s = 1000.0
        self.spec = DisaggregatedModelSpec.model_validate(
            {
                "model": {"source": {"path": "/m"}},
                "prefill": {"gpu": {"count": 0}},
                "decode": {"gpu": {"count": 0}},
                **spec,
            }
        )
        self.ready = dict.fromkeys(Pool, True)
        self.replicas = dict.fromkeys(Pool, 1)
        self.memory = ObjectMemory("uid-chat")
        self.placer = Placer()
        self.live: RoutingTable | None = None
        self.report = RouterReport(workers=[worker(pool) for pool in Pool], idle_s=500)
        self.metrics = NO_PROMETHEUS

    def link(self, bytes_per_s: float) -> None:
        """Three measurements that agree."""
        sizes = [(1 << 20) + extra for extra in range(3)]
        samples = [
            LinkSample(
                from_node="a",
                to_node="b",
                from_pod="chat-prefill-0",
                to_pod="chat-decode-0",
                transport="TCP",
                bytes=size,
                busy_s=size / bytes_per_s,
                age_s=0,
            )
            for size in sizes
        ]
        self.memory.links.add(samples, self.now_s)

    def decide(self, seconds_later: float = 0.0) -> Decisions:
        """One pass; what it decides is live in the next one."""
        self.now_s += seconds_later
        self.memory.answers = (RouterAnswer("router", self.report),)
        children = {
            ("StatefulSet", f"chat-{pool}"): make_child(
                "StatefulSet", f"chat-{pool}", spec={"replicas": self.replicas[pool]}
            )
            for pool in Pool
        }
        pods = tuple(
            make_pod(
                f"chat-{pool}-0",
                pool=pool,
                ready=self.ready[pool],
                node=NODE_OF[pool],
                annotations={names.ANNOTATION_TEMPLATE_HASH: "h"},
            )
            for pool in Pool
        )
        snapshot = Snapshot(make_model(), children, pods, (node("a"), node("b")))
        observation = observe(snapshot, self.memory.answers, dict.fromkeys(Pool, "h"), managed=False)
        decisions = decide(
            Situation(
                now_s=self.now_s,
                snapshot=snapshot,
                spec=self.spec,
                observation=observation,
                live_table=self.live,
                metrics=self.metrics,
                other_pods=(),
                pod_specs={pool: {"containers": []} for pool in Pool},
            ),
            self.memory,
            self.placer,
        )
        self.live = decisions.table
        return decisions


def test_a_split_is_served_as_soon_as_both_pools_can() -> None:
    scene = Scene(mode="Split")
    scene.ready[Pool.DECODE] = False
    assert scene.decide().table.mode is ServedMode.COLOCATED
    scene.ready[Pool.DECODE] = True
    decisions = scene.decide(5)
    assert decisions.table.mode is ServedMode.SPLIT
    assert decisions.table.default_roles == {Pool.PREFILL: Role.PREFILL, Pool.DECODE: Role.DECODE}
    assert decisions.table.max_model_length == 2048


def test_a_second_pass_over_the_same_facts_decides_the_same() -> None:
    for mode in ("Split", "Colocated", "Auto"):
        scene = Scene(mode=mode)
        scene.link(1e9)
        scene.decide()
        before = scene.decide(1)
        again = scene.decide(1)
        assert again.table is before.table
        assert again.scaling.replicas == before.scaling.replicas
        assert again.plan is before.plan


def test_colocated_never_splits() -> None:
    scene = Scene(mode="Colocated")
    scene.link(1e12)
    assert scene.decide().table.mode is ServedMode.COLOCATED
    assert scene.decide(9999).table.roles == {}


def test_auto_starts_colocated() -> None:
    assert Scene().decide().mode.reason is Reason.NOT_ENOUGH_TRAFFIC


def test_a_slow_link_ends_the_split_and_a_dwell_lies_before_the_return() -> None:
    scene = Scene(mode="Split", adoption={"dwellSeconds": 30}, transfer={"minBandwidth": "100Mi"})
    scene.link(1e9)
    assert scene.decide().table.mode is ServedMode.SPLIT
    scene.now_s += 10
    scene.link(6e6)
    decisions = scene.decide()
    assert (decisions.table.mode, decisions.mode.reason) == (ServedMode.COLOCATED, Reason.LINK_DEGRADED)
    assert decisions.table.reason.startswith("LinkDegraded: ")
    scene.now_s += 10
    scene.link(1e9)
    assert scene.decide().mode.reason is Reason.DWELL
    scene.now_s += 20
    scene.link(1e9)
    assert scene.decide().table.mode is ServedMode.COLOCATED
    scene.now_s += 11
    scene.link(1e9)
    assert scene.decide().table.mode is ServedMode.SPLIT


def test_without_a_fallback_the_split_stays_and_says_why_it_cannot_serve() -> None:
    scene = Scene(mode="Split", fallback="Never")
    scene.decide()
    scene.ready[Pool.PREFILL] = False
    decisions = scene.decide(1)
    assert (decisions.table.mode, decisions.table.colocated_allowed) == (ServedMode.SPLIT, False)
    assert decisions.table.reason.startswith("PoolUnavailable: ")
    assert not decisions.mode.serving
    scene.ready[Pool.PREFILL] = True
    assert scene.decide(1).table.reason == ""


def test_pools_of_different_fingerprints_are_not_paired() -> None:
    scene = Scene(mode="Split")
    scene.decide()
    other = worker(Pool.DECODE, fingerprint="g")
    scene.report = scene.report.model_copy(update={"workers": [worker(Pool.PREFILL), other]})
    assert scene.decide(1).mode.reason is Reason.MISMATCH


def test_replicas_are_not_written_when_they_belong_to_others() -> None:
    for policy in ("External", "Off"):
        scene = Scene(mode="Colocated", scaling={"policy": policy})
        assert scene.decide().scaling.replicas == {}
    assert Scene(mode="Colocated").decide().scaling.replicas == {Pool.PREFILL: 1, Pool.DECODE: 1}


def test_before_prometheus_has_been_asked_replicas_hold() -> None:
    scene = Scene(mode="Colocated", decode={"gpu": {"count": 0}, "replicas": {"min": 1, "max": 4}})
    scene.replicas[Pool.DECODE] = 3
    scene.metrics = replace(NO_PROMETHEUS, configured=True, asked=False)
    decisions = scene.decide()
    assert decisions.scaling.replicas[Pool.DECODE] == 3
    assert decisions.metrics.status == "Unknown"


def test_the_load_of_the_routers_counts_without_a_prometheus() -> None:
    scene = Scene(mode="Colocated")
    busy = ClassReport(
        name="default", arrival_rate_per_s=0.5, finished=30, attained=24, mean_prompt_tokens=100
    )
    scene.report = scene.report.model_copy(update={"classes": [busy], "in_flight": 2, "idle_s": 0.1})
    (load,) = scene.decide().loads
    assert (load.arrival_rate_per_s, load.attainment) == (0.5, 0.8)


def test_versions_go_beyond_what_workers_have_seen() -> None:
    assert Scene(mode="Colocated").decide().table.version == 4


def test_the_report_of_a_pod_that_is_gone_is_history() -> None:
    scene = Scene(mode="Colocated")
    ghost = worker(Pool.DECODE).model_copy(update={"pod": "chat-decode-7"})
    scene.report = scene.report.model_copy(update={"workers": [*scene.report.workers, ghost]})
    assert {item.pod for item in scene.decide().workers} == {"chat-prefill-0", "chat-decode-0"}


def test_a_worker_has_the_role_of_the_table_whatever_its_report_says() -> None:
    scene = Scene(mode="Split")
    scene.link(1e9)
    scene.decide()
    assert {item.pod: item.role for item in scene.decide(1).workers} == {
        "chat-prefill-0": Role.PREFILL,
        "chat-decode-0": Role.DECODE,
    }
    switched = {"chat-decode-0": Role.PREFILL}
    scene.live = scene.live.model_copy(update={"roles": switched})  # type: ignore[union-attr]
    assert {item.role for item in scene.decide(1).workers} == {Role.PREFILL}
