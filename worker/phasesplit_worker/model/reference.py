"""The reference path: an unmodified transformers model over the paged KV cache.

The model sees one flattened row of all tokens and no cache; our attention function, registered with
transformers, receives the step's batch as an extra argument and does the rest.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from phasesplit_worker.errors import ModelLoadError
from phasesplit_worker.model.attention import PagedAttention
from phasesplit_worker.model.batch import StepBatch

ATTENTION_NAME = "phasesplit_paged"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class _AttentionModule(Protocol):
    layer_idx: int


def register_attention() -> None:
    """Make `attn_implementation="phasesplit_paged"` known; may be called more than once."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """The paged attention masks by itself."""


def _attention(
    module: _AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_attention: PagedAttention,
    paged_batch: StepBatch,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    del attention_mask
    present = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if sliding_window is not None:
        present.append("sliding_window")
    if present or key.shape != value.shape:
        what = " and ".join(present) or "keys and values of different sizes"
        raise ModelLoadError(f"the model's attention uses {what}, which the paged KV cache does not support")
    rows = paged_attention.attend(
        paged_batch,
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    return rows[None], None


class ReferenceModel:
    """Callable: StepBatch -> float32 logits [S, vocabulary]."""

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        self._model = model
        self._attention = attention

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_index,
            paged_attention=self._attention,
            paged_batch=batch,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
