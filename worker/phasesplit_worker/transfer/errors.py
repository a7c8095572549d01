"""Why a KV transfer failed: a closed list of reasons, and the error that carries one.

Knows nothing about sockets or stores; the reasons are label values of metrics.
"""

from dataclasses import dataclass
from enum import StrEnum

from phasesplit_worker.errors import WorkerError

MAX_MESSAGE_LENGTH = 300


class TransferFailure(StrEnum):
    """Reason of a failed transfer, a refused connection or a refused message."""

    CONNECT = "connect"  # no connection, or it broke
    AUTH = "auth"  # the other side does not hold the same transfer key
    TIMEOUT = "timeout"  # the whole deadline, or the one of the first byte, has passed
    PROGRESS = "progress"  # the peer went silent, or had blocks ready and did not send them
    FINGERPRINT = "fingerprint"  # another model, weights, tokenizer or attention kind
    LAYOUT = "layout"  # another shape, block size or dtype of a block
    TOKEN_HASH = "token_hash"  # noqa: S105 KV of other tokens
    CHECKSUM = "checksum"  # bytes differ from what the prefill sealed
    UNKNOWN_REQUEST = "unknown_request"
    EXPIRED = "expired"
    ABORTED = "aborted"
    ENGINE_ID = "engine_id"  # the peer's process was restarted
    PROTOCOL = "protocol"  # a message that makes no sense here, or of an unknown version
    TOO_LARGE = "too_large"  # a message beyond what this request can need
    CANCELLED = "cancelled"  # by the caller


# Failures that say something about the pair of workers rather than about one request.
PAIR_FAILURES = frozenset(
    {
        TransferFailure.CONNECT,
        TransferFailure.AUTH,
        TransferFailure.TIMEOUT,
        TransferFailure.PROGRESS,
        TransferFailure.FINGERPRINT,
        TransferFailure.LAYOUT,
        TransferFailure.CHECKSUM,
        TransferFailure.PROTOCOL,
        TransferFailure.TOO_LARGE,
    }
)

# Ends that a client or the prefill's engine wanted; they say nothing about pair or link.
CALLED_OFF = frozenset({TransferFailure.CANCELLED, TransferFailure.ABORTED})

# Failures after which this side still reaches the peer, which may give the blocks back at once.
RELEASING_FAILURES = frozenset(
    {
        TransferFailure.CHECKSUM,
        TransferFailure.FINGERPRINT,
        TransferFailure.LAYOUT,
        TransferFailure.CANCELLED,
        TransferFailure.TIMEOUT,
        TransferFailure.PROGRESS,
    }
)

# Failures after which the same pull may be tried again on a new connection.
RETRIED_FAILURES = frozenset({TransferFailure.CONNECT, TransferFailure.PROGRESS, TransferFailure.CHECKSUM})


@dataclass(frozen=True)
class Measured:
    """What came from a peer, and how long the link needed for it."""

    peer_pod: str
    peer_node: str
    num_bytes: int
    busy_s: float


class TransferError(WorkerError):
    """A transfer failed for `reason`; the message is one sentence."""

    def __init__(self, reason: TransferFailure, message: str) -> None:
        super().__init__(message[:MAX_MESSAGE_LENGTH])
        self.reason = reason
        # Known when the prefill had finished before the pull failed.
        self.first_token: int | None = None
