"""The real chat model through two legs: the same greedy tokens as plain transformers."""

import asyncio

import aiohttp
import pytest

from helpers_reference_model import ReferenceModel
from helpers_worker_processes import MODEL, run_local, run_two_legs, running_workers, wait_for_free_blocks
from testbed.model import ensure_smollm2

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to five.",
    "Summarise: " + "Two pools serve one model; one reads the prompts, the other writes answers. " * 12,
    "Was ist ein Käsekuchen?",
)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A prefill and a decode worker of SmolLM2-135M-Instruct."""
    directory = ensure_smollm2()
    with running_workers(tmp_path_factory.mktemp("pair")) as workers:
        prefill = workers.start(directory, "prefill-0", "prefill", "--role", "prefill")
        decode = workers.start(directory, "decode-0", "decode", "--role", "decode")
        reference = ReferenceModel(directory)
        yield reference, prefill.wait_ready(), decode.wait_ready()


async def test_chats_have_the_same_greedy_tokens(pair) -> None:
    reference, prefill, decode = pair
    problems = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            body = {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
            split = await run_two_legs(session, prefill, decode, body)
            local = await run_local(session, decode, body)
            ids = reference.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            plain = await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS)
            assert split.reports[-1].recomputed is None
            assert split.reports[0].num_prompt_tokens == len(ids)
            assert split.text == local.text
            problems += [
                reference.explain_difference(ids, split.tokens, plain),
                reference.explain_difference(ids, local.tokens, plain),
            ]
        await wait_for_free_blocks(session, prefill, decode)
    assert [problem for problem in problems if problem] == []
