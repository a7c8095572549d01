"""The engine on a real chat model: greedy answers equal plain transformers, token for token."""

import dataclasses
import functools
import queue
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers_engine import greedy, worker_config
from phasesplit_worker.engine.engine import Engine
from phasesplit_worker.engine.tokenizer import Detokenizer, Tokenizer
from phasesplit_worker.model.loader import load_model
from phasesplit_worker.requests import EngineOutput, EngineRequest
from testbed.model import ensure_smollm2

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 16
# Where two tokens are this close in plain transformers, either may be chosen.
TIE = 1e-3
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Summarise: " + "A worker reads the prompt and another one writes the answer. " * 20,
)


@functools.lru_cache(maxsize=1)
def plain() -> torch.nn.Module:
    torch.set_num_threads(1)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(ensure_smollm2(), dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Engine, Tokenizer]]:
    config = dataclasses.replace(
        worker_config(), model_path=ensure_smollm2(), kv_cache_bytes=256 << 20, max_model_length=2048
    )
    loaded = load_model(config)
    engine = Engine(config, loaded)
    engine.start()
    yield engine, Tokenizer.load(loaded.directory)
    assert engine.stop(60)


def is_explained_by_a_tie(prompt: list[int], answer: list[int]) -> bool:
    """Every token of the answer is, by plain transformers, within TIE of the best one."""
    with torch.inference_mode():
        logits = plain()(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.max(dim=-1).values - chosen < TIE).all())


def test_answers_of_a_full_batch_equal_transformers(engine: tuple[Engine, Tokenizer]) -> None:
    subject, tokenizer = engine
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    outputs: list[queue.Queue[EngineOutput]] = [queue.Queue() for _ in prompts]
    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=greedy(NUM_TOKENS)
        )
        subject.submit(request, outputs[number].put)
    for prompt, received in zip(prompts, outputs, strict=True):
        answer: list[int] = []
        while True:
            output = received.get(timeout=300)
            answer += output.token_ids
            if output.is_last:
                break
        assert output.finish_reason in ("length", "stop")
        assert is_explained_by_a_tie(prompt, answer)
        detokenizer = Detokenizer(tokenizer)
        pieces = [*(detokenizer.append(token) for token in answer), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(answer)
