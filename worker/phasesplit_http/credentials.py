"""Notices that a mounted Secret has other content than at the start. Knows nothing of what it is for."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

CHECK_S = 5.0


async def wait_for_change(paths: Sequence[Path | None], check_s: float = CHECK_S) -> None:
    """Return when a file's content differs from now. A file that cannot be read is being swapped."""
    known = [_digest(path) for path in paths]
    while True:
        await asyncio.sleep(check_s)
        found = [_digest(path) for path in paths]
        if any(
            new is not None and old is not None and new != old for new, old in zip(found, known, strict=True)
        ):
            return


def _digest(path: Path | None) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest() if path is not None else None
    except OSError:
        return None
