"""Pulls between two played workers, for tests over real sockets."""

import asyncio

import pytest

from helpers_transfer import LAYOUT, Side, eventually, params_for
from phasesplit_worker.transfer.errors import TransferError, TransferFailure

TOKENS = list(range(100, 139))  # 39 tokens: ten blocks of four, the last of three


def num_blocks(token_ids):
    return -(-len(token_ids) // LAYOUT.block_size)


async def pull(prefill: Side, decode: Side, request_id="r", tokens=None, *, release=True, **options):
    tokens = TOKENS if tokens is None else tokens
    block_ids = decode.engine.allocator.take(num_blocks(tokens))
    try:
        result = await decode.manager.pull(
            params_for(prefill, request_id, len(tokens)), tokens, block_ids, **options
        )
        return result, decode.pool.read(block_ids)
    finally:
        if release:
            decode.engine.allocator.give(block_ids)


async def failed_pull(*args, **options) -> TransferFailure:
    with pytest.raises(TransferError) as caught:
        await pull(*args, **options)
    return caught.value.reason


async def is_soon(condition, timeout_s=5.0):
    return await asyncio.to_thread(eventually, condition, timeout_s)
