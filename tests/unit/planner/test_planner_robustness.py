"""Whatever is measured, the decisions come to a sentence: no exception, no number out of bounds."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_planner import PATIENT, auto_object, scaling_input, split_object
from phasesplit.api.names import Pool
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode
from phasesplit.planner.facts import LinkFacts, LoadFacts
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ModeInput, PoolPresence, TransferWindow
from phasesplit.planner.scaling import plan_scaling
from phasesplit.planner.scaling_types import ScalingInput

wild = st.sampled_from([0.0, 1e-9, 1.0, 512.0, 1e7, math.inf, math.nan, -1.0]) | st.floats(0, 1e4)
optional = st.none() | wild
loads = st.builds(
    LoadFacts,
    class_name=st.sampled_from(["default", "unknown"]),
    arrival_rate_per_s=wild,
    mean_prompt_tokens=wild,
    p95_prompt_tokens=optional,
    mean_output_tokens=wild,
    mean_cached_tokens=wild,
    ttft_p50_s=optional,
    tpot_p50_s=optional,
    queue_s=optional,
    attainment=optional,
    finished=st.integers(0, 1000),
)
coefficient = st.sampled_from([0.0, 1e-9, 1e-4, 0.05, 10.0])
profiles = st.builds(
    StepProfile,
    base_s=coefficient,
    per_prefill_token_s=coefficient,
    per_prefill_context_s=coefficient,
    per_decode_sequence_s=coefficient,
    per_decode_context_s=coefficient,
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    num_samples=st.just(500),
)
by_pool = st.dictionaries(st.sampled_from(Pool), profiles)
classes = st.lists(
    st.builds(
        LatencyClass,
        name=st.just("default"),
        ttft_s=st.sampled_from([1e-3, 1.0, 100.0]),
        tpot_s=st.sampled_from([1e-3, 0.1, 10.0]),
        percentile=st.sampled_from([1.0, 95.0, 99.0]),
    ),
    min_size=1,
    max_size=2,
).map(tuple)
links = st.lists(
    st.builds(
        LinkFacts,
        st.sampled_from(["p0", "d0", "x"]),
        st.sampled_from(["p0", "d0", "x"]),
        st.sampled_from([0.0, 1e3, 1e9, math.inf, math.nan]),
        st.floats(0, 500),
    ),
    max_size=3,
).map(tuple)


@st.composite
def mode_inputs(draw: st.DrawFn) -> ModeInput:
    base = draw(st.sampled_from([auto_object(), split_object()]))
    return replace(
        base,
        wanted=draw(st.sampled_from(Mode)),
        fallback=draw(st.sampled_from(Fallback)),
        served=draw(st.sampled_from(ServedMode)),
        loads=draw(st.lists(loads, max_size=2).map(tuple)),
        classes=draw(classes),
        profiles=draw(by_pool),
        links=draw(links),
        kv_bytes_per_token=draw(st.sampled_from([None, 0, 46_080])),
        transfers=TransferWindow(draw(st.integers(0, 50)), draw(st.integers(0, 50))),
        pools={
            pool: PoolPresence(pool, desired=draw(st.integers(0, 3)), ready=draw(st.integers(0, 3)))
            for pool in draw(st.sets(st.sampled_from(Pool)))
        },
    )


@settings(PATIENT, max_examples=50)
@given(mode_inputs())
def test_mode_is_always_decided(given_input: ModeInput) -> None:
    decision = decide_mode(given_input)
    assert decision.message
    assert decision.beneficial_message
    assert all(math.isfinite(value) for value in decision.evidence.values())
    if given_input.wanted is Mode.COLOCATED:
        assert decision.mode is ServedMode.COLOCATED
    if given_input.wanted is Mode.SPLIT and given_input.fallback is Fallback.NEVER:
        assert decision.mode is ServedMode.SPLIT


@st.composite
def scaling_inputs(draw: st.DrawFn) -> ScalingInput:
    return replace(
        scaling_input(1.0, draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        mode=draw(st.sampled_from(ServedMode)),
        loads=draw(st.lists(loads, max_size=2).map(tuple)),
        classes=draw(classes),
        profiles=draw(by_pool),
        kv_tokens_per_worker=draw(st.sampled_from([None, 0, 100, 100_000])),
        link_bytes_per_s=draw(st.sampled_from([None, 0.0, 1e9])),
        keep_both_pools=draw(st.booleans()),
        placeable_total=draw(st.sampled_from([None, 0, 1, 5])),
    )


@settings(PATIENT, max_examples=50)
@given(scaling_inputs())
def test_scaling_is_always_planned(given_input: ScalingInput) -> None:
    decision = plan_scaling(given_input)
    assert decision.message
    for pool in Pool:
        assert 0 <= decision.advice[pool] <= given_input.pools[pool].max
    assert 0.5 <= decision.memory.ttft_correction <= 2.0
    assert 0.5 <= decision.memory.tpot_correction <= 2.0
