"""What cannot be served is refused with one sentence; fingerprints tell models apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_engine import loaded_model, worker_config
from helpers_models import tiny_model_dir
from phasesplit_worker.errors import ModelLoadError
from phasesplit_worker.model.files import model_fingerprint
from phasesplit_worker.model.loader import load_model


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), target)
    return target


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(directory: Path, **config: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(worker_config(model_path=directory, **config))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "none")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no *.safetensors weights" in refusal(copy)


def test_a_shard_that_the_index_names_but_is_not_there(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    assert "model-00002.safetensors is missing" in refusal(copy)


def test_weights_that_are_cut_short(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    assert "cut short" in refusal(copy)
    shutil.copy(tiny_model_dir("llama") / "model.safetensors", path)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "cannot be loaded" in refusal(copy)


def test_a_weight_that_is_missing(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(copy)


def test_damaged_weights(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "infinities or NaN" in refusal(copy)


def test_unknown_kinds_and_architectures(copy: Path) -> None:
    edit_config(copy, architectures=["T5ForConditionalGeneration"])
    assert "T5ForConditionalGeneration is not supported" in refusal(copy)
    edit_config(copy, model_type="brand-new")
    assert "'brand-new' is not supported" in refusal(copy)


def test_rotary_tables_that_depend_on_the_batch(copy: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    edit_config(copy, rope_parameters=rope)
    assert "'dynamic' are not supported" in refusal(copy)


def test_a_gpu_that_is_not_there(copy: Path) -> None:
    if not torch.cuda.is_available():
        assert "CUDA finds none" in refusal(copy, device="cuda")


def test_kv_that_does_not_fit_and_lengths_beyond_training(copy: Path) -> None:
    assert "raise --kv-cache-bytes" in refusal(copy, kv_cache_bytes=1000)
    assert "trained for 2048" in refusal(copy, max_model_length=4096)


def test_weights_that_do_not_fit(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasesplit_worker.model.memory.available_bytes", lambda _: 100_000)
    assert "GiB for its weights" in refusal(copy)


def test_facts_of_a_loaded_model() -> None:
    loaded = loaded_model("llama-gqa")
    layout = loaded.facts.kv_layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (2, 2, 24, "float32")
    assert loaded.facts.weights_bytes == 4 * loaded.facts.num_parameters
    assert loaded.facts.max_model_length == 2048
    assert loaded.eos_token_ids == frozenset({1})


def test_the_kv_cache_limits_the_longest_sequence() -> None:
    loaded = load_model(worker_config("llama", kv_cache_bytes=2 * 3 * 64 * 4 * 512))
    assert loaded.facts.max_model_length == 512


def test_fingerprints_change_with_what_matters(copy: Path) -> None:
    def fingerprint(dtype: str = "float32", block_size: int = 16) -> str:
        return model_fingerprint(copy, dtype, block_size, "full")

    original = fingerprint()
    assert original == model_fingerprint(tiny_model_dir("llama"), "float32", 16, "full")
    assert len({original, fingerprint("float16"), fingerprint(block_size=32)}) == 3
    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer + " ")
    assert fingerprint() != original
    (copy / "tokenizer.json").write_text(tokenizer)
    edit_config(copy, rms_norm_eps=1e-4)
    assert fingerprint() != original
    assert model_fingerprint(tiny_model_dir("llama-gqa"), "float32", 16, "full") != original
