"""The tensors of one step: which tokens, at which positions, in which KV slots.

    rows of the flattened batch   [ one row per sequence with one token | chunk | chunk ... ]
                                    0 ............... num_single          slices of `chunks`
Built from sequences and counts; knows nothing of how they were chosen.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from phasesplit_worker.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Rows `start:end` of the batch: several tokens of one sequence."""

    start: int
    end: int
    context: int  # tokens the last row attends to, itself included
    block_ids: torch.Tensor  # int64, the blocks that hold `context` tokens
    mask: torch.Tensor | None  # bool [rows, context]; None: plain causal, nothing before the chunk


@dataclass(frozen=True)
class StepBatch:
    """Inputs of a model for one step. T rows, S rows that need logits."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_blocks: torch.Tensor  # int64 [T], block that takes the row's KV
    slot_offsets: torch.Tensor  # int64 [T], place inside that block
    num_single: int
    single_tables: torch.Tensor  # int32 [num_single, most blocks], padded with 0
    single_contexts: torch.Tensor  # int32 [num_single]
    max_single_context: int
    chunks: tuple[Chunk, ...]
    logits_index: torch.Tensor  # int64 [S]
    sampled: tuple[Sequence, ...]  # S sequences, in the order of logits_index

    @property
    def num_rows(self) -> int:
        """T."""
        return self.token_ids.shape[0]


def build_batch(scheduled: Items[tuple[Sequence, int]], block_size: int, device: torch.device) -> StepBatch:
    """Flatten the scheduled tokens. Sequences with one token come first."""
    singles = [sequence for sequence, count in scheduled if count == 1]
    longer = [(sequence, count) for sequence, count in scheduled if count > 1]
    ordered = [(sequence, 1) for sequence in singles] + longer
    token_ids: list[int] = []
    positions: list[int] = []
    slot_blocks: list[int] = []
    logits_rows: list[int] = []
    sampled: list[Sequence] = []
    chunks: list[Chunk] = []
    for sequence, count in ordered:
        start, row = sequence.num_computed_tokens, len(token_ids)
        end = start + count
        token_ids += sequence.slice_token_ids(start, end)
        positions += range(start, end)
        table = sequence.block_table
        slot_blocks += [table[position // block_size] for position in range(start, end)]
        if count > 1:
            chunks.append(_build_chunk(row, count, end, table[: -(-end // block_size)], device))
        if end == sequence.num_tokens:
            logits_rows.append(len(token_ids) - 1)
            sampled.append(sequence)
    contexts = [sequence.num_computed_tokens + 1 for sequence in singles]
    longest = max(contexts, default=0)
    width = -(-longest // block_size)
    tables = [_padded(sequence.block_table, width) for sequence in singles]
    place = torch.tensor(positions, dtype=torch.int64)
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
        positions=place.to(device),
        slot_blocks=torch.tensor(slot_blocks, dtype=torch.int64).to(device),
        slot_offsets=(place % block_size).to(device),
        num_single=len(singles),
        single_tables=torch.tensor(tables, dtype=torch.int32).view(len(singles), width).to(device),
        single_contexts=torch.tensor(contexts, dtype=torch.int32).to(device),
        max_single_context=longest,
        chunks=tuple(chunks),
        logits_index=torch.tensor(logits_rows, dtype=torch.int64).to(device),
        sampled=tuple(sampled),
    )


def _padded(table: list[int], width: int) -> list[int]:
    return table[:width] + [0] * (width - len(table))


def _build_chunk(row: int, count: int, context: int, block_ids: list[int], device: torch.device) -> Chunk:
    mask = None
    if context > count:
        rows = torch.arange(context - count, context, device=device)
        mask = torch.arange(context, device=device)[None, :] <= rows[:, None]
    return Chunk(row, row + count, context, torch.tensor(block_ids, dtype=torch.int64).to(device), mask)
