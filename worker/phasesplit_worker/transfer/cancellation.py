"""Cancelling a pull from another thread: a flag, and the connections to wake.

Cancelling shuts the sockets down, so that a blocked thread returns at once; the descriptors stay
with the threads that use them. Nothing writes to the reserved blocks once the pull has returned.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from phasesplit_worker.transfer.channel import Channel
from phasesplit_worker.transfer.errors import TransferError, TransferFailure

T = TypeVar("T")


class Cancellation:
    """Set once, from any thread."""

    def __init__(self, parent: "Cancellation | None" = None) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._channels: set[Channel] = set()
        self._parent = parent

    def is_set(self) -> bool:
        """Whether this or the parent was cancelled."""
        return self._is_set or (self._parent is not None and self._parent.is_set())

    def cancel(self) -> None:
        """Stop what is under way. May be called again."""
        with self._lock:
            self._is_set = True
            channels = list(self._channels)
        for channel in channels:
            channel.interrupt()

    @contextmanager
    def guarding(self, channel: Channel) -> Iterator[None]:
        """Wake whoever is blocked on `channel` when cancelled. Raises when that has happened."""
        if self._parent is not None:
            with self._parent.guarding(channel), self._guarding(channel):
                yield
        else:
            with self._guarding(channel):
                yield

    @contextmanager
    def _guarding(self, channel: Channel) -> Iterator[None]:
        with self._lock:
            if self._is_set:
                raise TransferError(TransferFailure.CANCELLED, "the transfer was cancelled")
            self._channels.add(channel)
        try:
            yield
        finally:
            with self._lock:
                self._channels.discard(channel)


async def settle(pulling: Future[T], cancellation: Cancellation) -> T:
    """Await a pull; when the task is cancelled, end the pull before letting the task go."""
    waiting = asyncio.wrap_future(pulling)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        cancellation.cancel()
        pulling.cancel()  # had it not begun
        while not pulling.done():  # ends within a slice of the channel's wait
            try:
                await asyncio.wait([waiting], timeout=0.1)
            except asyncio.CancelledError:
                continue  # the blocks are not safe yet; the first cancellation is raised below
        if not waiting.cancelled() and waiting.done():
            waiting.exception()  # seen: nobody else will ask
        raise
