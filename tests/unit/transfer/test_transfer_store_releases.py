"""Every prefill whose KV was held is released exactly once, whatever happens to it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_transfer_store import BLOCKS, STATE, TTL_S, Setup


class Life:
    """An engine with four slots: it holds what finished until released, and checks every release."""

    def __init__(self) -> None:
        self.setup = Setup()
        self.names: dict[int, str] = {}
        self.running: set[str] = set()
        self.held: set[str] = set()
        self.setup.housekeeper._release = self.release

    def release(self, request_id: str) -> None:
        assert request_id in self.held, "released twice, or never held"
        self.held.discard(request_id)

    def accept(self, slot: int) -> None:
        if self.names.get(slot) not in self.running | self.held:
            self.names[slot] = name = f"r{len(self.names)}-{self.setup.now_s}-{slot}"
            self.running.add(name)
            self.setup.accept(name)

    def chunk(self, slot: int) -> None:
        if self.names.get(slot) in self.running:
            self.setup.store.on_blocks_ready(self.names[slot], 8, BLOCKS)

    def finish(self, slot: int) -> None:
        name = self.names.get(slot)
        if name in self.running:
            self.running.discard(name)
            self.held.add(name)
            self.setup.store.on_blocks_ready(name, 10, BLOCKS)
            self.setup.store.on_prefill_finished(name, 1, STATE)

    def abort(self, slot: int) -> None:
        name = self.names.get(slot)
        if name in self.running | self.held:
            self.running.discard(name)
            self.held.discard(name)
            self.setup.store.on_prefill_aborted(name, "abort")

    def pulled(self, slot: int) -> None:
        self.setup.store.release(self.names.get(slot, "unknown"), pulled=True)

    def unwanted(self, slot: int) -> None:
        self.setup.store.release(self.names.get(slot, "unknown"), pulled=False)

    def later(self, slot: int) -> None:
        self.setup.now_s += TTL_S / 2

    def work(self, slot: int) -> None:
        self.setup.work()


OPERATIONS = ["accept", "chunk", "finish", "abort", "pulled", "unwanted", "later", "work"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3)), max_size=40))
def test_every_held_prefill_is_released_exactly_once_whatever_happens(operations):
    life = Life()
    for operation, slot in operations:
        getattr(life, operation)(slot)
    for slot in range(4):
        life.finish(slot)
    life.setup.now_s += TTL_S
    life.setup.work()
    assert life.held == set()
    assert life.setup.store.num_exports == 0
