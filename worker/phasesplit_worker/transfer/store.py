"""The prefill side's registry of KV that a decode worker may pull.

States: RUNNING → READY → PULLED, EXPIRED or ABORTED. The engine reports through the hooks (on its
own thread, which never waits for more than a short lock); one thread of the store computes
checksums right after each chunk, expires what nobody fetched and gives blocks back to the engine.
Checksums are taken when a chunk is done and not when it is sent, so that a block reused too early
is caught. Blocks go back once no thread reads them. Knows no sockets.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phasesplit.api.manifest import KVManifest, ManifestState
from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.sequence import Sequence
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.export import Export, ExportIdentity
from phasesplit_worker.transfer.integrity import checksum

MAX_ENDED_MANIFESTS = 64  # shown by `kv inspect` after the fact
MAX_PROMISES = 4096
PROMISE_S = 30.0  # by then a promised prefill has been accepted or never will be
MAX_ENDED_STATES = 4096  # ids whose end is remembered, to name the reason to a late pull
_SEAL_BATCH_BLOCKS = 64
_IDLE_WAIT_S = 1.0

_END_FAILURES = {
    ManifestState.EXPIRED: TransferFailure.EXPIRED,
    ManifestState.ABORTED: TransferFailure.ABORTED,
    ManifestState.PULLED: TransferFailure.UNKNOWN_REQUEST,
}


class KVStore:
    """Implements the engine's `TransferHooks`. All methods are thread-safe."""

    def __init__(
        self,
        pool: KVBlocks,
        identity: ExportIdentity,
        *,
        ttl_s: float,
        release: Callable[[str], None],
        on_expired: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`release(request_id)` frees held blocks; `on_expired(num_blocks)` counts them."""
        self._pool = pool
        self._identity = identity
        self._ttl_s = ttl_s
        self._release = release
        self._on_expired = on_expired
        self._clock = clock
        self._changed = threading.Condition()
        self._exports: dict[str, Export] = {}
        self._promised_s: OrderedDict[str, float] = OrderedDict()  # request id -> when promised
        self._ended_states: OrderedDict[str, ManifestState] = OrderedDict()
        self._ended_manifests: OrderedDict[str, KVManifest] = OrderedDict()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)

    def start(self) -> None:
        """Start the thread that seals, expires and releases."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; whatever is still exported counts as aborted."""
        with self._changed:
            self._is_stopped = True
            for export in self._exports.values():
                self._end(export, ManifestState.ABORTED)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # Hooks: called on the engine thread.

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
            self._promised_s.pop(export.request_id, None)
            self._ended_states.pop(export.request_id, None)
            self._ended_manifests.pop(export.request_id, None)
            self._exports[export.request_id] = export
            self._changed.notify_all()

    def on_blocks_ready(self, request_id: str, num_ready_tokens: int, block_table: tuple[int, ...]) -> None:
        """A chunk is done."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None and not export.is_ended:
                export.set_ready(num_ready_tokens, block_table)
                self._changed.notify_all()

    def on_prefill_finished(self, request_id: str, first_token: int, sampling_state: dict[str, int]) -> None:
        """All KV is present and held; the time to live counts from here."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is None:
                return
            export.finished_s = self._clock()
            export.expires_s = export.finished_s + self._ttl_s
            export.first_token = first_token
            export.sampling_state = dict(sampling_state)
            if not export.is_ended:
                export.num_ready_tokens = export.num_tokens
                export.state = ManifestState.READY
            self._changed.notify_all()

    def on_prefill_aborted(self, request_id: str, reason: str) -> None:
        """The engine takes the blocks back. A frame being sent from them fails its checksum."""
        del reason  # every abort looks alike to a peer
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None:
                export.is_engine_done = True
                self._end(export, ManifestState.ABORTED)
            elif self._promised_s.pop(request_id, None) is not None:
                self._remember_state(request_id, ManifestState.ABORTED)
                self._changed.notify_all()

    # The peer's side.

    def promise(self, request_id: str) -> None:
        """A peer is told of this request; a pull may come before the engine has accepted it."""
        with self._changed:
            if request_id in self._exports or request_id in self._ended_states:
                return
            self._promised_s[request_id] = self._clock()
            while len(self._promised_s) > MAX_PROMISES:
                self._promised_s.popitem(last=False)

    def wait_accepted(self, request_id: str, timeout_s: float) -> bool:
        """Whether a promised request can be read now, waiting at most `timeout_s`.

        False: not yet. Raises TransferError for one that was never promised, or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_promised(request_id), timeout_s)
            if request_id in self._exports:
                return True
            if request_id in self._ended_states:
                _check_readable(request_id, self._ended_states[request_id])
            if not self._is_promised(request_id):
                raise TransferError(
                    TransferFailure.UNKNOWN_REQUEST, f"request {request_id} has no KV on this worker"
                )
            return False

    def _is_promised(self, request_id: str) -> bool:
        promised_s = self._promised_s.get(request_id)
        return promised_s is not None and self._clock() - promised_s < PROMISE_S

    @contextmanager
    def reading(self, request_id: str) -> Iterator[Export]:
        """Keep an export's blocks from being given back. Raises TransferError when it is no more."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is None:
                raise TransferError(
                    TransferFailure.UNKNOWN_REQUEST, f"request {request_id} has no KV on this worker"
                )
            _check_readable(request_id, export.state)
            export.num_readers += 1
        try:
            yield export
        finally:
            with self._changed:
                export.num_readers -= 1
                self._changed.notify_all()

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
            return export.block_table[start:stop], tuple(export.checksums[start:stop])

    def is_ended(self, export: Export) -> bool:
        """Whether sending from it must stop."""
        return export.is_ended

    def finished_age_s(self, export: Export) -> float:
        """Seconds since its prefill finished, 0 while it runs."""
        return 0.0 if export.finished_s is None else max(0.0, self._clock() - export.finished_s)

    def to_manifest(self, export: Export) -> KVManifest:
        """The manifest of an export that is being read."""
        export.hash_tokens()  # outside the lock: long prompts take a while
        with self._changed:
            return export.to_manifest(self._identity, self._clock(), self._ttl_s)

    def manifest(self, request_id: str) -> KVManifest | None:
        """The manifest of a request, also for a while after its end. None: unknown here."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is None:
                return self._ended_manifests.get(request_id)
        return self.to_manifest(export)

    def release(self, request_id: str, *, pulled: bool) -> None:
        """The peer has the KV (`pulled`), or nobody wants it any more. Unknown ids are ignored."""
        with self._changed:
            export = self._exports.get(request_id)
            if export is not None:
                is_pulled = pulled and export.state is ManifestState.READY
                self._end(export, ManifestState.PULLED if is_pulled else ManifestState.ABORTED)

    @property
    def num_exports(self) -> int:
        """Exports whose blocks have not been given back."""
        with self._changed:
            return len(self._exports)

    # The store's own thread.

    def work(self) -> float:
        """Seal, expire and release what is due; return the seconds until there may be more."""
        expired = self._expire()
        if expired:
            self._on_expired(expired)
        for request_id, must_release in self._collect_removable():
            if must_release:
                self._release(request_id)
        while (batch := self._next_unsealed()) is not None:
            self._seal(*batch)
        return self._next_wait_s()

    def _run(self) -> None:
        while True:
            wait_s = self.work()
            with self._changed:
                if self._is_stopped and not self._has_removable():
                    return
                if not self._has_work():
                    self._changed.wait(wait_s)

    def _expire(self) -> int:
        """End exports nobody came for; a transfer under way is left to its own deadlines."""
        now_s = self._clock()
        num_blocks = 0
        with self._changed:
            for export in self._exports.values():
                is_due = export.expires_s is not None and now_s >= export.expires_s
                if is_due and not export.is_ended and export.num_readers == 0:
                    self._end(export, ManifestState.EXPIRED)
                    num_blocks += export.num_blocks
        return num_blocks

    def _collect_removable(self) -> list[tuple[str, bool]]:
        """Forget ended, unread exports; for each say whether the engine still holds its blocks."""
        removed: list[tuple[str, bool]] = []
        with self._changed:
            for export in [export for export in self._exports.values() if export.is_removable]:
                del self._exports[export.request_id]
                removed.append((export.request_id, not export.is_engine_done))
                self._remember(export)
        return removed

    def _remember(self, export: Export) -> None:
        self._remember_state(export.request_id, export.state)
        self._ended_manifests[export.request_id] = export.to_manifest(
            self._identity, self._clock(), self._ttl_s
        )
        while len(self._ended_manifests) > MAX_ENDED_MANIFESTS:
            self._ended_manifests.popitem(last=False)

    def _remember_state(self, request_id: str, state: ManifestState) -> None:
        self._ended_states[request_id] = state
        while len(self._ended_states) > MAX_ENDED_STATES:
            self._ended_states.popitem(last=False)

    def _next_unsealed(self) -> tuple[Export, int, tuple[int, ...]] | None:
        """Claim the next range to checksum; the claim counts as a reader."""
        with self._changed:
            for export in self._exports.values():
                start = export.num_sealed_blocks
                stop = min(export.num_ready_blocks, start + _SEAL_BATCH_BLOCKS, len(export.block_table))
                if start < stop and not export.is_ended:
                    export.num_readers += 1
                    return export, start, export.block_table[start:stop]
        return None

    def _seal(self, export: Export, start: int, block_ids: tuple[int, ...]) -> None:
        checksums = [checksum(self._pool.block_view(block_id)) for block_id in block_ids]
        with self._changed:
            export.num_readers -= 1
            stop = start + len(block_ids)
            # A preemption in between may have moved the blocks: then this was for nothing.
            is_current = export.num_sealed_blocks == start and export.block_table[start:stop] == block_ids
            if is_current and export.num_ready_blocks >= stop:
                export.checksums.extend(checksums)
            self._changed.notify_all()

    def _end(self, export: Export, state: ManifestState) -> None:
        """Called with the lock held. The first end counts."""
        if not export.is_ended:
            export.state = state
        self._changed.notify_all()

    def _has_removable(self) -> bool:
        return any(export.is_removable for export in self._exports.values())

    def _has_work(self) -> bool:
        """Called with the lock held, so that nothing is missed before a wait."""
        return self._has_removable() or any(
            not export.is_ended
            and export.num_sealed_blocks < min(export.num_ready_blocks, len(export.block_table))
            for export in self._exports.values()
        )

    def _next_wait_s(self) -> float:
        now_s = self._clock()
        with self._changed:
            due_s = [
                export.expires_s
                for export in self._exports.values()
                if export.expires_s is not None and not export.is_ended and export.num_readers == 0
            ]
        return max(0.0, min([_IDLE_WAIT_S, *(due - now_s for due in due_s)]))


def _check_readable(request_id: str, state: ManifestState) -> None:
    reason = _END_FAILURES.get(state)
    if reason is not None:
        raise TransferError(reason, f"the KV of request {request_id} is {state.value} on the prefill worker")
