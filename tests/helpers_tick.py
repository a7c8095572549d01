"""One object with many workers under load, as one pass of the operator sees it: for the cost of a tick."""

from bisect import bisect_right
from typing import Any

from helpers_operator import make_child, make_model, make_pod
from helpers_planner import GPU as SMALL_GPU
from helpers_traces import random_trace
from helpers_traffic import batch, in_flight, served_trace
from phasesplit.api import names
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import (
    ClassReport,
    LinkSample,
    ModelFacts,
    RouterReport,
    WorkerReport,
    WorkerState,
)
from phasesplit.api.routing import RoutingTable
from phasesplit.api.traces import MAX_ROWS
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.cluster.router_client import RouterAnswer
from phasesplit.cluster.snapshot import Snapshot
from phasesplit.operator.decide import decide
from phasesplit.operator.memory import ObjectMemory
from phasesplit.operator.observation import observe
from phasesplit.operator.placing import Placer
from phasesplit.operator.situation import Decisions, MetricsState, Situation
from phasesplit.operator.traffic import TrafficBook
from phasesplit.planner.replay import replay
from phasesplit.planner.replay_schedule import ReplayRecord, build_replay, mark_of

GPU = "nvidia.com/gpu"
LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16")


RATE_PER_WORKER = 0.35  # requests per second


class BusyObject:
    """An object with so many workers on nodes of eight GPUs, at a load that never stands still."""

    def __init__(self, workers: int, *, mode: str = "Auto", traced: bool = False) -> None:
        each = workers // 2
        pool: dict[str, Any] = {"gpu": {"count": 1}, "replicas": {"min": each, "max": each}}
        slo = [{"name": "default", "ttftMilliseconds": 8000, "tpotMilliseconds": 40}]
        self.spec = DisaggregatedModelSpec.model_validate(
            {"model": {"source": {"path": "/m"}}, "mode": mode, "prefill": pool, "decode": pool, "slo": slo}
        )
        self.memory = ObjectMemory("uid-chat")
        self.now_s = 1000.0
        self._traffic = _Traffic(RATE_PER_WORKER * workers, self.now_s) if traced else None
        if self._traffic is not None:  # reading what is old is no part of a tick
            self._traffic.tell(self.memory.traffic, self.now_s)
        self._placer = Placer()
        self._live: RoutingTable | None = None
        self._nodes = tuple(_node(f"n{index}") for index in range(-(-workers // 8)))
        self._node_of = {
            f"chat-{pool}-{index}": f"n{(offset + index) // 8}"
            for pool, offset in ((Pool.PREFILL, 0), (Pool.DECODE, each))
            for index in range(each)
        }
        self._pods = tuple(_pod(name, node) for name, node in self._node_of.items())
        self._children = {
            ("StatefulSet", f"chat-{pool}"): make_child(
                "StatefulSet", f"chat-{pool}", spec={"replicas": each}
            )
            for pool in Pool
        }
        self._reports = [_worker(name, node) for name, node in self._node_of.items()]
        prefill = sorted({node for name, node in self._node_of.items() if "prefill" in name})
        decode = sorted({node for name, node in self._node_of.items() if "decode" in name})
        for source in prefill:
            for target in decode:
                self.memory.links.add(_samples(source, target), self.now_s)

    def replay(self) -> None:
        """Have the last minutes replayed, as far as the decisions are concerned."""
        trace = random_trace(1, RATE_PER_WORKER * len(self._pods), 400, 4000, 200)
        given = self.tick().mode_input
        job = build_replay(given, served_trace(trace, self.now_s - trace[-1].at_s - 10.0))
        if job is None:
            raise ValueError("there is nothing to replay")
        self.memory.replay = ReplayRecord(mark_of(given, job), replay(job))

    def tick(self) -> Decisions:
        """One pass's decisions, two seconds after the last."""
        self.now_s += 2.0
        rate = RATE_PER_WORKER * len(self._pods) * (1 + self.now_s % 7 / 100)
        load = ClassReport(
            name="default",
            arrival_rate_per_s=rate,
            attained=300,
            finished=500,
            ttft_p95_s=4.0,
            tpot_p95_s=0.03,
            mean_prompt_tokens=4000 + self.now_s % 11,
            mean_output_tokens=200 + self.now_s % 5,
        )
        report = RouterReport(in_flight=50, workers=self._reports, classes=[load])
        self.memory.answers = (RouterAnswer("router", report),)
        if self._traffic is not None:
            self._traffic.tell(self.memory.traffic, self.now_s)
        snapshot = Snapshot(make_model(), self._children, self._pods, self._nodes)
        situation = Situation(
            now_s=self.now_s,
            snapshot=snapshot,
            spec=self.spec,
            observation=observe(snapshot, self.memory.answers, dict.fromkeys(Pool, "h"), managed=False),
            live_table=self._live,
            metrics=MetricsState(configured=False),
            other_pods=(),
            pod_specs=dict.fromkeys(Pool, _POD_SPEC),
        )
        decisions = decide(situation, self.memory, self._placer)
        self._live = decisions.table
        return decisions


class _Traffic:
    """What a router tells of its requests, which take eight seconds each."""

    LEAD_S = 150.0  # of requests before the first tick
    TAKES_S = 8.0

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self._begin_s = now_s - self.LEAD_S
        self._trace = random_trace(1, rate_per_s, int(rate_per_s * (self.LEAD_S + 300)), 4000, 200)
        self._ended = 0

    def tell(self, book: TrafficBook, now_s: float) -> None:
        """Answers until the reader knows all."""
        router_s = now_s - self._begin_s
        come, ended = (
            bisect_right(self._trace, until_s, key=lambda arrival: arrival.at_s)
            for until_s in (router_s, router_s - self.TAKES_S)
        )
        unended = self._trace[ended:come]
        while self._ended < ended:
            rows = self._trace[self._ended : ended][:MAX_ROWS]
            answer = batch(
                "e",
                self._ended,
                [arrival.at_s for arrival in rows],
                router_s,
                total=ended,
                prompt_tokens=[arrival.prompt_tokens for arrival in rows],
                output_tokens=[arrival.output_tokens for arrival in rows],
                **in_flight(
                    [arrival.at_s for arrival in unended],
                    open_prompt_tokens=[arrival.prompt_tokens for arrival in unended],
                ),
            )
            book.add("router", answer, now_s)
            self._ended += len(rows)


_POD_SPEC: dict[str, Any] = {"containers": [{"name": "worker", "resources": {"limits": {GPU: "1"}}}]}


def _node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {names.HOSTNAME_LABEL: name}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _pod(name: str, node: str) -> dict[str, Any]:
    pool = Pool.PREFILL if "prefill" in name else Pool.DECODE
    pod = make_pod(name, pool=pool, ready=True, node=node, annotations={names.ANNOTATION_TEMPLATE_HASH: "h"})
    pod["spec"]["containers"] = _POD_SPEC["containers"]
    return pod


def _worker(name: str, node: str) -> WorkerReport:
    return WorkerReport(
        pod=name,
        node=node,
        pool=Pool.PREFILL if "prefill" in name else Pool.DECODE,
        role=Role.COLOCATED,
        role_version=0,
        state=WorkerState.READY,
        engine_id=name,
        device="NVIDIA L4",
        model=ModelFacts(
            name="m", fingerprint="f", weights_bytes=16 << 30, kv_layout=LAYOUT, max_model_length=16384
        ),
        kv_total_blocks=20_000,
        profile=SMALL_GPU,
    )


def _samples(source: str, target: str) -> list[LinkSample]:
    sizes = [(64 << 20) + extra for extra in range(3)]
    return [
        LinkSample(
            from_node=source,
            to_node=target,
            from_pod="p",
            to_pod="d",
            transport="TCP",
            bytes=size,
            busy_s=size / 25e9,
            age_s=0.0,
        )
        for size in sizes
    ]
