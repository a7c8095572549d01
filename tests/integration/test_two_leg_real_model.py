"""The real chat model: 100 prompts, split = local = plain transformers, with preemption and cut transfers."""

import asyncio
import re

import aiohttp
import pytest

from helpers_cutting_proxy import cutting_proxy
from helpers_reference_model import ReferenceModel
from helpers_worker_processes import (
    MODEL,
    WorkerProcess,
    run_local,
    run_two_legs,
    running_workers,
    wait_for_free_blocks,
)
from phasesplit.api import metric_names
from testbed.model import ensure_smollm2

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

COUNTRIES = ("France", "Japan", "Brazil", "Egypt", "Norway", "Kenya", "Peru", "India", "Canada", "Greece")
FORMS = (
    "What is the capital of {}?",
    "Write one sentence about the sea near {}.",
    "Name three animals that live in {}.",
    "Say hello in the main language of {}.",
    "Count from one to five, then name a river of {}.",
    "What do people in {} eat for breakfast?",
    "Is {} larger than Spain? Answer yes or no, and why.",
    "Was ist ein typisches Gericht aus {}? Käsekuchen?",
    "Write a haiku about winter in {}.",
    "Summarise: one pool in {} reads the prompts, the other writes answers. " + "It is a fact. " * 40,
)
QUESTIONS = tuple(form.format(country) for country in COUNTRIES for form in FORMS)
NUM_TOKENS = 12
AT_ONCE = 6
# Fewer blocks than six requests want at their end: some are preempted and computed again.
FEW_KV_BYTES = 16 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A prefill and a decode worker of SmolLM2-135M-Instruct, the latter short of memory for KV."""
    directory = ensure_smollm2()
    with running_workers(tmp_path_factory.mktemp("pair")) as workers:
        prefill = workers.start(directory, "prefill-0", "prefill", "--role", "prefill")
        flags = ("--role", "decode", "--kv-cache-bytes", str(FEW_KV_BYTES))
        decode = workers.start(directory, "decode-0", "decode", *flags)
        reference = ReferenceModel(directory)
        yield reference, prefill.wait_ready(), decode.wait_ready()


async def preemptions(session: aiohttp.ClientSession, worker: WorkerProcess) -> float:
    """How many sequences a worker has dropped and computed again."""
    async with session.get(f"{worker.url}/metrics") as response:
        text = await response.text()
    return sum(
        float(n) for n in re.findall(rf"^{metric_names.NUM_PREEMPTIONS_TOTAL}{{.*}} (.+)$", text, re.M)
    )


async def test_a_hundred_chats_have_the_same_greedy_tokens(pair) -> None:
    reference, prefill, decode = pair
    assert len(set(QUESTIONS)) == 100
    gate = asyncio.Semaphore(AT_ONCE)
    num_cut = 0

    async def one(session: aiohttp.ClientSession, number: int) -> list[str]:
        nonlocal num_cut
        messages = [{"role": "user", "content": QUESTIONS[number]}]
        body = {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
        async with gate:
            if number % 10 == 3:  # its first connection breaks on the way
                async with cutting_proxy(prefill.transfer_port, 1, 100_000) as (proxy, port):
                    params = {"remote_port": port}
                    split = await run_two_legs(session, prefill, decode, body, changed_params=params)
                    num_cut += proxy.num_cut
            else:
                split = await run_two_legs(session, prefill, decode, body)
            local = await run_local(session, decode, body)
        ids = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ends = len(split.tokens) == NUM_TOKENS or split.tokens[-1] == reference.tokenizer.eos_token_id
        assert ends, split.tokens
        if number % 10 == 0:
            plain = await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS)
        else:
            plain = await asyncio.to_thread(reference.greedy_after, ids, split.tokens)
        assert split.is_done
        assert split.reports[-1].recomputed is None, split.reports
        assert split.reports[0].num_prompt_tokens == len(ids)
        if split.tokens == local.tokens:
            assert split.text == local.text
        problems = [
            reference.explain_difference(ids, split.tokens, plain),
            reference.explain_difference(ids, local.tokens, plain),
        ]
        return [f"{QUESTIONS[number]}: {problem}" for problem in problems if problem]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        found = await asyncio.gather(*(one(session, number) for number in range(len(QUESTIONS))))
        await wait_for_free_blocks(session, prefill, decode)
        assert await preemptions(session, decode) > 0
    assert [problem for problems in found for problem in problems] == []
    assert num_cut == 10
