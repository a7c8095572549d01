"""A pull as the decode side sees it: what is asked for, what has arrived, what it amounted to.

Checks everything a peer says against what this side knows by itself: its own fingerprint, layout
and tokens, and the blocks it reserved. Knows no sockets.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

from phasesplit.api.manifest import KVLayout, KVManifest
from phasesplit_worker.requests import KVBlocks
from phasesplit_worker.transfer.cancellation import Cancellation
from phasesplit_worker.transfer.errors import Measured, TransferError, TransferFailure
from phasesplit_worker.transfer.integrity import checksum, count_blocks, hash_token_ids


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """Fetch the KV of `token_ids` into `block_ids`, from block `first_block` on."""

    request_id: str
    host: str
    port: int
    engine_id: str | None
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    first_block: int
    transfer_s: float  # longest time for the link, waiting for the prefill left out
    deadline: float  # monotonic, of the whole pull

    def check(self, layout: KVLayout) -> None:
        """Raise TransferError when the reservation does not fit the tokens."""
        num_blocks = count_blocks(len(self.token_ids), layout.block_size)
        if len(self.block_ids) < num_blocks or self.first_block > num_blocks:
            raise TransferError(
                TransferFailure.LAYOUT,
                f"{len(self.token_ids)} tokens need {num_blocks} blocks, {len(self.block_ids)} are reserved",
            )


@dataclass(frozen=True, kw_only=True)
class PullResult:
    """A verified pull. Durations in seconds on this worker's clock."""

    first_token: int
    sampling_state: dict[str, int]
    num_tokens: int
    num_blocks: int  # pulled, cached ones not counted
    num_bytes: int
    transfer_s: float  # first byte asked for to last byte verified
    busy_s: float  # without waiting for the prefill to compute
    exposed_s: float  # the part after the prefill had finished
    transport: str
    num_streams: int
    num_retries: int
    measured: Measured  # the last attempt, for the link's bandwidth
    manifest: KVManifest


class Transport(Protocol):
    """One way to move KV. Returns when every block is verified and nothing writes any more."""

    @property
    def name(self) -> str: ...

    def pull(self, request: PullRequest, cancellation: Cancellation) -> PullResult:
        """Fetch, verify and confirm. Raises TransferError."""
        ...

    def release(self, request: PullRequest) -> None:
        """Tell the peer, if it can be reached, that nobody wants its KV any more."""
        ...

    def probe(self, host: str, port: int, num_bytes: int, deadline: float) -> Measured:
        """Measure the link from a peer. Raises TransferError."""
        ...

    def close(self) -> None:
        """Give back threads and connections; pulls must have ended."""
        ...


class Reception:
    """Blocks of one pull as they arrive. Shared by the streams of the pull."""

    def __init__(self, request: PullRequest, pool: KVBlocks, model_fingerprint: str) -> None:
        request.check(pool.layout)
        self.request = request
        self.layout = pool.layout
        self.model_fingerprint = model_fingerprint
        self._pool = pool
        self._token_ids_hash = hash_token_ids(request.token_ids, pool.layout.block_size, model_fingerprint)
        self._lock = threading.Lock()
        self._checksums: dict[int, str] = {}  # of verified blocks, by index
        self.first_token: int | None = None  # from a manifest that has passed

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole request."""
        return len(self._token_ids_hash)

    @property
    def num_verified(self) -> int:
        """Blocks pulled and verified."""
        with self._lock:
            return len(self._checksums)

    @property
    def first_missing(self) -> int:
        """First block that is neither cached nor verified."""
        with self._lock:
            for block in range(self.request.first_block, self.num_blocks):
                if block not in self._checksums:
                    return block
        return self.num_blocks

    def check_manifest(self, manifest: KVManifest) -> None:
        """Refuse KV of another model, shape, request or tokens, by name."""
        if manifest.request_id != self.request.request_id:
            raise TransferError(
                TransferFailure.UNKNOWN_REQUEST,
                f"asked for request {self.request.request_id}, offered {manifest.request_id}",
            )
        if manifest.model_fingerprint != self.model_fingerprint:
            raise TransferError(
                TransferFailure.FINGERPRINT,
                f"the prefill's model is {manifest.model_fingerprint}, "
                f"this worker's {self.model_fingerprint}",
            )
        if manifest.kv_layout != self.layout:
            raise TransferError(
                TransferFailure.LAYOUT,
                f"KV layouts differ in {_name_difference(manifest.kv_layout, self.layout)}",
            )
        if (
            manifest.num_tokens != len(self.request.token_ids)
            or manifest.token_ids_hash != self._token_ids_hash
        ):
            raise TransferError(
                TransferFailure.TOKEN_HASH,
                f"the prefill of request {manifest.request_id} was of other tokens",
            )
        if manifest.first_token is not None:
            self.first_token = manifest.first_token

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Where the bytes of blocks `[start, stop)` go."""
        return [self._pool.block_view(block_id) for block_id in self.request.block_ids[start:stop]]

    def verify(self, start: int, views: list[memoryview], checksums: tuple[str, ...]) -> None:
        """Check received blocks and hand them to the pool."""
        for block, (view, expected) in enumerate(zip(views, checksums, strict=True), start):
            if checksum(view) != expected:
                raise TransferError(
                    TransferFailure.CHECKSUM, f"block {block} differs from what the prefill sealed"
                )
            self._pool.commit_block(self.request.block_ids[block])
        with self._lock:
            self._checksums.update(enumerate(checksums, start))

    def check_final(self, manifest: KVManifest) -> int:
        """Check the complete manifest; return the first token."""
        self.check_manifest(manifest)
        if manifest.first_token is None or len(manifest.checksums) != self.num_blocks:
            raise TransferError(TransferFailure.PROTOCOL, "the final manifest is not complete")
        return manifest.first_token

    def check_sealed(self, manifest: KVManifest) -> None:
        """All blocks must be the ones finally sealed; those that are not will be asked for again."""
        with self._lock:
            stale = [
                block for block, received in self._checksums.items() if manifest.checksums[block] != received
            ]
            for block in stale:
                del self._checksums[block]
        if stale:
            raise TransferError(
                TransferFailure.CHECKSUM, f"the prefill computed block {min(stale)} again after sending it"
            )
        if self.first_missing != self.num_blocks:
            raise TransferError(TransferFailure.PROTOCOL, f"block {self.first_missing} did not arrive")


def _name_difference(theirs: KVLayout, ours: KVLayout) -> str:
    differences = [
        f"{field} ({getattr(theirs, field)} there, {getattr(ours, field)} here)"
        for field in KVLayout.model_fields
        if getattr(theirs, field) != getattr(ours, field)
    ]
    return ", ".join(differences)
