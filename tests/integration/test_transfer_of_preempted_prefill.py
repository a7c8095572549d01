"""A leg 1 that loses its blocks while they are pulled: the pull goes on from the new ones, first time.

A real engine core, stepped by hand, behind a real transfer side; a second prompt of a higher class
takes the blocks at every stage of the first.
"""

import asyncio
import random
from collections.abc import Callable

import pytest

from helpers_engine import BLOCK_SIZE, Bench, Collector, build_bench, greedy, plain_greedy, random_prompt
from helpers_transfer import MemoryPool, Side, eventually, params_for, running_side
from phasesplit_worker.sequence import RequestKind

pytestmark = pytest.mark.integration

NUM_TOKENS = 7 * BLOCK_SIZE - 5
NUM_BLOCKS = 7
# Neither prompt fits beside the other.
TIGHT_BLOCKS = 14
INTRUDER_TOKENS = 11 * BLOCK_SIZE


# A peer that thinks the lost blocks are still there sends them within this time.
LOST_S = 0.1


def num_sealed(side: Side) -> int:
    manifest = side.manager.manifest("p")
    return 0 if manifest is None else len(manifest.checksums)


def ready_tokens(side: Side) -> int:
    manifest = side.manager.manifest("p")
    return 0 if manifest is None else manifest.num_ready_tokens


async def is_soon(condition: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(eventually, condition)


def intrude(bench: Bench, name: str) -> Collector:
    """A more important prompt takes the leg 1's blocks and overwrites them."""
    preemptions = bench.scheduler.num_preemptions_total
    prompt = random_prompt(random.Random(name), INTRUDER_TOKENS)
    collector = bench.submit(name, prompt, greedy(2), priority=1)
    bench.run(until=lambda: collector.last is not None)
    assert bench.scheduler.num_preemptions_total == preemptions + 1
    return collector


async def finish(bench: Bench, answer: Collector) -> None:
    """Step on, giving the transfer side time between steps as a real model would."""
    while answer.last is None:
        bench.step()
        await asyncio.sleep(0.005)


async def check_pull(bench: Bench, prefill: Side, decode: Side, stages: list[int], *, early: bool) -> None:
    """Preempt the leg 1 after each of `stages` chunks. `early`: what was computed before has arrived."""
    prompt = random_prompt(random.Random(str(stages)), NUM_TOKENS)
    block_ids = decode.engine.allocator.take(NUM_BLOCKS)
    answer = bench.submit("p", prompt, greedy(8), kind=RequestKind.PREFILL)
    params = params_for(prefill, "p", NUM_TOKENS)
    pulling = asyncio.create_task(decode.manager.pull(params, prompt, block_ids)) if early else None
    for number, stage in enumerate(stages):
        bench.run(until=lambda stage=stage: ready_tokens(prefill) >= stage * BLOCK_SIZE)
        num_ready = ready_tokens(prefill) // BLOCK_SIZE
        assert num_ready < NUM_BLOCKS, "it would be finished"
        assert await is_soon(lambda num=num_ready: num_sealed(prefill) == num)
        if early and number == 0:
            assert await is_soon(lambda: len(set(decode.pool.committed)) == stages[0])
        intrude(bench, f"intruder-{number}")
        pulling = pulling or asyncio.create_task(decode.manager.pull(params, prompt, block_ids))
        await asyncio.sleep(LOST_S)
    await finish(bench, answer)
    assert pulling is not None
    result = await asyncio.wait_for(pulling, 10)

    manifest = prefill.manager.manifest("p")
    assert manifest is not None
    assert decode.pool.read(block_ids) == b"".join(
        bytes(bench.loaded.kv_cache.block_view(block_id)) for block_id in manifest.blocks
    )
    assert answer.token_ids == plain_greedy("llama", prompt, 1) == [result.first_token]
    assert (result.num_retries, decode.manager.failures_total) == (0, {})


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("stages", [[1], [2], [3], [5], [6], [2, 6], [5, 4], [3, 4, 5]], ids=str)
async def test_preempted_prefill_is_pulled_without_a_failed_attempt(stages: list[int], early: bool) -> None:
    bench = build_bench(num_blocks=TIGHT_BLOCKS, max_prefill_tokens=BLOCK_SIZE)
    kv = bench.loaded.kv_cache
    async with (
        running_side("prefill", pool=kv) as prefill,  # type: ignore[arg-type]
        running_side("decode", pool=MemoryPool(layout=kv.layout)) as decode,
    ):
        bench.core.set_hooks(prefill.manager.hooks)
        await check_pull(bench, prefill, decode, stages, early=early)
    bench.core.release_held("p")
    assert bench.blocks.num_used_blocks == 0
