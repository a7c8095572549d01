"""Totals of a worker's pulls and exports since its start. Thread-safe."""

import threading
from collections import Counter
from dataclasses import dataclass

from phasesplit_worker.transfer.errors import TransferFailure
from phasesplit_worker.transfer.pull import PullResult


@dataclass(frozen=True, kw_only=True)
class TransferCounts:
    """A snapshot."""

    pulls: int
    pulled_bytes: int
    transfer_s: float
    busy_s: float
    retries: int
    failures: dict[str, int]  # pulls of this worker, by reason
    refused: dict[str, int]  # connections and requests of peers, by reason
    expired_blocks: int


class Tally:
    """Adds up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulls = self._bytes = self._retries = self._expired_blocks = 0
        self._transfer_s = self._busy_s = 0.0
        self._failures: Counter[TransferFailure] = Counter()

    def add_pull(self, result: PullResult) -> None:
        """A pull that succeeded."""
        with self._lock:
            self._pulls += 1
            self._bytes += result.num_bytes
            self._retries += result.num_retries
            self._transfer_s += result.transfer_s
            self._busy_s += result.busy_s

    def add_failure(self, reason: TransferFailure) -> None:
        """A pull that failed."""
        with self._lock:
            self._failures[reason] += 1

    def add_expired(self, num_blocks: int) -> None:
        """Blocks that nobody came for."""
        with self._lock:
            self._expired_blocks += num_blocks

    def snapshot(self, refused: dict[str, int]) -> TransferCounts:
        """Totals as of now."""
        with self._lock:
            return TransferCounts(
                pulls=self._pulls,
                pulled_bytes=self._bytes,
                transfer_s=self._transfer_s,
                busy_s=self._busy_s,
                retries=self._retries,
                failures={str(reason): count for reason, count in self._failures.items()},
                refused=refused,
                expired_blocks=self._expired_blocks,
            )
