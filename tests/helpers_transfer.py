"""A pool of plain memory, a prefill played by hand, and two transfer sides, for tests of transfer.

The played engine holds a finished prefill's blocks until they are released, as the real one does.
"""

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVLayout
from phasesplit_worker.sequence import RequestKind, SamplingParams, Sequence
from phasesplit_worker.transfer.manager import TransferManager, TransferSettings
from phasesplit_worker.transfer.tcp_session import ServerLimits

KEY = b"a transfer key of thirty-two byte"
FINGERPRINT = "model-a"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


class MemoryPool:
    """`KVBlocks` over one bytearray."""

    def __init__(self, num_blocks: int = 64, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._data = memoryview(bytearray(num_blocks * layout.bytes_per_block))
        self.committed: list[int] = []

    def block_view(self, block_id: int) -> memoryview:
        size = self.layout.bytes_per_block
        return self._data[block_id * size : (block_id + 1) * size]

    def commit_block(self, block_id: int) -> None:
        self.committed.append(block_id)

    def fill(self, block_id: int, seed: int) -> None:
        self.block_view(block_id)[:] = Random(seed).randbytes(self.layout.bytes_per_block)

    def read_whole(self) -> memoryview:
        return self._data

    def read(self, block_ids: tuple[int, ...]) -> bytes:
        return b"".join(bytes(self.block_view(block_id)) for block_id in block_ids)


class BlockAllocator:
    """Counts blocks in use, as an engine's block manager would."""

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._free = list(range(num_blocks))
        self._num_blocks = num_blocks

    def take(self, count: int) -> tuple[int, ...]:
        with self._lock:
            taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small, or blocks have leaked"
        return tuple(taken)

    def give(self, block_ids: tuple[int, ...]) -> None:
        with self._lock:
            self._free.extend(block_ids)

    @property
    def num_used(self) -> int:
        with self._lock:
            return self._num_blocks - len(self._free)


@dataclass
class Prefill:
    """One leg 1 of the played engine."""

    request_id: str
    token_ids: list[int]
    block_ids: tuple[int, ...]
    first_token: int = 7


@dataclass
class PlayedEngine:
    """Prefills by hand: the test says when chunks are done."""

    pool: MemoryPool
    allocator: BlockAllocator = field(init=False)
    held: dict[str, Prefill] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    manager: TransferManager | None = None

    def __post_init__(self) -> None:
        self.allocator = BlockAllocator(self.pool.num_blocks)

    def accept(self, request_id: str, token_ids: list[int]) -> Prefill:
        num_blocks = -(-len(token_ids) // self.pool.layout.block_size)
        prefill = Prefill(request_id, token_ids, self.allocator.take(num_blocks))
        self.held[request_id] = prefill
        self._hooks.on_prefill_accepted(make_sequence(request_id, token_ids))
        return prefill

    def compute(self, prefill: Prefill, num_tokens: int) -> None:
        """A chunk up to `num_tokens` is done."""
        num_blocks = -(-num_tokens // self.pool.layout.block_size)
        for index in range(num_blocks):
            self.pool.fill(prefill.block_ids[index], seed=hash((tuple(prefill.token_ids), index)))
        self._hooks.on_blocks_ready(prefill.request_id, num_tokens, prefill.block_ids[:num_blocks])

    def finish(self, prefill: Prefill) -> None:
        self._hooks.on_prefill_finished(
            prefill.request_id, prefill.first_token, {"seed": 1, "position": len(prefill.token_ids)}
        )

    def run(self, request_id: str, token_ids: list[int]) -> Prefill:
        """A whole prefill at once."""
        prefill = self.accept(request_id, token_ids)
        self.compute(prefill, len(token_ids))
        self.finish(prefill)
        return prefill

    def abort(self, request_id: str) -> None:
        """The engine ends a prefill by itself and takes its blocks back."""
        prefill = self.held.pop(request_id, None)
        if prefill is not None:
            self._hooks.on_prefill_aborted(request_id, "abort")
            self.allocator.give(prefill.block_ids)

    def release_held(self, request_id: str) -> None:
        prefill = self.held.pop(request_id, None)
        if prefill is not None:
            self.released.append(request_id)
            self.allocator.give(prefill.block_ids)

    @property
    def _hooks(self):
        assert self.manager is not None
        return self.manager.hooks


@dataclass
class Side:
    """A worker reduced to its transfer side."""

    engine: PlayedEngine
    manager: TransferManager

    @property
    def pool(self) -> MemoryPool:
        return self.engine.pool


@asynccontextmanager
async def running_side(
    name: str,
    *,
    pool: MemoryPool | None = None,
    key: bytes = KEY,
    on_expired: Callable[[int], None] = lambda _: None,
    **settings: object,
) -> AsyncIterator[Side]:
    """Start a side on a free loopback port and stop it afterwards."""
    engine = PlayedEngine(pool or MemoryPool())
    values: dict[str, object] = {
        "pod": f"{name}-0",
        "node": f"node-{name}",
        "advertised_host": "127.0.0.1",
        "host": "127.0.0.1",
        "model_fingerprint": FINGERPRINT,
        "server_limits": ServerLimits(heartbeat_s=0.1),
        **settings,
    }
    manager = TransferManager(
        TransferSettings(**values),  # type: ignore[arg-type]
        key,
        engine.pool,
        release=engine.release_held,
        on_expired=on_expired,
    )
    engine.manager = manager
    await manager.start()
    try:
        yield Side(engine, manager)
    finally:
        await manager.stop()


def make_sequence(request_id: str, token_ids: list[int]) -> Sequence:
    """A leg 1 as the engine has it when it is accepted."""
    return Sequence(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(),
        seed=1,
        kind=RequestKind.PREFILL,
    )


def params_for(side: Side, request_id: str, num_tokens: int) -> KVTransferParams:
    """What the router would pass from leg 1 to leg 2."""
    return side.manager.offer(request_id, num_tokens)


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the condition comes true in time. Blocks; not for use on an event loop's thread."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
