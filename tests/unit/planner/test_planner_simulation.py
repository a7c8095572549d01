"""The simulator: against a naive one that takes every step, against the closed form, and by its laws."""

import math
from collections import deque
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_planner import CPU, GPU, PATIENT
from helpers_traces import random_trace
from phasesplit.api.reports import StepProfile
from phasesplit.planner.colocated_serving import predict_colocated
from phasesplit.planner.demand import Demand, Hardware
from phasesplit.planner.performance import step_s
from phasesplit.planner.simulation import simulate
from phasesplit.planner.simulation_steps import Law
from phasesplit.planner.simulation_types import (
    Arrival,
    ColocatedPlan,
    Failure,
    Outcome,
    Plan,
    SimulatedClass,
    Simulation,
    SimulationResult,
    SplitPlan,
)
from phasesplit.planner.split_serving import predict_split

HARDWARE = Hardware(
    GPU, GPU, kv_bytes_per_token=131_072, kv_tokens_per_worker=300_000, link_bytes_per_s=12.5e9
)
CLASSES = (SimulatedClass("default", 8.0, 0.04),)


def run(trace: list[Arrival], plan: Plan, **more: object) -> SimulationResult:
    return simulate(replace(Simulation(tuple(trace), plan, HARDWARE, CLASSES), **more))


class NaiveWorker:
    """One colocated worker that takes every step singly, as plainly as possible."""

    def __init__(self, trace: list[Arrival], profile: StepProfile, chunk: int) -> None:
        self.trace, self.profile, self.chunk = trace, profile, chunk
        self.queue: deque[list[int]] = deque()  # [request, tokens done]
        self.batch: dict[int, list[int]] = {}  # request -> [context, remaining]
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def run(self) -> list[tuple[float, float]]:
        """(first token, last token) of each request."""
        now, upcoming = 0.0, deque(enumerate(self.trace))
        while upcoming or self.queue or self.batch:
            while upcoming and upcoming[0][1].at_s <= now:
                self.queue.append([upcoming.popleft()[0], 0])
            now = self.step(now) if self.queue or self.batch else upcoming[0][1].at_s
        return [(self.first[index], self.last[index]) for index in range(len(self.trace))]

    def step(self, now: float) -> float:
        tokens, pairs, done = self.take_chunk()
        now += step_s(
            self.profile,
            prefill_tokens=tokens,
            prefill_pairs=pairs,
            decode_sequences=len(self.batch),
            decode_context_tokens=sum(context for context, _ in self.batch.values()),
        )
        for request, state in list(self.batch.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                self.last[request] = now
                del self.batch[request]
        for item in done:
            self.queue.remove(item)
            arrival = self.trace[item[0]]
            self.first[item[0]] = now
            if arrival.output_tokens == 1:
                self.last[item[0]] = now
            else:
                self.batch[item[0]] = [arrival.prompt_tokens + 1, arrival.output_tokens - 1]
        return now

    def take_chunk(self) -> tuple[int, float, list[list[int]]]:
        tokens, pairs, done = 0, 0.0, []
        for item in self.queue:
            arrival = self.trace[item[0]]
            left = arrival.prompt_tokens - arrival.cached_tokens - item[1]
            part = min(self.chunk - tokens, left)
            pairs += part * (arrival.cached_tokens + item[1] + part / 2)
            item[1] += part
            tokens += part
            if part == left:
                done.append(item)
            if tokens == self.chunk:
                break
        return tokens, pairs, done


@pytest.mark.parametrize("chunk", [16, 100, 4096])
@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
def test_runs_of_steps_equal_single_steps(profile: StepProfile, chunk: int) -> None:
    rate = 0.12 if profile is CPU else 2.0
    trace = random_trace(3, rate, 60, 300, 25)
    hardware = replace(HARDWARE, prefill_profile=profile, decode_profile=profile)
    found = simulate(Simulation(tuple(trace), ColocatedPlan(1, chunk), hardware, CLASSES))
    expected = NaiveWorker(trace, profile, chunk).run()
    for index, (first, last) in enumerate(expected):
        assert found.ttft_s[index] == pytest.approx(first - trace[index].at_s, rel=1e-6)
        steps = trace[index].output_tokens - 1
        assert found.tpot_s[index] == pytest.approx((last - first) / steps if steps else 0.0, rel=1e-6)


@PATIENT
@given(st.integers(1, 500), st.integers(1, 64), st.floats(0, 1e5), st.integers(0, 2000), st.floats(0, 1e4))
def test_run_is_the_sum_of_its_steps(
    steps: int, batch: int, contexts: float, chunk: int, before: float
) -> None:
    law = Law(GPU)
    single = sum(
        law.step_s(chunk, chunk * (before + i * chunk + chunk / 2), batch, contexts + i * batch)
        for i in range(steps)
    )
    assert law.run_s(steps, chunk, before, batch, contexts) == pytest.approx(single, rel=1e-9)


@PATIENT
@given(st.floats(1e-6, 100), st.integers(1, 64), st.floats(1, 1e6))
def test_steps_until_is_the_first_boundary_not_before(seconds: float, batch: int, contexts: float) -> None:
    law = Law(GPU)
    steps = law.steps_until(seconds, batch, contexts)
    assert law.run_s(steps, 0, 0, batch, contexts) >= seconds * (1 - 1e-6)
    if steps >= 1:
        assert law.run_s(steps - 1, 0, 0, batch, contexts) <= seconds * (1 + 1e-6)


@PATIENT
@given(st.floats(1e-3, 2), st.floats(0, 1e4), st.integers(0, 64), st.floats(0, 1), st.integers(0, 1))
def test_chunk_within_fills_the_budget(
    budget_s: float, before: float, batch: int, overlap: float, attention: int
) -> None:
    profile = GPU.model_copy(
        update={"overlap": overlap, "per_prefill_context_s": attention * GPU.per_prefill_context_s}
    )
    law, contexts = Law(profile), 1000.0 * batch
    chunk = law.chunk_within(budget_s, before, batch, contexts)
    if chunk > 8:
        took = law.step_s(chunk, chunk * (before + chunk / 2), batch, contexts)
        assert took <= budget_s * (1 + 1e-9)
        more = law.step_s(chunk + 1, (chunk + 1) * (before + (chunk + 1) / 2), batch, contexts)
        assert more > budget_s * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.5, 1.3, 2.0])
def test_split_agrees_with_the_closed_form(rate: float) -> None:
    trace = random_trace(1, rate, 3000, 4000, 200)
    demand = Demand("default", rate, 4000, 200, 8.0, 0.04, 0.95)
    expected = predict_split([demand], HARDWARE, 2, 2).classes[0]
    found = run(trace, SplitPlan(2, 2))
    assert mean(found.ttft_s) == pytest.approx(expected.ttft_s, rel=0.25)
    steps = sum(arrival.output_tokens - 1 for arrival in trace)
    per_token = sum(
        tpot * (arrival.output_tokens - 1) for tpot, arrival in zip(found.tpot_s, trace, strict=True)
    )
    assert per_token / steps == pytest.approx(expected.tpot_s, rel=0.08)


@pytest.mark.parametrize("chunk", [108, 512])
@pytest.mark.parametrize("rate", [0.5, 1.3, 2.0])
def test_colocated_agrees_with_the_closed_form(rate: float, chunk: int) -> None:
    trace = random_trace(1, rate, 3000, 4000, 200)
    demand = Demand("default", rate, 4000, 200, 8.0, 0.04, 0.95)
    expected = predict_colocated([demand], HARDWARE, 4, chunk).classes[0]
    found = run(trace, ColocatedPlan(4, chunk))
    assert mean(found.ttft_s) == pytest.approx(expected.ttft_s, rel=0.15)
    assert mean(found.tpot_s) == pytest.approx(expected.tpot_s, rel=0.12)


def test_same_input_same_result() -> None:
    trace = random_trace(5, 2.0, 500, 2000, 100)
    for plan in (SplitPlan(2, 2), ColocatedPlan(3, step_budget_s=0.05)):
        one, other = run(trace, plan), run(trace, plan)
        assert (one.ttft_s, one.tpot_s, one.outcomes) == (other.ttft_s, other.tpot_s, other.outcomes)


plans = st.one_of(
    st.builds(SplitPlan, st.integers(1, 4), st.integers(1, 4)),
    st.builds(ColocatedPlan, st.integers(1, 4), st.sampled_from([8, 64, 1000])),
    st.builds(ColocatedPlan, st.integers(1, 4), st.none(), st.sampled_from([0.03, 0.1])),
)


@settings(PATIENT, max_examples=40)
@given(st.integers(0, 1000), plans, st.sampled_from([4000, 20_000, 300_000]), st.sampled_from([2, 64]))
def test_every_request_ends_and_none_is_served_before_it_could_be(
    seed: int, plan: Plan, kv_tokens: int, most: int
) -> None:
    trace = random_trace(seed, 3.0, 120, 800, 40, num_classes=2, cached_share=0.3)
    classes = (CLASSES[0], replace(CLASSES[0], name="first", priority=10))
    hardware = replace(HARDWARE, kv_tokens_per_worker=kv_tokens)
    found = simulate(Simulation(tuple(trace), plan, hardware, classes, max_num_seqs=most))
    assert set(found.outcomes) == {Outcome.FINISHED}
    for index, arrival in enumerate(trace):
        assert found.ttft_s[index] >= GPU.base_s
        assert found.tpot_s[index] >= (GPU.base_s if arrival.output_tokens > 1 else 0.0)


def test_priority_goes_first() -> None:
    trace = random_trace(2, 6.0, 800, 3000, 5, num_classes=2)
    classes = (CLASSES[0], replace(CLASSES[0], name="first", priority=10))
    found = run(trace, SplitPlan(2, 1), classes=classes)
    waits = [[t for t, a in zip(found.ttft_s, trace, strict=True) if a.class_index == k] for k in (0, 1)]
    assert mean(waits[1]) < 0.5 * mean(waits[0])


def test_slow_link_shows_in_the_second_token_gap_alone() -> None:
    trace = random_trace(4, 0.5, 200, 2000, 50)
    fast = run(trace, SplitPlan(1, 1))
    slow = run(trace, SplitPlan(1, 1), hardware=replace(HARDWARE, link_bytes_per_s=2e8))
    assert slow.ttft_s == fast.ttft_s
    assert slow.quantile("second_token_gap_s", 0.5) > 10 * fast.quantile("second_token_gap_s", 0.5)


def test_prefix_hits_save_prefill() -> None:
    cold, warm = (random_trace(4, 1.0, 200, 2000, 50, cached_share=share) for share in (0.0, 0.9))
    plan = ColocatedPlan(2, 512)
    assert mean(run(warm, plan).ttft_s) < 0.3 * mean(run(cold, plan).ttft_s)


def test_admission_refuses_what_queueing_would_make_late() -> None:
    trace = random_trace(6, 10.0, 600, 4000, 20)
    open_door, guarded = run(trace, SplitPlan(1, 1)), run(trace, SplitPlan(1, 1), admission=True)
    assert guarded.outcomes.count(Outcome.REJECTED) > 100
    assert guarded.attainment() > 5 * open_door.attainment()


@pytest.mark.parametrize("plan", [SplitPlan(2, 2), ColocatedPlan(3, 256)])
def test_failure_of_a_worker_loses_no_request(plan: Plan) -> None:
    trace = random_trace(7, 2.0, 300, 1000, 100)
    worker = plan.workers - 1
    found = run(trace, plan, failures=(Failure(30.0, worker, 20.0), Failure(60.0, 0, 20.0)))
    assert set(found.outcomes) == {Outcome.FINISHED}
    assert found.num_replays > 0
    assert not any(math.isnan(value) for value in found.ttft_s)
