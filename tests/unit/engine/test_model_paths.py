"""Fused, reference and plain transformers compute the same logits; with and without the C routine."""

import logging
import random
import subprocess
from pathlib import Path

import pytest
import torch

from helpers_engine import greedy, loaded_model, plain_logits, random_prompt, worker_config
from phasesplit_worker.model import native
from phasesplit_worker.model.attention import PagedAttention
from phasesplit_worker.model.batch import build_batch
from phasesplit_worker.model.kv_cache import KVCache
from phasesplit_worker.model.loader import LoadedModel, load_model
from phasesplit_worker.sequence import Sequence

TOLERANCE = 1e-4


def sequence_of(prompt: tuple[int, ...], first_block: int) -> Sequence:
    sequence = Sequence(request_id="s", prompt_token_ids=prompt, sampling=greedy(1), seed=0)
    sequence.block_table = list(range(first_block + 9, first_block - 1, -1))  # blocks in no order
    return sequence


def run(loaded: LoadedModel, scheduled: list[tuple[Sequence, int]]) -> torch.Tensor:
    with torch.inference_mode():
        logits = loaded.forward(build_batch(scheduled, 16, loaded.device))
    for sequence, count in scheduled:
        sequence.num_computed_tokens += count
    return logits


@pytest.mark.parametrize("variant", ["llama", "llama-gqa"])
@pytest.mark.parametrize("reference", [False, True], ids=["fused", "reference"])
def test_mixed_steps_give_the_logits_of_plain_transformers(variant: str, reference: bool) -> None:
    generator = random.Random(1)
    loaded = loaded_model(variant, reference=reference)
    first = sequence_of(random_prompt(generator, 75), 0)
    second = sequence_of(random_prompt(generator, 33), 20)
    third = sequence_of(random_prompt(generator, 41), 40)
    assert run(loaded, [(first, 40), (second, 16)]).shape[0] == 0
    run(loaded, [(first, 34), (third, 40), (second, 16)])
    # Three decoding rows of different lengths in one step.
    logits = run(loaded, [(first, 1), (second, 1), (third, 1)])
    for row, sequence in enumerate((first, second, third)):
        expected = plain_logits(variant, sequence.prompt_token_ids)[-1]
        assert torch.allclose(logits[row], expected, atol=TOLERANCE)
    # A chunk with context beside a decoding row.
    first.output_token_ids.append(9)
    second.output_token_ids += random_prompt(generator, 20)
    logits = run(loaded, [(second, 20), (first, 1)])
    for row, sequence in enumerate((first, second)):  # single rows come first
        expected = plain_logits(variant, sequence.token_ids)[-1]
        assert torch.allclose(logits[row], expected, atol=TOLERANCE)


def test_half_precision_on_a_cpu_is_slower_but_works() -> None:
    loaded = load_model(worker_config(dtype="bfloat16"))
    assert loaded.facts.kv_layout.dtype == "bfloat16"
    prompt = random_prompt(random.Random(2), 40)
    sequence = sequence_of(prompt, 0)
    run(loaded, [(sequence, 39)])
    logits = run(loaded, [(sequence, 1)])
    assert torch.allclose(logits[0], plain_logits("llama", prompt)[-1], atol=0.5)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(4, 1, 64), (3, 3, 64), (2, 2, 128), (1, 5, 24)])
def test_the_c_routine_equals_torch(kv_heads: int, group: int, head_dim: int) -> None:
    routine = native.load()
    assert routine is not None, "a C compiler is part of the test environment"
    layout = loaded_model().facts.kv_layout.model_copy(
        update={"num_layers": 2, "num_kv_heads": kv_heads, "head_dim": head_dim}
    )
    cache = KVCache(layout, 40, torch.device("cpu"))
    cache.data.normal_()
    torch.manual_seed(0)
    sequences = []
    for index, length in enumerate((1, 16, 17, 100)):
        sequence = sequence_of(tuple(range(length)), 10 * index)
        sequence.num_computed_tokens = length - 1
        sequences.append((sequence, 1))
    batch = build_batch(sequences, 16, cache.device)
    query = torch.randn(4, kv_heads * group, head_dim) * 3
    key, value = torch.randn(4, kv_heads, head_dim), torch.randn(4, kv_heads, head_dim)
    outputs = [
        PagedAttention(cache, kv_heads * group, 0.125, chosen).attend(batch, 1, query, key, value)
        for chosen in (routine, None)
    ]
    assert torch.allclose(*outputs, atol=2e-5)


def test_without_a_compiler_torch_code_is_used_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert native.load(tmp_path / "cache") is None
    assert "no C compiler" in caplog.text


def test_a_cache_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert native.load(blocker / "cache") is None


def test_the_portable_build_loads(tmp_path: Path) -> None:
    path = native.build(tmp_path, portable=True)
    symbols = subprocess.run(["nm", "-D", str(path)], check=False, capture_output=True, text=True).stdout
    assert native.SYMBOL in symbols
    assert native.load(tmp_path) is not None


def test_block_views_are_the_cache_in_wire_order() -> None:
    layout = loaded_model().facts.kv_layout
    cache = KVCache(layout, 4, torch.device("cpu"))
    cache.data[2] = torch.arange(cache.data[2].numel(), dtype=torch.float32).view(cache.data[2].shape)
    view = cache.block_view(2)
    assert len(view) == layout.bytes_per_block
    assert torch.equal(torch.frombuffer(view, dtype=torch.float32), cache.data[2].reshape(-1))
    cache.block_view(3)[:] = bytes(view)
    cache.commit_block(3)
    assert torch.equal(cache.data[3], cache.data[2])
    assert cache.data[2].shape == (2, layout.num_layers, 16, layout.num_kv_heads, layout.head_dim)
