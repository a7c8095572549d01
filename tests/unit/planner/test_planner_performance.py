"""The closed forms: monotone where they must be, right where they can be computed by hand."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_planner import CPU, GPU, PATIENT
from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit.planner import performance, queueing
from phasesplit.planner.capacity import (
    capacity_per_worker,
    needed_colocated,
    needed_split,
    sustainable_factor,
)
from phasesplit.planner.demand import Demand, Hardware

MBIT = 1e6 / 8


def test_step_adds_or_hides_by_overlap() -> None:
    def took(overlap: float) -> float:
        profile = StepProfile(base_s=1.0, per_prefill_token_s=0.1, per_decode_sequence_s=0.5, overlap=overlap)
        return performance.step_s(profile, prefill_tokens=30, decode_sequences=4)

    assert [took(0.0), took(0.5), took(1.0)] == pytest.approx([6.0, 5.0, 4.0])


@PATIENT
@given(st.integers(1, 5000), st.integers(1, 700), st.integers(0, 3000))
def test_prefill_in_chunks_is_the_sum_of_its_steps(prompt: int, chunk: int, cached: int) -> None:
    cached = min(cached, prompt - 1)
    tokens = prompt - cached
    steps = math.ceil(tokens / chunk)
    size = tokens / steps
    single = sum(
        performance.mixed_step_s(GPU, size, chunk_context_tokens=cached + i * size) for i in range(steps)
    )
    whole = performance.prefill_s(GPU, prompt, chunk, cached_tokens=cached)
    assert whole == pytest.approx(single, rel=1e-9)


def test_smollm_on_a_core_needs_what_was_measured() -> None:
    """About 210 prompt tokens/s and 46,080 bytes of KV per token: 77 Mbit/s, 129 at 60 % use."""
    tokens_per_s = performance.prefill_tokens_per_s(CPU, 512)
    assert tokens_per_s == pytest.approx(205, rel=0.1)
    assert 70 * MBIT < tokens_per_s * 46_080 < 85 * MBIT


@PATIENT
@given(st.floats(0.005, 5), st.integers(0, 64), st.integers(0, 4000))
def test_chunk_is_the_largest_that_keeps_the_target(tpot_s: float, batch: int, context: int) -> None:
    chunk = performance.colocated_chunk_tokens(GPU, tpot_s, batch=batch, context_tokens=context)

    def took(tokens: int) -> float:
        return performance.mixed_step_s(
            GPU, tokens, chunk_context_tokens=context / 2, batch=batch, context_tokens=context
        )

    assert chunk >= performance.MIN_CHUNK_TOKENS
    if chunk > performance.MIN_CHUNK_TOKENS:
        assert took(chunk) <= tpot_s
    if chunk < performance.MAX_CHUNK_TOKENS:
        assert took(chunk + 1) > tpot_s


def test_transfer_hides_behind_prefill_on_a_fast_link_only() -> None:
    size, prefill = 1e8, 1.0
    fast = performance.exposed_transfer_s(size, 1e9, prefill_seconds=prefill, chunks=10, latency_s=0.0)
    slow = performance.exposed_transfer_s(size, 5e7, prefill_seconds=prefill, chunks=10, latency_s=0.0)
    whole = performance.exposed_transfer_s(size, 5e7, prefill_seconds=prefill, chunks=1, latency_s=0.0)
    assert fast == pytest.approx(0.01)
    assert slow == pytest.approx(2.0 - 0.9)
    assert whole == pytest.approx(2.0)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA-L4", "NVIDIA H200", "Tesla-T4", "something new"])
def test_guess_is_marked_and_sensible_for_any_device(device: str) -> None:
    small = performance.guess_profile(135_000_000, device)
    large = performance.guess_profile(8_000_000_000, device)
    assert small.guessed
    assert 0 < small.base_s < large.base_s
    assert performance.prefill_tokens_per_s(small, 512) > performance.prefill_tokens_per_s(large, 512)


def test_guess_for_a_core_is_within_a_factor_of_what_was_measured() -> None:
    guess = performance.guess_profile(134_515_008, "cpu", kv_bytes_per_token=46_080)
    assert 100 < performance.prefill_tokens_per_s(guess, 512) < 420
    assert 0.036 < performance.decode_step_s(guess, 1, 500) < 0.144


def test_wait_of_one_server_is_pollaczek_khinchine() -> None:
    stream = queueing.Stream(0.5, 1.0, 2.0)  # exponential service, load 0.5: mean wait 1 s
    assert queueing.waits([stream], 1)[0].mean_s == pytest.approx(1.0)
    fixed = queueing.Stream(0.5, 1.0, 1.0)
    assert queueing.waits([fixed], 1)[0].mean_s == pytest.approx(0.5)


def test_overload_waits_without_end_but_spares_the_higher_class() -> None:
    high = queueing.Stream(0.5, 1.0, 1.0, priority=1)
    low = queueing.Stream(0.8, 1.0, 1.0, priority=0)
    first, second = queueing.waits([high, low], 1)
    assert math.isfinite(first.mean_s)
    assert math.isinf(second.mean_s)
    assert second.share_within(100) == 0.0


@PATIENT
@given(st.floats(0.1, 0.95), st.integers(1, 32))
def test_wait_falls_with_servers_and_grows_with_load(load: float, servers: int) -> None:
    def wait(rho: float, count: int) -> float:
        return queueing.waits([queueing.Stream(rho * count, 1.0, 1.5)], count)[0].mean_s

    assert wait(load, servers + 1) <= wait(load, servers) + 1e-12
    assert wait(load, servers) <= wait(min(0.99, load * 1.05), servers) + 1e-12


def test_shares_agree_with_counting() -> None:
    rng = random.Random(1)
    sums = []
    for _ in range(20_000):
        time, total = rng.expovariate(3.0), 0.0
        while time < 1.0:
            total += rng.expovariate(2.0)
            time += rng.expovariate(3.0)
        sums.append(total)
    for limit in (0.0, 0.5, 1.5, 3.0):
        counted = sum(value <= limit for value in sums) / len(sums)
        assert queueing.compound_share(3.0, 0.5, 0.5, limit) == pytest.approx(counted, abs=0.03)
    assert queueing.poisson_share(3.0, 2) == pytest.approx(0.4232, abs=1e-3)
    assert queueing.gamma_share(1.0, 2.0) == pytest.approx(1 - math.exp(-2.0), rel=1e-6)
    assert queueing.gamma_share(400.0, 400.0) == pytest.approx(0.5066, abs=1e-3)


def test_variation_from_a_95th_percentile() -> None:
    sigma = 0.6
    p95 = math.exp(1.6448536 * sigma - sigma * sigma / 2)
    expected = math.exp(sigma * sigma) - 1
    assert queueing.squared_variation(1.0, p95, 0.5) == pytest.approx(expected, rel=1e-6)
    assert queueing.squared_variation(1.0, None, 0.5) == 0.5


@PATIENT
@given(st.floats(0.01, 100))
def test_sustainable_factor_finds_the_edge(edge: float) -> None:
    found = sustainable_factor(lambda factor: factor <= edge)
    assert edge / 1.004 <= found <= edge


def test_needs_are_least_and_sufficient() -> None:
    hardware = Hardware(GPU, GPU, 131_072, 300_000, 12.5e9)
    needs = []
    for rate in (0.5, 2.0, 8.0, 32.0):
        demand = [Demand("default", rate, 2000, 200, 4.0, 0.05, 0.95)]
        need, (colocated, feasible) = needed_split(demand, hardware), needed_colocated(demand, hardware)
        assert need.feasible
        assert feasible
        needs.append((need.prefill, need.decode, colocated))
    assert all(one <= other for a, b in itertools.pairwise(needs) for one, other in zip(a, b, strict=True))
    assert needs[0] == (1, 1, 1)


def test_capacity_of_a_worker_by_role() -> None:
    hardware = Hardware(GPU, GPU, 131_072, 300_000, 25e9)
    demand = [Demand("default", 1.0, 2000, 200, 4.0, 0.05, 0.95)]
    prefill, decode, both = (capacity_per_worker(demand, hardware, role) for role in Role)
    alone_s = performance.prefill_s(GPU, 2000, 1500)
    assert 0.4 / alone_s < prefill < 1 / alone_s
    assert decode > prefill
    assert 0 < both < prefill
