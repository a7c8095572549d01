"""The fast path for Llama-type models: fused projections over the paged KV cache.

Same mathematics as transformers' Llama, Mistral and Qwen2 (the reference path proves it in tests);
weights come straight from the safetensors files. Full attention with fixed rotary tables only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from phasesplit_worker.model.attention import PagedAttention
from phasesplit_worker.model.batch import StepBatch

Weights = dict[str, torch.Tensor]
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2"})
# Rotary kinds whose tables do not depend on what else is in the batch.
ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3"})
# Rows that packed weights are laid out for; any number of rows works.
_PACK_ROWS = 16


def can_fuse(config: Any) -> bool:
    """Whether the fast path computes exactly what this model does."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in MODEL_TYPES
        and getattr(config, "hidden_act", "") == "silu"
        and layer_types == {"full_attention"}
        and not (config.model_type == "mistral" and config.sliding_window)
        and config.rope_parameters.get("rope_type", "default") in ROPE_TYPES
        and float(config.rope_parameters.get("partial_rotary_factor") or 1.0) == 1.0
    )


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Callable[[torch.Tensor], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor]
    post_norm: torch.Tensor
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]


class FusedModel:
    """Callable: StepBatch -> float32 logits [S, vocabulary].

    Empties `weights` while it builds its own form of them, so that both are never there in full.
    """

    def __init__(
        self,
        config: Any,
        weights: Weights,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: PagedAttention,
    ) -> None:
        self._attention = attention
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        self._eps = config.rms_norm_eps
        self._cos, self._sin = rotary
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        self._layers = [_build_layer(weights, index) for index in range(config.num_hidden_layers)]
        head = weights.pop("lm_head.weight", None)
        self._head = _linear([self._embedding if head is None or config.tie_word_embeddings else head], [])

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        hidden = embedding(batch.token_ids, self._embedding)
        cos = self._cos[batch.positions][:, None, :]
        sin = self._sin[batch.positions][:, None, :]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._attend(batch, index, hidden, cos, sin)
            if index == last:  # only rows that need logits go on from here
                mixed, hidden = mixed[batch.logits_index], hidden[batch.logits_index]
                if not hidden.shape[0]:
                    break
            hidden = hidden + layer.output(mixed)
            gate, up = layer.gate_up(self._normalise(hidden, layer.post_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        return self._head(self._normalise(hidden, self._norm)).float()

    def _attend(
        self,
        batch: StepBatch,
        index: int,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        layer = self._layers[index]
        rows, heads, kv_heads = hidden.shape[0], self._num_heads, self._num_kv_heads
        qkv = layer.qkv(self._normalise(hidden, layer.input_norm)).view(rows, -1, self._head_dim)
        rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)
        attended = self._attention.attend(
            batch, index, rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
        )
        return attended.reshape(rows, -1)

    def _normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self._eps)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [T, heads, head_dim]; cos and sin [T, 1, head_dim / 2]."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _build_layer(weights: Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}."

    def fuse(*names: str) -> Callable[[torch.Tensor], torch.Tensor]:
        biases = [weights.pop(f"{prefix}{n}.bias") for n in names if f"{prefix}{n}.bias" in weights]
        return _linear([weights.pop(f"{prefix}{name}.weight") for name in names], biases)

    return _Layer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight"),
        qkv=fuse("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=fuse("self_attn.o_proj"),
        post_norm=weights.pop(f"{prefix}post_attention_layernorm.weight"),
        gate_up=fuse("mlp.gate_proj", "mlp.up_proj"),
        down=fuse("mlp.down_proj"),
    )


def _linear(
    weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """One matrix product for several projections of the same input."""
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = torch.cat(biases) if biases else None
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
        # Packed once for this processor's matrix kernels: up to half faster for few rows.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        pointwise = torch.ops.mkldnn._linear_pointwise

        def packed_linear(rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = pointwise(rows, packed, bias, "none", [], "")
            return result

        return packed_linear
    return lambda rows: linear(rows, weight, bias)
