"""Hashes of tokens and of block bytes.

Pure functions. The token hash is chained, so that equal hashes of block n mean equal tokens up to
the end of block n; the checksum covers the bytes of one block.
"""

import array
import sys
from collections.abc import Sequence
from hashlib import blake2b

import xxhash

TOKEN_HASH_BYTES = 16


def hash_token_ids(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """One hex digest per block of `block_size` tokens, the last block may be partial."""
    digests: list[str] = []
    previous = b""
    for start in range(0, len(token_ids), block_size):
        words = array.array("q", token_ids[start : start + block_size])
        if sys.byteorder == "big":
            words.byteswap()
        previous = blake2b(previous + words.tobytes(), digest_size=TOKEN_HASH_BYTES).digest()
        digests.append(previous.hex())
    return tuple(digests)


def checksum(data: memoryview) -> str:
    """xxh3_64 of a block's bytes, in hex. Lets other threads run meanwhile."""
    return xxhash.xxh3_64_hexdigest(data)


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
