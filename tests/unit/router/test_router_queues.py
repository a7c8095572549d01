"""The queues give room in class order, account waits to the right gate, and leak nothing."""

import asyncio
import random
import time
from typing import Any

import pytest

from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import ModelFacts, StepProfile, WorkerReport, WorkerState
from phasesplit.api.routing import LatencyClass, RoutingTable, ServedMode, TrialTable
from phasesplit_http.errors import ApiError
from phasesplit_router.fleet import Demand, Phase
from phasesplit_router.quarantine import Quarantine
from phasesplit_router.queues import Placement, Queues
from phasesplit_router.snapshot import Address, Snapshot
from phasesplit_router.workers import WorkerBook

HIGH = LatencyClass(name="high", priority=10, ttft_s=1, tpot_s=0.1)
LOW = LatencyClass(name="low", priority=0, ttft_s=1, tpot_s=0.1)
TABLE = RoutingTable(
    mode=ServedMode.SPLIT,
    default_roles={Pool.PREFILL: Role.PREFILL, Pool.DECODE: Role.DECODE},
    classes=(HIGH, LOW),
)
FACTS = ModelFacts(
    name="m",
    fingerprint="f",
    weights_bytes=1,
    kv_layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
    max_model_length=4096,
)


def make(
    table: RoutingTable = TABLE,
    kv_blocks: int = 10_000,
    profile: StepProfile | None = None,
    more: tuple[str, ...] = (),
) -> Queues:
    book = WorkerBook()
    addresses = (
        Address("p", "n", Pool.PREFILL, "h"),
        Address("d", "n", Pool.DECODE, "h"),
        *(Address(pod, "n", Pool.PREFILL, "h") for pod in more),
    )
    book.apply(Snapshot(table, addresses), time.monotonic())
    for pod, worker in book.workers.items():
        worker.take_report(
            WorkerReport(
                pod=pod,
                node="n",
                pool=worker.address.pool,
                role=Role.DECODE,
                role_version=1,
                state=WorkerState.READY,
                engine_id="e",
                model=FACTS,
                kv_total_blocks=kv_blocks,
                profile=profile,
            ),
            time.monotonic(),
        )
    return Queues(book, Quarantine())


def demand(
    name: str,
    latency_class: LatencyClass = LOW,
    prompt_tokens: int = 100,
    mode: ServedMode | None = None,
) -> Demand:
    return Demand(
        request_id=name,
        prompt_tokens=prompt_tokens,
        output_tokens=64,
        ttft_s=latency_class.ttft_s,
        tpot_s=latency_class.tpot_s,
        priority=latency_class.priority,
        mode=mode,
    )


class Order:
    """Places requests and remembers who was placed when."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.placed: list[str] = []
        self.placements: dict[str, Placement] = {}
        self.waits: dict[str, dict[Phase, float]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(
        self, name: str, latency_class: LatencyClass, *, deadline_s: float = 0.0, **fields: Any
    ) -> None:
        async def wait() -> None:
            placement, waits = await self.queues.place(
                demand(name, latency_class, **fields), deadline_s=deadline_s, patience_s=5, longest_s=30
            )
            self.placed.append(name)
            self.placements[name], self.waits[name] = placement, waits

        self.tasks[name] = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def release(self, name: str) -> None:
        self.placements.pop(name).release()
        await asyncio.sleep(0.01)


async def test_classes_come_before_arrival_and_deadlines_before_order() -> None:
    order = Order(make())
    first = [f"high{number}" for number in range(4)] + [f"low{number}" for number in range(4)]
    for name in first[4:]:  # fill the prefill worker, first with what is not ahead of the others
        await order.add(name, LOW)
    for name in first[:4]:
        await order.add(name, HIGH)
    assert sorted(order.placed) == first
    await order.add("late", LOW, deadline_s=9.0)
    await order.add("soon", LOW, deadline_s=2.0)
    await order.add("high", HIGH, deadline_s=99.0)
    assert len(order.placed) == 8
    for name in ("high0", *first[4:], *first[1:4]):
        order.placements[name].first_token()
        await asyncio.sleep(0.01)
    assert order.placed[8:] == ["high", "soon", "late"]
    assert len(order.queues) == 0
    for name in list(order.placements):
        await order.release(name)


async def test_a_big_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    order = Order(make(kv_blocks=100))  # 1,520 tokens
    await order.add("running", LOW, prompt_tokens=1000)
    await order.add("big", LOW, prompt_tokens=900, deadline_s=1.0)
    await order.add("small", LOW, prompt_tokens=10, deadline_s=2.0)
    assert order.placed == ["running"]
    await asyncio.sleep(0.05)
    await order.release("running")
    assert order.placed == ["running", "big", "small"]
    assert order.waits["big"][Phase.DECODE] >= 0.04
    assert order.waits["big"][Phase.PREFILL] < 0.04


async def test_in_a_trial_of_both_modes_one_that_waits_does_not_stop_the_other() -> None:
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "p2": Role.COLOCATED}
    table = RoutingTable(roles=roles, classes=(HIGH, LOW), trial=TrialTable(id="t"))
    queues = make(table, more=("p2",))
    order = Order(queues)
    for number in range(8):
        await order.add(f"split{number}", LOW, mode=ServedMode.SPLIT)
    assert len(queues) == 4
    for number in range(4):
        await order.add(f"colocated{number}", LOW, mode=ServedMode.COLOCATED)
    assert len(queues) == 4
    served_by = {name: order.placements[name].pods for name in order.placed}
    assert {pods for name, pods in served_by.items() if "colocated" in name} == {"p2"}
    assert {pods for name, pods in served_by.items() if "split" in name} == {"p,d"}
    order.placements["split0"].first_token()
    await asyncio.sleep(0.01)
    assert order.placed[-1] == "split4"
    outlooks = [queues.outlook(demand("new", mode=mode), time.monotonic()).num_queued for mode in ServedMode]
    assert outlooks == [3, 3]
    for task in order.tasks.values():
        task.cancel()


async def test_no_worker_is_a_503_after_patience() -> None:
    queues = make()
    queues._book.apply(Snapshot(TABLE.model_copy(update={"name": "obj"}), ()), time.monotonic())
    began_s = time.monotonic()
    with pytest.raises(ApiError) as caught:
        await queues.place(demand("a"), deadline_s=1, patience_s=0.3, longest_s=9)
    assert 0.3 <= time.monotonic() - began_s < 5
    assert (caught.value.status, len(queues)) == (503, 0)
    assert "obj" in caught.value.message


async def test_waiting_for_room_has_an_end_too() -> None:
    order = Order(make())
    for name in ("a", "b", "c", "d"):
        await order.add(name, LOW)
    with pytest.raises(ApiError) as caught:
        await order.queues.place(demand("e"), deadline_s=1, patience_s=9, longest_s=0.3)
    assert "prefill" in caught.value.message
    assert caught.value.reason == "timeout"


async def test_any_mix_of_ends_gives_everything_back() -> None:
    queues = make()
    draw = random.Random(5)

    async def live(number: int) -> None:
        placement, _ = await queues.place(
            demand(f"r{number}", draw.choice((HIGH, LOW)), draw.randint(1, 500)),
            deadline_s=draw.random(),
            patience_s=9,
            longest_s=9,
        )
        try:
            await asyncio.sleep(draw.random() * 0.01)
            if draw.random() < 0.7:
                placement.first_token()
                placement.first_token()
                await asyncio.sleep(draw.random() * 0.01)
        finally:
            placement.release()
            placement.release()

    tasks = [asyncio.create_task(live(number)) for number in range(200)]
    await asyncio.sleep(0.01)
    for task in draw.sample(tasks, 60):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(queues) == 0
    for worker in queues._book.workers.values():
        assert (dict(worker.prefills), dict(worker.prompt_tokens), worker.num_decodes) == ({}, {}, 0)
        assert (worker.context_tokens, worker.kv_tokens, dict(worker.tpots)) == (0, 0, {})


async def test_the_outlook_counts_work_ahead_of_the_class() -> None:
    profile = StepProfile(per_prefill_token_s=0.001, num_samples=100)
    order = Order(make(profile=profile))
    assert order.queues.outlook(demand("x"), time.monotonic()).ttft_s == pytest.approx(0.1)
    for name in ("a", "b"):
        await order.add(name, LOW, prompt_tokens=400)
    for name in ("c", "d"):
        await order.add(name, LOW, prompt_tokens=1000)
    assert order.placed == ["a", "b"]  # 0.8 s of work ahead is enough for one worker
    low = order.queues.outlook(demand("x"), time.monotonic())
    high = order.queues.outlook(demand("x", HIGH), time.monotonic())
    assert low.prefill_wait_s == pytest.approx(2.8)
    assert high.prefill_wait_s == 0.0
    assert low.is_measured
