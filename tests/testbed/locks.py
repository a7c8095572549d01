"""One process at a time: a file lock that goes away with its holder, waited for with a bound."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(lock: Path, timeout_s: float, what: str) -> Iterator[None]:
    """Hold `lock` for the body; TimeoutError names `what` and the holder when another process keeps it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Children must not inherit the lock: a daemon started under it would hold it for its own life.
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
                    raise TimeoutError(
                        f"{what} is held by process {holder} for more than {timeout_s:.0f} s ({lock})"
                    ) from None
                time.sleep(0.2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
