"""A store of exports with a clock set by hand, for tests of the prefill side."""

import pytest

from helpers_transfer import FINGERPRINT, LAYOUT, MemoryPool, make_sequence
from phasesplit_worker.transfer.errors import TransferError, TransferFailure
from phasesplit_worker.transfer.export import ExportIdentity
from phasesplit_worker.transfer.housekeeping import Housekeeper
from phasesplit_worker.transfer.store import KVStore

TOKENS = list(range(10))  # three blocks of four, the last of two
BLOCKS = (7, 3, 5)
TTL_S = 30.0
STATE = {"seed": 1, "position": 10}


class Setup:
    """A store with a clock set by hand, and a housekeeper that works when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.released: list[str] = []
        self.expired: list[int] = []
        self.pool = MemoryPool(16)
        for block_id in range(16):
            self.pool.fill(block_id, seed=block_id)
        identity = ExportIdentity(
            model_fingerprint=FINGERPRINT, layout=LAYOUT, engine_id="e", endpoint=lambda: "10.0.0.1:8100"
        )
        self.store = KVStore(identity, ttl_s=TTL_S, clock=lambda: self.now_s)
        self.housekeeper = Housekeeper(
            self.store, self.pool, release=self.released.append, on_expired=self.expired.append
        )

    def work(self) -> None:
        self.housekeeper.work()

    def accept(self, request_id: str = "r") -> None:
        self.store.on_prefill_accepted(make_sequence(request_id, TOKENS))

    def run(self, request_id: str = "r") -> None:
        self.accept(request_id)
        self.store.on_blocks_ready(request_id, 10, BLOCKS)
        self.store.on_prefill_finished(request_id, 42, STATE)
        self.work()

    def refusal(self, request_id: str = "r") -> TransferFailure:
        with pytest.raises(TransferError) as caught, self.store.reading(request_id):
            pass
        return caught.value.reason
