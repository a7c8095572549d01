"""The paged KV cache: one tensor, block-major, so that a block is one contiguous range of bytes.

Knows shapes and bytes. Does not know who owns which block (see scheduling.block_manager).
"""

from typing import Any

import torch

from phasesplit.api.manifest import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KVCache:
    """`data[num_blocks, 2 (K, V), layers, block_size, kv_heads, head_dim]`: wire order per block.

    Tensors are changed on the engine thread only. `block_view` may be used from any thread for
    blocks that no step touches at that time.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shape = (
            num_blocks,
            2,
            layout.num_layers,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.data = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        self.keys = tuple(self.data[:, 0, layer] for layer in range(layout.num_layers))
        self.values = tuple(self.data[:, 1, layer] for layer in range(layout.num_layers))
        self._staging: dict[int, torch.Tensor] = {}
        self._bytes: memoryview | None = None
        if device.type == "cpu":
            self._bytes = _buffer_of(self.data.view(-1).view(torch.uint8))

    def block_view(self, block_id: int) -> memoryview:
        """Writable bytes of a block in wire order; on a device a pinned copy (then `commit_block`)."""
        num_bytes = self.layout.bytes_per_block
        if self._bytes is not None:
            return self._bytes[block_id * num_bytes : (block_id + 1) * num_bytes]
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        staging.copy_(self.data[block_id].reshape(-1).view(torch.uint8))
        self._staging[block_id] = staging
        return _buffer_of(staging)

    def commit_block(self, block_id: int) -> None:
        """`block_view(block_id)` was written: copy it to the device. Nothing to do on a CPU."""
        staging = self._staging.pop(block_id, None)
        if staging is not None:
            self.data[block_id].copy_(staging.view(self.data.dtype).view(self.data.shape[1:]))

    def drop_view(self, block_id: int) -> None:
        """`block_view(block_id)` was only read: forget its staging copy. Nothing to do on a CPU."""
        self._staging.pop(block_id, None)


def _buffer_of(tensor: torch.Tensor) -> memoryview:
    """Writable bytes of a CPU tensor, without a copy."""
    array: Any = tensor.numpy()  # supports the buffer protocol, which its type does not say
    return memoryview(array)
