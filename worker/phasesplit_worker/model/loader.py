"""Loads a model and its KV cache, or says in one sentence why it cannot be served."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from phasesplit.api.manifest import KVLayout
from phasesplit.api.reports import ModelFacts
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.errors import ModelLoadError
from phasesplit_worker.model import files, memory
from phasesplit_worker.model.attention import PagedAttention
from phasesplit_worker.model.batch import StepBatch, build_batch
from phasesplit_worker.model.fused import FusedModel, can_fuse
from phasesplit_worker.model.kv_cache import TORCH_DTYPES, KVCache
from phasesplit_worker.model.rotary import rotary_tables
from phasesplit_worker.sequence import SamplingParams, Sequence

logger = logging.getLogger(__name__)

ATTENTION_KIND = "full"
# Rotary tables of these kinds change with the longest sequence in a batch.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# What loading needs beside the weights themselves.
_LOAD_HEADROOM = 1.1
_MIN_KV_TOKENS = 256

Model = Callable[[StepBatch], torch.Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run steps. Owned by the engine thread once the engine starts."""

    directory: Path
    facts: ModelFacts
    kv_cache: KVCache
    forward: Model  # StepBatch -> float32 logits [S, vocabulary]
    device: torch.device
    eos_token_ids: frozenset[int]
    vocabulary_size: int


def load_model(config: WorkerConfig, *, reference: bool = False) -> LoadedModel:
    """Load weights and allocate the KV cache; blocking. Raises ModelLoadError.

    `reference`: run the unmodified transformers model even where the fast path could.
    """
    device = _device(config)
    directory = files.find_model(config)
    raw = files.read_json(directory / "config.json")
    model_config = _read_config(directory, raw)
    weight_files = files.weight_files(directory)
    num_parameters = files.count_parameters(weight_files)
    dtype = _dtype(config, device, model_config)
    weights_bytes = num_parameters * TORCH_DTYPES[dtype].itemsize
    _check_fits(directory, weights_bytes, device)
    layout = _kv_layout(model_config, config.block_size, dtype)
    try:
        build = _load_weights(
            directory,
            model_config,
            weight_files,
            dtype=TORCH_DTYPES[dtype],
            device=device,
            reference=reference,
        )
        max_model_length = _max_model_length(config, model_config)
        num_blocks = _num_blocks(config, layout, device, max_model_length, weights_bytes)
        kv_cache = KVCache(layout, num_blocks, device)
        scale = _scale(model_config, layout.head_dim)
        routine = PagedAttention.native_routine(device)
        attention = PagedAttention(kv_cache, model_config.num_attention_heads, scale, routine)
        forward = build(attention, max_model_length)
        _probe(forward, layout.block_size, device)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        # Whatever transformers, safetensors and torch raise on files that do not fit together.
        message = f"model in {directory} cannot be loaded: {type(error).__name__}: {_one_line(error)}"
        raise ModelLoadError(message) from error
    kv_cache.data.zero_()
    facts = ModelFacts(
        name=config.model_name,
        fingerprint=files.model_fingerprint(directory, dtype, config.block_size, ATTENTION_KIND),
        weights_bytes=weights_bytes,
        kv_layout=layout,
        max_model_length=min(max_model_length, num_blocks * config.block_size),
        num_parameters=num_parameters,
    )
    logger.info("loaded %s: %d parameters, %d KV blocks, %s", directory, num_parameters, num_blocks, dtype)
    return LoadedModel(
        directory,
        facts,
        kv_cache,
        forward,
        device,
        _eos_token_ids(directory, raw),
        model_config.vocab_size,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _device(config: WorkerConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("a GPU is asked for (--device cuda) but CUDA finds none on this node")
    return torch.device(config.device)


def _read_config(directory: Path, raw: Mapping[str, Any]) -> Any:
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        kind = raw.get("model_type", "unknown")
        raise ModelLoadError(f"model type {kind!r} is not supported by this worker") from error
    architecture = (raw.get("architectures") or ["unknown"])[0]
    if getattr(model_config, "is_encoder_decoder", False) or not str(architecture).endswith("ForCausalLM"):
        message = f"architecture {architecture} is not supported; use a decoder-only causal language model"
        raise ModelLoadError(message)
    missing = [
        name
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
        if not isinstance(getattr(model_config, name, None), int)
    ]
    if missing:
        raise ModelLoadError(f"architecture {architecture} is not supported: its config has no {missing[0]}")
    kinds = set(getattr(model_config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        message = f"architecture {architecture} is not supported: it has layers of kind {sorted(kinds)[0]}"
        raise ModelLoadError(message)
    rope = (getattr(model_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _BATCH_DEPENDENT_ROPE:
        raise ModelLoadError(f"rotary embeddings of type {rope!r} are not supported with continuous batching")
    return model_config


def _dtype(config: WorkerConfig, device: torch.device, model_config: Any) -> str:
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "float32"  # half types have no fast kernels on most CPUs
    declared = str(getattr(model_config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return declared if declared in ("float16", "bfloat16") else "bfloat16"


def _check_fits(directory: Path, weights_bytes: int, device: torch.device) -> None:
    available = memory.available_bytes(device)
    if weights_bytes * _LOAD_HEADROOM > available:
        message = (
            f"model in {directory} needs {weights_bytes / 2**30:.1f} GiB for its weights but the "
            f"{device.type} has {available / 2**30:.1f} GiB left; use a smaller model or more memory"
        )
        raise ModelLoadError(message)


def _kv_layout(model_config: Any, block_size: int, dtype: str) -> KVLayout:
    heads = model_config.num_attention_heads
    return KVLayout(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=getattr(model_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(model_config, "head_dim", None) or model_config.hidden_size // heads,
        block_size=block_size,
        dtype=dtype,
    )


def _scale(model_config: Any, head_dim: int) -> float:
    scalar = getattr(model_config, "query_pre_attn_scalar", None) or head_dim
    return float(getattr(model_config, "attention_multiplier", None) or scalar**-0.5)


def _max_model_length(config: WorkerConfig, model_config: Any) -> int:
    trained = getattr(model_config, "max_position_embeddings", None) or 2048
    if config.max_model_length is None:
        return int(trained)
    if config.max_model_length > trained:
        message = (
            f"--max-model-length is {config.max_model_length} but the model was trained for {trained} "
            f"tokens; use at most {trained}"
        )
        raise ModelLoadError(message)
    return config.max_model_length


def _num_blocks(
    config: WorkerConfig, layout: KVLayout, device: torch.device, max_model_length: int, weights_bytes: int
) -> int:
    budget = memory.kv_budget_bytes(device, config.kv_memory_fraction, config.kv_cache_bytes, weights_bytes)
    useful_tokens = config.max_num_seqs * max_model_length
    num_blocks = min(budget // layout.bytes_per_block, -(-useful_tokens // layout.block_size))
    least = -(-min(_MIN_KV_TOKENS, max_model_length) // layout.block_size)
    if num_blocks < least:
        message = (
            f"{budget / 2**20:.1f} MiB are left for the KV cache but {least} blocks of "
            f"{layout.bytes_per_block} bytes are needed; raise --kv-cache-bytes or give more memory"
        )
        raise ModelLoadError(message)
    return num_blocks


Builder = Callable[[PagedAttention, int], Model]


def _load_weights(
    directory: Path,
    model_config: Any,
    weight_files: list[Path],
    *,
    dtype: torch.dtype,
    device: torch.device,
    reference: bool,
) -> Builder:
    """Weights on the device, and what makes a model of them."""
    if can_fuse(model_config) and not reference:
        weights: dict[str, torch.Tensor] = {}
        for path in weight_files:
            for name, tensor in load_file(path, device=str(device)).items():
                weights[name] = tensor.to(dtype)

        def build_fused(attention: PagedAttention, max_model_length: int) -> Model:
            rotary = rotary_tables(model_config, max_model_length, dtype, device)
            return FusedModel(model_config, weights, rotary, attention)

        return build_fused
    # Imported here: transformers' model code takes seconds to import, and the fused path needs none.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from phasesplit_worker.model.reference import (  # noqa: PLC0415
        ATTENTION_NAME,
        ReferenceModel,
        register_attention,
    )

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
    )
    model = model.to(device).eval()
    return lambda attention, _: ReferenceModel(model, attention)


def _probe(forward: Model, block_size: int, device: torch.device) -> None:
    """Run a few tokens, so that what the model cannot do shows now and not at the first request."""
    sequence = Sequence(request_id="probe", prompt_token_ids=(0, 1, 2), sampling=SamplingParams(), seed=0)
    sequence.block_table = list(range(-(-3 // block_size)))
    with torch.inference_mode():
        logits = forward(build_batch([(sequence, 3)], block_size, device))
    if not bool(torch.isfinite(logits).all()):
        raise ModelLoadError(
            "the model computes infinities or NaN; its weights are damaged or its dtype is wrong"
        )


def _eos_token_ids(directory: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    path = directory / "generation_config.json"
    declared = files.read_json(path).get("eos_token_id") if path.exists() else None
    if declared is None:
        declared = raw.get("eos_token_id")
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])
