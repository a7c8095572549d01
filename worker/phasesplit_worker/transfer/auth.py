"""Mutual proof that both ends of a connection hold the object's transfer key.

    client                                server
      Hello(nonce_c, names)        ->
                                   <-     Challenge(nonce_s, names, proof of "server")
      Proof(proof of "client")     ->

Each proof is HMAC-SHA256 over both nonces and both engine ids, under a label for its side, so that
nothing recorded can be replayed or reflected. The key itself never travels.
"""

import hmac
import secrets
from pathlib import Path
from typing import NamedTuple

from phasesplit_worker.errors import ConfigError

NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_KEY_BYTES = 16
_CONTEXT = b"phasesplit-kv/1"
SERVER_LABEL = b"server"
CLIENT_LABEL = b"client"


def new_nonce() -> bytes:
    """A value never used before."""
    return secrets.token_bytes(NONCE_BYTES)


class Parts(NamedTuple):
    """What both proofs of one connection cover."""

    client_nonce: bytes
    server_nonce: bytes
    client_engine_id: str
    server_engine_id: str


def prove(key: bytes, label: bytes, parts: Parts) -> bytes:
    """The proof of one side. Every part is length-prefixed, so no two inputs give one message."""
    fields = (
        _CONTEXT,
        label,
        parts.client_nonce,
        parts.server_nonce,
        parts.client_engine_id.encode(),
        parts.server_engine_id.encode(),
    )
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.digest(key, message, "sha256")


def is_proof(expected: bytes, given: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(expected, given)


def read_transfer_key(path: Path) -> bytes:
    """Read the transfer key; surrounding white space does not count. Raises ConfigError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"--transfer-key-file {path} cannot be read ({error.strerror}); "
            "mount the object's transfer Secret there"
        ) from error
    check_key(key)
    return key


def check_key(key: bytes) -> None:
    """Raise ConfigError when a key is too short to protect anything."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"the transfer key has {len(key)} bytes and needs at least {MIN_KEY_BYTES}; "
            "write more random bytes into the Secret's transfer-key"
        )
