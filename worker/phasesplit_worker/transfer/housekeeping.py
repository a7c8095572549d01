"""The store's own thread: checksums after each chunk, expiry, and blocks given back.

Checksums are taken when a chunk is done and not when it is sent, so that a block reused too early
is caught; off the engine's thread, which would otherwise lose a few milliseconds per chunk.
"""

import logging
import threading
from collections.abc import Callable

from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.transfer.integrity import checksum
from phasesplit_worker.transfer.store import KVStore, Unsealed

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0


class Housekeeper:
    """Works for one store until stopped."""

    def __init__(
        self,
        store: KVStore,
        pool: KVBlocks,
        *,
        release: Callable[[str], None],
        on_expired: Callable[[int], None],
    ) -> None:
        """`release(request_id)` frees blocks the engine holds; `on_expired(num_blocks)` counts them."""
        self._store = store
        self._pool = pool
        self._release = release
        self._on_expired = on_expired
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End every export, give the blocks back, end the thread."""
        self._is_stopped.set()
        self._store.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def work(self) -> None:
        """Do all that is due now."""
        expired = self._store.expire()
        if expired:
            self._on_expired(expired)
        for removed in self._store.collect_removable():
            if removed.is_held:
                self._release(removed.request_id)
        while (unsealed := self._store.take_unsealed()) is not None:
            self._seal(unsealed)

    def _seal(self, unsealed: Unsealed) -> None:
        try:
            checksums = [checksum(self._pool.block_view(block_id)) for block_id in unsealed.block_ids]
        except Exception:  # whatever the pool made of it: the other exports must go on
            logger.exception("blocks of request %s cannot be read", unsealed.export.request_id)
            self._store.give_up(unsealed)
        else:
            self._store.seal(unsealed, checksums)

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            self.work()
            self._store.wait_for_work(_IDLE_WAIT_S)
        self.work()
