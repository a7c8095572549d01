"""Bearer tokens. Comparisons take the same time whatever is sent; knows nothing of who may do what."""

import hashlib
import hmac
from collections.abc import Sequence

_SCHEME = "bearer "


def digest(text: str) -> bytes:
    """What is kept and compared instead of a token: equally long for all, so that length leaks nothing."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def sent_token(authorization: str | None) -> str:
    """The bearer token of an Authorization header, or nothing."""
    header = authorization or ""
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else ""


def is_sent(authorization: str | None, known: Sequence[bytes]) -> bool:
    """Whether the header carries a token with one of these digests."""
    sent = digest(sent_token(authorization))
    # Every one is compared, so that time tells nothing about which one nearly matched.
    matches = [hmac.compare_digest(sent, one) for one in known]
    return any(matches)
