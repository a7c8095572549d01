"""The pure parts of the truth and regime benchmarks: traces, quantiles, verdicts."""

import math

import pytest

from helpers_regimes import Regime, Served, advantage, is_right
from helpers_truth import Shape, compare_latencies, poisson_trace, simulated_trace
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import ServedMode
from phasesplit.planner.demand import Hardware
from phasesplit.planner.simulation import simulate
from phasesplit.planner.simulation_types import SimulatedClass, Simulation, SplitPlan
from phasesplit_bench.client import Result

PROFILE = StepProfile(
    base_s=0.05, per_prefill_token_s=7e-4, per_decode_sequence_s=4e-3, num_samples=1000, residual=0.01
)
SHAPE = Shape(2.0, 100, ((100, 200), (600, 800)), ((8, 16),))
REGIME = Regime("some", SHAPE, 8.0, 0.5, ServedMode.COLOCATED, 100e6)


def results_of(ttft_s: float = 1.0, tpot_s: float = 0.1) -> list[Result]:
    """Every request of the shape, served alike."""
    return [
        Result(
            index=item.index,
            slo_class="",
            start_s=item.at_s,
            status=200,
            prompt_tokens=300,
            output_tokens=item.max_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
        for item in poisson_trace(SHAPE, 3, 2.0)
    ]


def test_a_trace_is_the_same_for_a_seed_and_keeps_its_rate_and_lengths() -> None:
    trace = poisson_trace(SHAPE, 3, 2.0)
    assert trace == poisson_trace(SHAPE, 3, 2.0) != poisson_trace(SHAPE, 4, 2.0)
    assert len(trace) == 100
    assert 1.4 < 100 / trace[-1].at_s < 2.8
    words = [len(item.prompt.split()) for item in trace]
    assert 40 < min(words) <= 100 < 290 < max(words) <= 400
    assert all(8 <= item.max_tokens <= 16 for item in trace)


def test_quantiles_are_compared_with_those_of_the_simulated_trace() -> None:
    hardware = Hardware(PROFILE, PROFILE, 1000.0, link_bytes_per_s=1e9)
    arrivals = simulated_trace(results_of())
    found = simulate(Simulation(arrivals, SplitPlan(2, 2), hardware, (SimulatedClass("a", 9, 9),)))
    rows = compare_latencies(results_of(), found)
    assert [row.name for row in rows] == ["TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"]
    assert rows[0].measured_s == 1.0
    assert rows[0].deviation == pytest.approx(abs(rows[0].simulated_s - 1.0))
    assert all(0 < row.simulated_s < 2 for row in rows)


def test_failed_requests_are_not_simulated() -> None:
    results = results_of()
    results[0].error = "broken"
    assert len(simulated_trace(results)) == 99


@pytest.mark.parametrize(
    ("colocated", "split", "right"),
    [(0.9, 0.92, True), (0.9, 0.5, True), (0.5, 0.9, False), (0.0, 0.0, True), (0.0, 0.2, False)],
)
def test_colocated_is_right_unless_the_split_kept_clearly_more(
    colocated: float, split: float, right: bool
) -> None:
    assert is_right(False, split, colocated) is right
    assert not math.isnan(advantage(split, colocated))


def test_misses_of_either_target_do_not_count_as_attained() -> None:
    assert Served.of(results_of(), REGIME).attained == 1.0
    assert Served.of(results_of(ttft_s=9.0), REGIME).attained == 0.0
    assert Served.of(results_of(tpot_s=0.6), REGIME).attained == 0.0
