"""Tables of rotary position embeddings, by transformers' own rules for each kind.

Kept apart from transformers' model code, whose import takes half of a worker's start. Knows a
model's configuration; does not know weights or attention.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rotary_tables(
    model_config: Any, max_model_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_model_length, head_dim / 2], computed in float32."""
    inverse_frequencies, scale = _inverse_frequencies(model_config)
    angles = torch.arange(max_model_length).float()[:, None] * inverse_frequencies.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return cos.to(dtype).contiguous().to(device), sin.to(dtype).contiguous().to(device)


def _inverse_frequencies(model_config: Any) -> tuple[torch.Tensor, float]:
    parameters = model_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](model_config)
        return frequencies, float(scale)
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
