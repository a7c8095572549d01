"""The prefill side's registry of KV that a decode worker may pull.

States: RUNNING → READY → PULLED, EXPIRED or ABORTED. The engine reports through the hooks (on its
own thread, which never waits for more than a short lock); readers are the threads that serve peers
and the one that computes checksums. An ended export stays until nobody reads it and the engine can
have its blocks back. Keeps records and wakes waiters; reads no bytes and knows no sockets.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from phasesplit.api.manifest import KVManifest, ManifestState
from phasesplit_worker.sequence import Sequence
from phasesplit_worker.transfer.ended import EndedExports, Promises
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.export import Export, ExportIdentity

SEAL_BATCH_BLOCKS = 64

_END_FAILURES = {
    ManifestState.EXPIRED: TransferFailure.EXPIRED,
    ManifestState.ABORTED: TransferFailure.ABORTED,
    ManifestState.PULLED: TransferFailure.UNKNOWN_REQUEST,
}


class Unsealed(NamedTuple):
    """Blocks whose checksums are due; whoever has it counts as a reader."""

    export: Export
    start: int
    block_ids: tuple[int, ...]
    num_losses: int  # of the export when they were taken


class Removed(NamedTuple):
    """An export that nobody reads any more."""

    request_id: str
    is_held: bool  # the engine still holds its blocks


class KVStore:
    """Implements the engine's `TransferHooks`. All methods are thread-safe."""

    def __init__(
        self, identity: ExportIdentity, *, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._identity = identity
        self._ttl_s = ttl_s
        self._clock = clock
        self._changed = threading.Condition()
        self._exports: dict[str, Export] = {}
        self._ended = EndedExports()
        self._promises = Promises()
        self._is_closed = False

    # -- hooks, called on the engine thread ------------------------------------------------------

    def on_prefill_accepted(self, sequence: Sequence) -> None:
        """A leg 1 is queued: its KV can be asked for from now on."""
        export = Export(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.slice_token_ids(0, sequence.num_known_tokens)),
            block_size=self._identity.layout.block_size,
            created_s=self._clock(),
            sampling_state={"seed": sequence.seed},
        )
        with self._changed:
            self._promises.settle(export.request_id)
            self._ended.forget(export.request_id)
            self._exports[export.request_id] = export
            self._changed.notify_all()

    def on_blocks_ready(self, request_id: str, num_ready_tokens: int, block_table: tuple[int, ...]) -> None:
        """A chunk is done, or (0 tokens) a preemption has taken all blocks."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None and not export.is_ended:
                export.set_ready(num_ready_tokens, block_table)
                self._changed.notify_all()

    def on_prefill_finished(self, request_id: str, first_token: int, sampling_state: dict[str, int]) -> None:
        """All KV is present and held; the time to live counts from here."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None:
                export.finish(first_token, sampling_state, self._clock(), self._ttl_s)
                self._changed.notify_all()

    def on_prefill_aborted(self, request_id: str, reason: str) -> None:
        """The engine takes the blocks back. A frame being sent from them fails its checksum."""
        del reason  # every abort looks alike to a peer
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None:
                export.is_engine_done = True
                self._end(export, ManifestState.ABORTED)
            elif self._promises.settle(request_id):
                self._ended.add(request_id, ManifestState.ABORTED)
                self._changed.notify_all()

    # -- the peers' side ---------------------------------------------------------------------------

    def promise(self, request_id: str) -> None:
        """A peer is told of this request; a pull may come before the engine has accepted it."""
        with self._changed:
            if request_id not in self._exports and self._ended.state(request_id) is None:
                self._promises.add(request_id, self._clock())

    def wait_accepted(self, request_id: str, timeout_s: float) -> bool:
        """Whether a promised request can be read now, waiting at most `timeout_s`.

        False: not yet. Raises TransferError for one that was never promised, or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pending(request_id), timeout_s)
            if self._is_pending(request_id):
                return False
            self._find(request_id)
            return True

    @contextmanager
    def reading(self, request_id: str) -> Iterator[Export]:
        """Keep an export's blocks from being given back. Raises TransferError when it is no more."""
        with self._changed:
            export = self._find(request_id)
            export.num_readers += 1
        try:
            yield export
        finally:
            self._stop_reading(export)

    def wait_sealed(self, export: Export, block: int, timeout_s: float) -> int:
        """Number of sealed blocks, once it is above `block` or the time is over.

        Raises TransferError when the export has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: export.num_sealed_blocks > block or export.is_ended, timeout_s)
            _check_readable(export.request_id, export.state)
            return export.num_sealed_blocks

    def wait_complete(self, export: Export, timeout_s: float) -> bool:
        """Whether the export is complete, waiting for it at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: export.is_complete or export.is_ended, timeout_s)
            _check_readable(export.request_id, export.state)
            return export.is_complete

    def sealed(self, export: Export, start: int, stop: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Block ids and checksums of a sealed range, consistent with each other."""
        with self._changed:
            _check_readable(export.request_id, export.state)
            checksums = tuple(export.checksums[start:stop])
            return export.block_table[start : start + len(checksums)], checksums

    def finished_age_s(self, export: Export) -> float:
        """Seconds since its prefill finished, 0 while it runs."""
        return 0.0 if export.finished_s is None else max(0.0, self._clock() - export.finished_s)

    def to_manifest(self, export: Export) -> KVManifest:
        """The manifest of an export as of now."""
        export.hash_tokens(self._identity.model_fingerprint)  # outside the lock: long prompts take a while
        with self._changed:
            return export.to_manifest(self._identity, self._clock(), self._ttl_s)

    def manifest(self, request_id: str) -> KVManifest | None:
        """The manifest of a request, also for a while after its end. None: unknown here."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is None:
                return self._ended.manifest(request_id)
        return self.to_manifest(export)

    def release(self, request_id: str, *, pulled: bool) -> None:
        """The peer has the KV (`pulled`), or nobody wants it any more. Unknown ids are ignored."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None:
                is_pulled = pulled and export.state is ManifestState.READY
                self._end(export, ManifestState.PULLED if is_pulled else ManifestState.ABORTED)

    # -- housekeeping --------------------------------------------------------------------------------

    @property
    def num_exports(self) -> int:
        """Exports whose blocks have not been given back."""
        with self._changed:
            return len(self._exports)

    def take_unsealed(self) -> Unsealed | None:
        """The next range to checksum. Must be given back with `seal`."""
        with self._changed:
            for export in self._exports.values():
                block_ids = export.unsealed_blocks(SEAL_BATCH_BLOCKS)
                if block_ids:
                    export.num_readers += 1
                    return Unsealed(export, export.num_sealed_blocks, block_ids, export.num_losses)
        return None

    def seal(self, unsealed: Unsealed, checksums: list[str]) -> None:
        """Add checksums; a range that a preemption has moved meanwhile is dropped."""
        with self._changed:
            if unsealed.num_losses == unsealed.export.num_losses:  # the same ids may have come back
                unsealed.export.seal(unsealed.start, unsealed.block_ids, checksums)
        self._stop_reading(unsealed.export)

    def give_up(self, unsealed: Unsealed) -> None:
        """The range could not be read: nobody can pull this export."""
        with self._changed:
            self._end(unsealed.export, ManifestState.ABORTED)
        self._stop_reading(unsealed.export)

    def expire(self) -> int:
        """End exports that nobody came for; the number of their blocks.

        One that is being read is left to the reader's own deadlines.
        """
        now_s = self._clock()
        num_blocks = 0
        with self._changed:
            for export in self._exports.values():
                if export.is_expirable and export.expires_s is not None and now_s >= export.expires_s:
                    self._end(export, ManifestState.EXPIRED)
                    num_blocks += export.num_blocks
        return num_blocks

    def collect_removable(self) -> list[Removed]:
        """Forget ended exports that nobody reads."""
        with self._changed:
            removable = [export for export in self._exports.values() if export.is_removable]
            for export in removable:
                del self._exports[export.request_id]
                manifest = export.to_manifest(self._identity, self._clock(), self._ttl_s)
                self._ended.add(export.request_id, export.state, manifest)
        return [Removed(export.request_id, is_held=not export.is_engine_done) for export in removable]

    def wait_for_work(self, timeout_s: float) -> None:
        """Wait until something can be sealed, expired or removed, at most `timeout_s`."""
        with self._changed:
            if self._is_closed or any(export.has_work for export in self._exports.values()):
                return
            due_s = [export.expires_s for export in self._exports.values() if export.is_expirable]
            next_s = min((due for due in due_s if due is not None), default=float("inf"))
            self._changed.wait(max(0.0, min(timeout_s, next_s - self._clock())))

    def close(self) -> None:
        """End every export."""
        with self._changed:
            self._is_closed = True
            for export in self._exports.values():
                self._end(export, ManifestState.ABORTED)
            self._changed.notify_all()

    # -- with the lock held --------------------------------------------------------------------------

    def _find(self, request_id: str) -> Export:
        export = self._exports.get(request_id)
        state = self._ended.state(request_id) if export is None else export.state
        if state is not None:
            _check_readable(request_id, state)
        if export is None:
            raise TransferError(
                TransferFailure.UNKNOWN_REQUEST, f"request {request_id} has no KV on this worker"
            )
        return export

    def _is_pending(self, request_id: str) -> bool:
        return not self._is_closed and self._promises.is_open(request_id, self._clock())

    def _end(self, export: Export, state: ManifestState) -> None:
        if not export.is_ended:  # the first end counts
            export.state = state
        self._changed.notify_all()

    def _stop_reading(self, export: Export) -> None:
        with self._changed:
            export.num_readers -= 1
            self._changed.notify_all()


def _check_readable(request_id: str, state: ManifestState) -> None:
    reason = _END_FAILURES.get(state)
    if reason is not None:
        raise TransferError(reason, f"the KV of request {request_id} is {state.value} on the prefill worker")
