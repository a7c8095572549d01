"""A trial of both modes at once: a fair draw, and each mode on its own workers."""

import random
from collections import Counter

import pytest

from phasesplit.api.names import Role
from phasesplit.api.routing import RoutingTable, ServedMode, TrialTable
from phasesplit_router.fleet import Demand, Fleet, WorkerView
from phasesplit_router.halves import Halves
from phasesplit_router.policy import Choice, choose


class Tables:
    """The table that the router has now."""

    def __init__(self, share: float = 0.5) -> None:
        self.table: RoutingTable | None = RoutingTable(trial=TrialTable(id="t1", split_share=share))

    def __call__(self) -> RoutingTable | None:
        return self.table


def dealt(halves: Halves, count: int, slo_class: str = "default", tokens: int = 100) -> Counter[ServedMode]:
    found = [halves.assign(slo_class, tokens) for _ in range(count)]
    return Counter(item[1] for item in found if item is not None)


def test_alike_requests_are_dealt_out_evenly() -> None:
    halves = Halves(random.Random(1), Tables())
    for slo_class, tokens in (("a", 100), ("a", 5000), ("b", 100)):
        assert dealt(halves, 40, slo_class, tokens)[ServedMode.SPLIT] == 20


def test_strata_are_mixed_but_each_is_balanced() -> None:
    halves, rng = Halves(random.Random(2), Tables()), random.Random(3)
    split: Counter[int] = Counter()
    for _ in range(400):
        tokens = rng.choice((50, 500, 5000))
        assigned = halves.assign("default", tokens)
        assert assigned is not None
        split[tokens] += 1 if assigned[1] is ServedMode.SPLIT else -1
    assert all(abs(surplus) <= 2 for surplus in split.values())


@pytest.mark.parametrize("share", [0.4, 0.25])
def test_an_uneven_share_is_met_on_average(share: float) -> None:
    found = dealt(Halves(random.Random(4), Tables(share)), 4000)
    assert found[ServedMode.SPLIT] / 4000 == pytest.approx(share, abs=0.02)


def test_the_order_cannot_be_foreseen() -> None:
    halves = Halves(random.Random(5), Tables())
    blocks = set()
    for _ in range(60):
        block = [halves.assign("default", 100) for _ in range(4)]
        blocks.add(tuple(item[1] for item in block if item is not None))
    assert len(blocks) == 6


def test_a_draw_holds_while_its_trial_runs() -> None:
    tables = Tables()
    halves = Halves(random.Random(6), tables)
    assigned = halves.assign("default", 100)
    assert halves.mode(assigned) is not None
    tables.table = RoutingTable(trial=TrialTable(id="t2"))
    assert halves.mode(assigned) is None
    tables.table = RoutingTable()
    assert halves.assign("default", 100) is None
    assert halves.mode(assigned) is None


WORKERS = (
    WorkerView(pod="p0", node="a", role=Role.PREFILL),
    WorkerView(pod="d0", node="b", role=Role.DECODE),
    WorkerView(pod="c0", node="a", role=Role.COLOCATED),
    WorkerView(pod="c1", node="b", role=Role.COLOCATED),
)
FLEET = Fleet(mode=ServedMode.COLOCATED, workers=WORKERS)


def pods(mode: ServedMode | None, fleet: Fleet = FLEET) -> set[str]:
    """Where requests of a mode may go."""
    found = set()
    for number in range(30):
        demand = Demand(
            request_id=f"r{number}", prompt_tokens=100, output_tokens=10, ttft_s=1.0, tpot_s=0.1, mode=mode
        )
        decision = choose(demand, fleet.serving(demand.mode))
        assert isinstance(decision, Choice)
        found |= {decision.decode} | ({decision.prefill} if decision.prefill else set())
    return found


def test_each_mode_has_workers_of_its_own() -> None:
    assert pods(ServedMode.SPLIT) == {"p0", "d0"}
    assert pods(ServedMode.COLOCATED) == {"c0", "c1"}


def test_a_mode_without_workers_is_served_by_the_others() -> None:
    only = Fleet(mode=ServedMode.COLOCATED, workers=WORKERS[2:])
    assert pods(ServedMode.SPLIT, only) == {"c0", "c1"}
