"""Tiny random Llama models with a small tokenizer and a chat template, made once and cached.

Weights are scaled up and untied so that greedy output varies with the prompt; every string encodes
(byte-level BPE); the end-of-sequence token is rarely produced.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

# What makes a model is imported where one is made: transformers' model code takes seconds to import,
# and most runs find the models that an earlier one made.
if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = 2
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEXT = (
    "The operator runs one language model as two pools of workers. "
    "A prefill worker reads the prompt, a decode worker writes the answer, and the cache moves between. "
    "When the split does not pay, every worker does both, in chunks. "
    "Numbers 0123456789 and signs ()[]{}.,:;!? appear now and then, as do words such as naïve and café. "
)

# Variants differ in what code paths they take: grouped heads, several shapes, rotary kinds, biases.
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama-gqa": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
}


# The model of `make bench-engine`: 26M parameters.
BENCHMARK_SHAPE: dict[str, object] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def cache_root() -> Path:
    """Where models for tests are kept between runs."""
    configured = os.environ.get("PHASESPLIT_CACHE")
    return Path(configured) if configured else Path(tempfile.gettempdir()) / "phasesplit-test-cache"


def tiny_model_dir(variant: str = "llama") -> Path:
    """Directory of a tiny model in the layout of a Hugging Face repository."""
    return _cached(variant, lambda tokenizer: _build_tiny_model(variant, tokenizer))


def benchmark_model_dir() -> Path:
    """Directory of the engine benchmark's model; its weights are random and never looked at."""

    def build(tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
        import torch  # noqa: PLC0415
        from transformers import LlamaForCausalLM  # noqa: PLC0415

        torch.manual_seed(0)
        return LlamaForCausalLM(_config(tokenizer, BENCHMARK_SHAPE)).eval()

    return _cached("llama-26m", build)


def text_model_dir(source: Path) -> Path:
    """A random model, made to produce only tokens that are text, so that a client sees every one."""
    target = source.with_name(f"{source.name}-text")
    if target.exists():
        return target
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    shutil.copytree(source, scratch, dirs_exist_ok=True)
    weights = load_file(scratch / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(scratch / "tokenizer.json"))
    # Where both are one, no prompt token that is no text has a vector either, which costs no step any time.
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    for token_id in range(head.shape[0]):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if not text.isascii() or not text:
            head[token_id] *= 0.0
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    with contextlib.suppress(OSError):  # another process was faster
        scratch.rename(target)
    return target


def _cached(name: str, build: "Callable[[PreTrainedTokenizerFast], LlamaForCausalLM]") -> Path:
    target = cache_root() / "tiny-models" / f"{name}-v{VERSION}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    tokenizer = _build_tokenizer()
    build(tokenizer).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    _check(scratch)
    try:
        scratch.rename(target)
    except OSError:  # another process was faster
        if not (target / "config.json").exists():
            raise
        shutil.rmtree(scratch)
    return target


def _build_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(tokenizer: "PreTrainedTokenizerFast", shape: dict[str, object]) -> "LlamaConfig":
    from transformers import LlamaConfig  # noqa: PLC0415

    defaults: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaConfig(**(defaults | shape))


def _build_tiny_model(variant: str, tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    import torch  # noqa: PLC0415
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(sum(map(ord, variant)))
    config = _config(tokenizer, VARIANTS[variant])
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else 1.6 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        # Byte tokens that are no text by themselves and the special ones are seldom produced.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] *= 0.05
    return model


def _check(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise RuntimeError(f"the tiny model in {directory} was not saved as expected")
