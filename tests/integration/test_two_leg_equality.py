"""Prefill here, decode there, the same answer: two legs = local = plain transformers."""

import asyncio
import random

import aiohttp
import pytest

from helpers_models import tiny_model_dir
from helpers_reference_model import ReferenceModel
from helpers_worker_processes import MODEL, run_local, run_two_legs, running_workers, wait_for_free_blocks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_PROMPTS = 100
NUM_TOKENS = 24
WORDS = tuple(
    "prefill decode pool cache token block moves naïve café the a of 42 () {} reads writes".split()  # noqa: SIM905
)


def prompt_text(number: int) -> str:
    """Prompts from one word to several hundred tokens, some sharing a beginning."""
    rng = random.Random(number)
    shared = " ".join(WORDS) * 3 if number % 5 == 0 else ""
    return shared + " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 10, 40, 90])))


@pytest.fixture(scope="module", params=["llama", "llama-gqa"])
def pair(request, tmp_path_factory):
    """A prefill and a decode worker of one tiny model."""
    directory = tiny_model_dir(request.param)
    with running_workers(tmp_path_factory.mktemp("pair")) as workers:
        prefill = workers.start(directory, "prefill-0", "prefill", "--role", "prefill")
        decode = workers.start(directory, "decode-0", "decode", "--role", "decode")
        yield ReferenceModel(directory), prefill.wait_ready(), decode.wait_ready()


async def test_a_hundred_prompts_have_the_same_greedy_tokens(pair) -> None:
    reference, prefill, decode = pair
    gate = asyncio.Semaphore(6)

    async def one(session: aiohttp.ClientSession, number: int) -> list[str]:
        ids = reference.tokenizer(prompt_text(number))["input_ids"]
        body = {"model": MODEL, "prompt": prompt_text(number), "max_tokens": NUM_TOKENS, "temperature": 0}
        async with gate:
            split = await run_two_legs(session, prefill, decode, body)
            local = await run_local(session, decode, body)
        assert split.is_done
        assert split.reports[-1].recomputed is None, split.reports
        assert split.reports[-1].kv_bytes > 0 or split.reports[-1].num_cached_tokens > 0
        plain = await asyncio.to_thread(reference.greedy, ids, NUM_TOKENS)
        problems = [
            reference.explain_difference(ids, split.tokens, plain),
            reference.explain_difference(ids, local.tokens, plain),
        ]
        if split.tokens == local.tokens:
            assert split.text == local.text
        return [f"prompt {number}: {problem}" for problem in problems if problem]

    async with aiohttp.ClientSession() as session:
        found = await asyncio.gather(*(one(session, number) for number in range(NUM_PROMPTS)))
        await wait_for_free_blocks(session, prefill, decode)
    assert [problem for problems in found for problem in problems] == []


async def test_a_chat_with_stop_strings_is_the_same(pair) -> None:
    _, prefill, decode = pair
    async with aiohttp.ClientSession() as session:
        for number in range(8):
            messages = [{"role": "user", "content": prompt_text(number)}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0}
            whole = (await run_local(session, decode, body)).text
            middle = whole[len(whole) // 2 : len(whole) // 2 + 3]
            body |= {"stop": [middle, "no such text"]}
            local = await run_local(session, decode, body)
            split = await run_two_legs(session, prefill, decode, body)
            assert local.text == whole[: whole.find(middle)]
            assert (split.text, split.tokens, split.finish_reason) == (local.text, local.tokens, "stop")


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 6},
    {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.5, "seed": 7},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"temperature": 0, "min_tokens": 8, "logprobs": 2},
])  # fmt: skip
async def test_sampled_answers_are_the_same_with_the_same_seed(pair, sampling: dict) -> None:
    _, prefill, decode = pair
    async with aiohttp.ClientSession() as session:
        for number in range(5):
            body = {"model": MODEL, "prompt": prompt_text(number), "max_tokens": 20} | sampling
            local = await run_local(session, decode, body)
            split = await run_two_legs(session, prefill, decode, body)
            assert split.tokens == local.tokens
            assert split.text == local.text
            assert len(set(local.tokens)) > 3


@pytest.mark.parametrize("mode", ["local", "split"])
async def test_replay_at_every_cut_repeats_nothing_and_misses_nothing(pair, mode: str) -> None:
    _, prefill, decode = pair
    async with aiohttp.ClientSession() as session:
        for number, sampling in ((3, {"temperature": 0}), (10, {"temperature": 1.1, "seed": 3})):
            text = prompt_text(number)
            body = {"model": MODEL, "prompt": text, "max_tokens": 16, "stop": ["qqqq"]} | sampling
            whole = await run_local(session, decode, body)
            for cut in range(1, len(whole.tokens) + 1):
                replay = body | {"phasesplit": {"output_token_ids": whole.tokens[:cut]}}
                replay |= {"stream": True, "stream_options": {"include_usage": True}}
                if mode == "split" and cut < len(whole.tokens):
                    rest = await run_two_legs(session, prefill, decode, replay)
                else:
                    rest = await run_local(session, prefill, replay)
                assert whole.texts[cut] + rest.text == whole.text
                assert rest.tokens == whole.tokens[cut:]
                assert rest.finish_reason == whole.finish_reason
                assert rest.usage["completion_tokens"] == len(whole.tokens)


async def test_a_first_token_that_ends_the_request_needs_no_second_leg(pair) -> None:
    _, prefill, decode = pair
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": "one", "max_tokens": 1, "temperature": 0}
        split = await run_two_legs(session, prefill, decode, body)
        local = await run_local(session, decode, body)
        assert (split.tokens, split.text, split.finish_reason) == (local.tokens, local.text, "length")
        await wait_for_free_blocks(session, prefill, decode)


async def test_leg_reports_name_where_and_how_much(pair) -> None:
    _, prefill, decode = pair
    body = {"model": MODEL, "prompt": "a new prompt " * 30, "max_tokens": 5, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        answer = await run_two_legs(session, prefill, decode, body, request_id="report-1")
        first, second = answer.reports
        assert (first.pod, first.node, first.role) == ("prefill-0", "node-of-prefill-0", "prefill")
        assert (second.pod, second.role, second.request_id) == ("decode-0", "decode", "report-1")
        assert (first.num_output_tokens, second.num_output_tokens) == (1, 5)
        assert first.prefill_s > 0
        assert second.kv_transport == "TCP"
        assert 0 < second.kv_bytes <= answer.accepted.kv_bytes + 16 * 4096
        assert second.kv_transfer_s >= second.kv_exposed_s >= 0
        assert second.kv_busy_s > 0
