"""Hashes of tokens and of block bytes, as manifests carry them. Pure functions."""

from collections.abc import Sequence

import xxhash

from phasesplit_worker.token_hash import chain_hashes, salt_of


def hash_token_ids(token_ids: Sequence[int], block_size: int, model_fingerprint: str) -> tuple[str, ...]:
    """One hex digest per block, chained: equal at block n means equal tokens up to its end."""
    return tuple(digest.hex() for digest in chain_hashes(token_ids, block_size, salt_of(model_fingerprint)))


def checksum(data: memoryview) -> str:
    """xxh3_64 of a block's bytes, in hex. Lets other threads run meanwhile."""
    return xxhash.xxh3_64_hexdigest(data)


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
