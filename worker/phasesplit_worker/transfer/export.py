"""One request's KV on the prefill side: what it is, how much of it is ready, who reads it.

A plain record with derived values; KVStore owns it and guards it with its lock.

    blocks   0 ......... num_sealed_blocks ......... num_ready_blocks ......... num_blocks
             checksummed, may be sent  computed, checksum due       being computed
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from phasesplit.api.manifest import KVLayout, KVManifest, ManifestState
from phasesplit_worker.transfer.integrity import count_blocks, hash_token_ids

ENDED_STATES = frozenset({ManifestState.PULLED, ManifestState.EXPIRED, ManifestState.ABORTED})


@dataclass(frozen=True, kw_only=True)
class ExportIdentity:
    """What every manifest of this worker says about the worker."""

    model_fingerprint: str
    layout: KVLayout
    engine_id: str
    endpoint: Callable[[], str]  # host:port; known once the server listens


@dataclass(eq=False, kw_only=True)
class Export:
    """A prefill's KV. Changed only under the store's lock."""

    request_id: str
    token_ids: tuple[int, ...]
    block_size: int
    created_s: float
    sampling_state: dict[str, int]
    block_table: tuple[int, ...] = ()
    num_ready_tokens: int = 0
    checksums: list[str] = field(default_factory=list)  # one per sealed block
    num_losses: int = 0  # times that blocks were taken away; what was read before may be anything
    state: ManifestState = ManifestState.RUNNING
    first_token: int | None = None
    finished_s: float | None = None  # when the prefill finished; the blocks are held from then on
    expires_s: float | None = None
    num_readers: int = 0
    is_engine_done: bool = False  # the engine has taken the blocks back by itself
    token_ids_hash: tuple[str, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV this is once finished."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks of the finished KV."""
        return count_blocks(self.num_tokens, self.block_size)

    @property
    def num_ready_blocks(self) -> int:
        """Blocks that will not change any more: whole ones, and the last when all is computed."""
        if self.num_ready_tokens >= self.num_tokens:
            return self.num_blocks
        return self.num_ready_tokens // self.block_size

    @property
    def num_sealed_blocks(self) -> int:
        """Blocks that are ready and have a checksum."""
        return len(self.checksums)

    @property
    def is_ended(self) -> bool:
        """Nobody may read it any more."""
        return self.state in ENDED_STATES

    @property
    def is_complete(self) -> bool:
        """Finished and every block sealed."""
        return self.state is ManifestState.READY and self.num_sealed_blocks == self.num_blocks

    @property
    def is_removable(self) -> bool:
        """Ended, unread, and either held by the engine until released or already gone there."""
        is_held_or_gone = self.is_engine_done or self.finished_s is not None
        return self.is_ended and self.num_readers == 0 and is_held_or_gone

    @property
    def is_expirable(self) -> bool:
        """Nobody has come yet, nobody is here."""
        return self.expires_s is not None and not self.is_ended and self.num_readers == 0

    @property
    def has_work(self) -> bool:
        """Something can be sealed or removed."""
        return self.is_removable or bool(self.unsealed_blocks(1))

    def unsealed_blocks(self, max_blocks: int) -> tuple[int, ...]:
        """Ids of the next ready blocks without a checksum."""
        if self.is_ended:
            return ()
        start = self.num_sealed_blocks
        return self.block_table[start : min(start + max_blocks, self.num_ready_blocks)]

    def seal(self, start: int, block_ids: tuple[int, ...], checksums: list[str]) -> None:
        """Add the checksums of blocks from `start` on, unless the blocks have moved meanwhile."""
        stop = start + len(block_ids)
        is_next = self.num_sealed_blocks == start and self.num_ready_blocks >= stop
        if is_next and self.block_table[start:stop] == block_ids:
            self.checksums.extend(checksums)

    def finish(self, first_token: int, sampling_state: dict[str, int], now_s: float, ttl_s: float) -> None:
        """The prefill is done. One that has ended meanwhile only becomes removable."""
        self.finished_s = now_s
        self.expires_s = now_s + ttl_s
        self.first_token = first_token
        self.sampling_state = dict(sampling_state)
        if not self.is_ended:
            self.num_ready_tokens = self.num_tokens
            self.state = ManifestState.READY

    def set_ready(self, num_ready_tokens: int, block_table: tuple[int, ...]) -> None:
        """Take the engine's word; after a preemption drop the checksums of blocks that moved."""
        num_same = 0
        for old, new in zip(self.block_table, block_table, strict=False):
            if old != new:
                break
            num_same += 1
        self.num_losses += num_ready_tokens < self.num_ready_tokens
        self.block_table = block_table
        self.num_ready_tokens = num_ready_tokens
        del self.checksums[min(num_same, self.num_ready_blocks) :]

    def hash_tokens(self, model_fingerprint: str) -> tuple[str, ...]:
        """The chained token hash, computed once. Safe without the lock: every thread gets the same."""
        if self.token_ids_hash is None:
            self.token_ids_hash = hash_token_ids(self.token_ids, self.block_size, model_fingerprint)
        return self.token_ids_hash

    def to_manifest(self, identity: ExportIdentity, now_s: float, ttl_s: float) -> KVManifest:
        """The manifest as of now."""
        expires_in_s = ttl_s if self.expires_s is None else max(0.0, self.expires_s - now_s)
        return KVManifest(
            request_id=self.request_id,
            model_fingerprint=identity.model_fingerprint,
            kv_layout=identity.layout,
            token_ids_hash=self.hash_tokens(identity.model_fingerprint),
            num_tokens=self.num_tokens,
            num_ready_tokens=min(self.num_ready_tokens, self.num_tokens),
            first_token=self.first_token,
            sampling_state=dict(self.sampling_state),
            blocks=self.block_table[: self.num_blocks],
            bytes=self.num_blocks * identity.layout.bytes_per_block,
            checksums=tuple(self.checksums),
            engine_id=identity.engine_id,
            endpoint=identity.endpoint(),
            state=self.state,
            age_s=max(0.0, now_s - self.created_s),
            expires_in_s=0.0 if self.is_ended else expires_in_s,
        )
