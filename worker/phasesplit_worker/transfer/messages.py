"""Messages of the KV protocol, version 1, and their bytes.

    frame   = prefix, header, payload
    prefix  = magic "PSKV", version u8, kind u8, reserved u16, header bytes u32, payload bytes u64
    header  = one msgpack map, the message's fields
    payload = raw block bytes, for kinds that carry them, else empty

Nothing is allocated from a length that a peer claims before the caller's own bound on it has been
checked. Unknown fields are ignored, so that a newer peer may add some. Knows no sockets.
"""

import struct
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phasesplit.api.manifest import KVManifest
from phasesplit_worker.transfer.auth import NONCE_BYTES, PROOF_BYTES
from phasesplit_worker.transfer.errors import MAX_MESSAGE_LENGTH, TransferError, TransferFailure

MAGIC = b"PSKV"
PROTOCOL_VERSION = 1
SUPPORTED_VERSIONS = frozenset({1})
PREFIX = struct.Struct(">4sBBHIQ")

# Messages other than manifests are small; a manifest grows with the blocks of its request.
MAX_SMALL_HEADER_BYTES = 8 << 10
MANIFEST_BYTES_PER_BLOCK = 128
MAX_PROBE_BYTES = 64 << 20
MAX_GROUP_BLOCKS = 512  # of one frame; also stays below the kernel's 1024 buffers per call
MAX_STREAMS = 4

Text = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Nonce = Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
ProofBytes = Annotated[bytes, Field(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    PULL = 4
    MANIFEST = 5
    BLOCKS = 6
    HEARTBEAT = 7
    FINAL = 8
    RELEASE = 9
    ERROR = 10
    PROBE = 11
    PROBE_DATA = 12


class Message(BaseModel):
    """A message's fields; the frame's kind says which class."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Hello(Message):
    """First message of a connection, client to server."""

    nonce: Nonce
    engine_id: Text
    pod: Text = ""
    node: Text = ""


class Challenge(Message):
    """Server to client: who the server is, with its proof."""

    nonce: Nonce
    proof: ProofBytes
    engine_id: Text
    pod: Text = ""
    node: Text = ""


class Proof(Message):
    """Client to server: the client's proof. From here on requests are served."""

    proof: ProofBytes


class Pull(Message):
    """Ask for blocks `[first_block, num_blocks)` of a request, on one of `num_streams` streams.

    Blocks go in groups of `group_blocks`, counted from `first_block`; stream i carries the groups
    whose number modulo `num_streams` is i. The engine id is the one the request was promised by.
    """

    request_id: Annotated[str, Field(max_length=128)]
    engine_id: Text | None = None
    model_fingerprint: Annotated[str, Field(max_length=512)]
    first_block: Count = 0
    num_blocks: Count
    stream: Annotated[int, Field(ge=0, lt=MAX_STREAMS)] = 0
    num_streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 1
    group_blocks: Annotated[int, Field(ge=1, le=MAX_GROUP_BLOCKS)] = 1


class Manifest(Message):
    """Answer to Pull before any block: what the server holds, as of now."""

    manifest: KVManifest


class Blocks(Message):
    """Blocks `[first_block, first_block + len(checksums))`, their bytes in the payload."""

    first_block: Count
    checksums: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=MAX_GROUP_BLOCKS)]
    waited_s: Seconds = 0.0  # the sender waited so long for the prefill before this frame


class Heartbeat(Message):
    """The prefill is still computing and no block that was asked for is ready."""

    num_ready_blocks: Count


class Final(Message):
    """All blocks are ready: the complete manifest, with the first token. Stream 0 only."""

    manifest: KVManifest
    finished_age_s: Seconds = 0.0  # since the prefill finished
    waited_s: Seconds = 0.0


class Release(Message):
    """Client to server: the blocks are verified (`pulled`) or no longer wanted; free them."""

    request_id: Annotated[str, Field(max_length=128)]
    pulled: bool


class Error(Message):
    """Why the connection is closed next."""

    reason: str
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""

    def to_exception(self) -> TransferError:
        """A reason that is unknown here counts as a protocol error."""
        known = self.reason in TransferFailure.__members__.values()
        reason = TransferFailure(self.reason) if known else TransferFailure.PROTOCOL
        return TransferError(reason, self.message)


class Probe(Message):
    """Ask for `num_bytes` of payload, to measure the link."""

    num_bytes: Annotated[int, Field(gt=0, le=MAX_PROBE_BYTES)]


class ProbeData(Message):
    """Answer to Probe; the bytes mean nothing."""


MESSAGES: dict[Kind, type[Message]] = {
    Kind.HELLO: Hello,
    Kind.CHALLENGE: Challenge,
    Kind.PROOF: Proof,
    Kind.PULL: Pull,
    Kind.MANIFEST: Manifest,
    Kind.BLOCKS: Blocks,
    Kind.HEARTBEAT: Heartbeat,
    Kind.FINAL: Final,
    Kind.RELEASE: Release,
    Kind.ERROR: Error,
    Kind.PROBE: Probe,
    Kind.PROBE_DATA: ProbeData,
}
KINDS = {message: kind for kind, message in MESSAGES.items()}


class Prefix(NamedTuple):
    """A decoded and bounded frame prefix."""

    kind: Kind
    header_bytes: int
    payload_bytes: int


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the caller sends the payload after them."""
    header: bytes = msgpack.packb(message.model_dump(mode="python"), default=str)
    kind = KINDS[type(message)]
    return PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(header), payload_bytes) + header


def decode_prefix(data: bytes, *, max_header_bytes: int, max_payload_bytes: int = 0) -> Prefix:
    """Check magic, version, kind and both lengths. Raises TransferError."""
    magic, version, kind, _, header_bytes, payload_bytes = PREFIX.unpack(data)
    if magic != MAGIC:
        raise TransferError(TransferFailure.PROTOCOL, "the peer does not speak the KV protocol")
    if version not in SUPPORTED_VERSIONS:
        raise TransferError(
            TransferFailure.PROTOCOL,
            f"the peer speaks version {version} of the KV protocol and this worker version "
            f"{PROTOCOL_VERSION}; run the same worker image in both pools",
        )
    if kind not in MESSAGES:
        raise TransferError(TransferFailure.PROTOCOL, f"the peer sent a message of unknown kind {kind}")
    if header_bytes > max_header_bytes or payload_bytes > max_payload_bytes:
        raise TransferError(
            TransferFailure.TOO_LARGE,
            f"the peer announced a {Kind(kind).name} of {header_bytes} + {payload_bytes} bytes where "
            f"{max_header_bytes} + {max_payload_bytes} are the most",
        )
    return Prefix(kind=Kind(kind), header_bytes=header_bytes, payload_bytes=payload_bytes)


def decode_header(kind: Kind, data: bytes) -> Message:
    """Parse a header as the message of its kind. Raises TransferError(PROTOCOL)."""
    try:
        fields: Any = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
        return MESSAGES[kind].model_validate(fields)
    except (ValueError, TypeError, OverflowError, ValidationError, msgpack.UnpackException) as error:
        raise TransferError(
            TransferFailure.PROTOCOL, f"the peer sent a malformed {kind.name} ({type(error).__name__})"
        ) from error
