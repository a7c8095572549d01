"""Chained hashes of token ids, one per KV block. Equal hashes mean equal tokens up to that block.

Used by the prefix cache and by the KV manifest. Knows tokens and bytes only.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def hash_block(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one block given the hash of the block before it (or the salt for the first)."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, key=previous).digest()


def salt_of(text: str) -> bytes:
    """Start of a chain, from the model's fingerprint: different models never share blocks."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """One hash per block of `block_size` tokens; the last block may be partial."""
    hashes: list[bytes] = []
    previous = salt
    for start in range(0, len(token_ids), block_size):
        previous = hash_block(previous, token_ids[start : start + block_size])
        hashes.append(previous)
    return hashes
