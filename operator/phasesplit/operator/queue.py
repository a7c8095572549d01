"""The work queue: keys to be looked at, each at most once at a time.

A key that is added while it waits stays one key, at the earlier of the two times; one that is added
while it is being worked on is worked on once more afterwards. Errors are retried with a growing delay
per key. The number of keys is bounded by the number of objects, and by `max_keys`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable

from phasesplit.cluster.errors import ClusterError, NotLeaderError

logger = logging.getLogger(__name__)

# Nothing may be written: either the lease comes back soon, or this copy ends.
_WITHOUT_LEASE_S = 5.0

Key = tuple[str, str]  # namespace, name
# Returns after how many seconds the key wants to be looked at again, None: not by itself.
Process = Callable[[Key], Awaitable[float | None]]


class WorkQueue:
    """Keys with the time at which they are due."""

    def __init__(
        self,
        process: Process,
        monotonic: Callable[[], float],
        *,
        first_delay_s: float = 0.5,
        longest_delay_s: float = 60.0,
        max_keys: int = 10_000,
    ) -> None:
        self._process = process
        self._monotonic = monotonic
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._max_keys = max_keys
        self._due_s: dict[Key, float] = {}
        self._active: set[Hashable] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self.last_progress_s = monotonic()

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Look at a key, at the latest after so many seconds."""
        due_s = self._monotonic() + after_s
        known = self._due_s.get(key)
        if known is None and len(self._due_s) >= self._max_keys:
            # The periodic tick offers every object again, so nothing is lost for good.
            logger.error("the work queue is full (%d objects); %s/%s waits", self._max_keys, *key)
            return
        if known is None or due_s < known:
            self._due_s[key] = due_s
            self._changed.set()

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._due_s.pop(key, None)
        self._failures.pop(key, None)

    async def run(self, num_workers: int = 4) -> None:
        """Work for ever, on several keys at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._next()
            self._active.add(key)
            try:
                await self._handle(key)
            finally:
                self._active.discard(key)
                self._changed.set()

    async def _next(self) -> Key:
        while True:
            now_s = self._monotonic()
            self.last_progress_s = now_s
            ready = {key: due_s for key, due_s in self._due_s.items() if key not in self._active}
            key = min(ready, key=ready.__getitem__, default=None)
            if key is not None and ready[key] <= now_s:
                del self._due_s[key]
                return key
            wait_s = 5.0 if key is None else min(5.0, ready[key] - now_s)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue

    async def _handle(self, key: Key) -> None:
        try:
            again_s = await self._process(key)
        except NotLeaderError as error:
            logger.warning("%s", error)
            self.add(key, _WITHOUT_LEASE_S)
        except ClusterError as error:
            delay_s = max(self._delay_s(key), error.retry_after_s or 0.0)
            logger.warning("%s/%s: %s; again in %.1f s", *key, error, delay_s)
            self.add(key, delay_s)
        except Exception:
            # A bug must not end the loop that serves all other objects; it is shown and tried again.
            delay_s = self._delay_s(key)
            logger.exception("%s/%s: unexpected error; again in %.1f s", *key, delay_s)
            self.add(key, delay_s)
        else:
            self._failures.pop(key, None)
            if again_s is not None:
                self.add(key, again_s)

    def _delay_s(self, key: Key) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return float(min(self._longest_delay_s, self._first_delay_s * 2.0**failures))
