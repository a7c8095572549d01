"""Attention of a flattened batch over the paged KV cache, for any model.

Single-token rows go through the C routine when it is there, else through padded gathers; chunks go
through torch's scaled_dot_product_attention over the gathered context. Every row's KV is written
before anything reads it.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from phasesplit_worker.model import native
from phasesplit_worker.model.batch import Chunk, StepBatch
from phasesplit_worker.model.kv_cache import KVCache


class PagedAttention:
    """One per model. `attend` is called once per layer and step, on the engine thread."""

    def __init__(
        self, kv_cache: KVCache, num_heads: int, scale: float, paged_decode: Callable[..., None] | None
    ) -> None:
        layout = kv_cache.layout
        self._kv_cache = kv_cache
        self._num_heads = num_heads
        self._group = num_heads // layout.num_kv_heads
        self._scale = scale
        self._paged_decode = paged_decode if kv_cache.data.dtype == torch.float32 else None
        self._scratch = torch.empty(0)

    @staticmethod
    def native_routine(device: torch.device) -> Callable[..., None] | None:
        """The C routine for this device, None when plain torch code has to do."""
        return native.load() if device.type == "cpu" else None

    def attend(
        self, batch: StepBatch, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        index = (batch.slot_blocks, batch.slot_offsets)
        self._kv_cache.keys[layer].index_put_(index, key)
        self._kv_cache.values[layer].index_put_(index, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if batch.num_single:
            singles = query[: batch.num_single]
            if self._paged_decode is not None:
                self._attend_native(self._paged_decode, batch, layer, query=singles, out=out)
            else:
                out[: batch.num_single] = self._attend_padded(batch, layer, singles)
        for chunk in batch.chunks:
            rows = slice(chunk.start, chunk.end)
            out[rows] = self._attend_chunk(chunk, layer, query[rows], key[rows], value[rows])
        return out

    def _attend_native(
        self,
        paged_decode: Callable[..., None],
        batch: StepBatch,
        layer: int,
        *,
        query: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        layout, data = self._kv_cache.layout, self._kv_cache.data
        if query.stride(2) != 1 or query.stride(1) != layout.head_dim:
            query = query.contiguous()
        needed = self._num_heads * batch.max_single_context
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(2 * needed)
        paged_decode(
            query.data_ptr(),
            query.stride(0),
            data.data_ptr(),
            data.stride(0),
            layer * data.stride(2),
            data.stride(1) + layer * data.stride(2),
            batch.single_tables.data_ptr(),
            batch.single_tables.stride(0),
            batch.single_contexts.data_ptr(),
            out.data_ptr(),
            self._scratch.data_ptr(),
            batch.num_single,
            layout.num_kv_heads,
            self._group,
            layout.head_dim,
            layout.block_size,
            self._scale,
        )

    def _attend_padded(self, batch: StepBatch, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] over contexts padded to the longest."""
        count, longest = batch.num_single, batch.max_single_context
        block_ids = batch.single_tables.reshape(-1).long()
        mask = torch.arange(longest, device=query.device)[None, :] < batch.single_contexts[:, None]
        keys = self._gather(self._kv_cache.keys[layer], block_ids, count, longest)
        values = self._gather(self._kv_cache.values[layer], block_ids, count, longest)
        out = scaled_dot_product_attention(
            query.view(count, -1, self._group, query.shape[-1]),  # query heads of one KV head as rows
            keys,
            values,
            attn_mask=mask[:, None, None, :],
            scale=self._scale,
        )
        return out.reshape(query.shape)

    def _attend_chunk(
        self, chunk: Chunk, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[rows, heads, head_dim]; the chunk's own keys and values are used directly when alone."""
        if chunk.mask is None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys = self._gather(self._kv_cache.keys[layer], chunk.block_ids, 1, chunk.context)
            values = self._gather(self._kv_cache.values[layer], chunk.block_ids, 1, chunk.context)
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=self._group > 1,
        )
        return out[0].transpose(0, 1)

    @staticmethod
    def _gather(cache: torch.Tensor, block_ids: torch.Tensor, count: int, context: int) -> torch.Tensor:
        """Blocks of `count` sequences as [count, kv_heads, context, head_dim]."""
        blocks = cache.index_select(0, block_ids)
        tokens = blocks.view(count, -1, blocks.shape[-2], blocks.shape[-1])
        return tokens[:, :context].transpose(1, 2)
