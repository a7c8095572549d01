"""The simulator's outcomes for a seed stay what they are, however fast it becomes.

`python tests/unit/planner/test_planner_simulation_golden.py` rewrites the golden file: only when the
simulated system itself has changed, and with the reason in the commit message.
"""

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

from helpers_planner import CPU, GPU  # noqa: E402
from helpers_traces import random_trace  # noqa: E402
from phasesplit.planner.demand import Hardware  # noqa: E402
from phasesplit.planner.simulation import simulate  # noqa: E402
from phasesplit.planner.simulation_types import (  # noqa: E402
    ColocatedPlan,
    Failure,
    Outcome,
    SimulatedClass,
    Simulation,
    SplitPlan,
)

GOLDEN = Path(__file__).parent / "golden" / "simulation_outcomes.json"
FAST_LINK = Hardware(GPU, GPU, 131_072, 300_000, 12.5e9)
TIGHT_KV = Hardware(GPU, GPU.model_copy(update={"overlap": 0.6}), 131_072, 30_000, 2e9)
SLOW = Hardware(CPU, CPU, 46_080, math.inf, 1e8)
ONE = (SimulatedClass("default", 8.0, 0.04),)
TWO = (SimulatedClass("chat", 4.0, 0.04, priority=10), SimulatedClass("batch", 60.0, 0.2))
FAILURES = (Failure(200.0, 0, 60.0), Failure(300.0, 3, 20.0))


def _trace(seed: int, rate: float, prompt: float = 4000, output: float = 200, **more: object) -> tuple:
    return tuple(random_trace(seed, rate, 800, prompt, output, **more))


CASES = {
    "split, light": Simulation(_trace(1, 0.5), SplitPlan(2, 2), FAST_LINK, ONE),
    "split, crowded": Simulation(_trace(2, 2.0), SplitPlan(2, 2), FAST_LINK, ONE),
    "split, admission, little KV": Simulation(
        _trace(3, 1.5, 2000), SplitPlan(3, 2), TIGHT_KV, ONE, admission=True
    ),
    "split, failures, classes, cache": Simulation(
        _trace(4, 1.2, num_classes=2, cached_share=0.4), SplitPlan(2, 3), FAST_LINK, TWO, failures=FAILURES
    ),
    "colocated, fixed chunk": Simulation(_trace(5, 1.3), ColocatedPlan(4, 108), FAST_LINK, ONE),
    "colocated, step budget, overlap": Simulation(
        _trace(6, 1.3, 2000), ColocatedPlan(4, step_budget_s=0.04), TIGHT_KV, ONE, admission=True
    ),
    "colocated, failures, classes": Simulation(
        _trace(7, 1.2, num_classes=2), ColocatedPlan(4, 512), FAST_LINK, TWO, failures=FAILURES
    ),
    "one CPU core, colocated": Simulation(_trace(8, 0.05, 200, 40), ColocatedPlan(1, 32), SLOW, TWO),
    "two CPU cores, split": Simulation(_trace(9, 0.05, 200, 40), SplitPlan(1, 1), SLOW, TWO),
}


def _summary(name: str) -> dict[str, float]:
    found = simulate(CASES[name])
    numbers = {
        what: sum(value * (index % 7 + 1) for index, value in enumerate(values) if not math.isnan(value))
        for what, values in (
            ("ttft", found.ttft_s),
            ("tpot", found.tpot_s),
            ("second gap", found.second_token_gap_s),
        )
    }
    numbers |= {f"{kind.name} requests": float(found.outcomes.count(kind)) for kind in Outcome}
    return numbers | {
        "in target": float(sum(found.attained(index) for index in range(len(found.outcomes)))),
        "replays": float(found.num_replays),
        "end": found.end_s,
    }


@pytest.mark.parametrize("name", CASES)
def test_outcomes_of_a_seed_stay(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert _summary(name) == pytest.approx(golden[name], rel=1e-9, abs=1e-9)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: _summary(name) for name in CASES}, indent=1) + "\n")
