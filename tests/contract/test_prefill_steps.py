"""The planner predicts a prefill worker's steps by the rule that the worker's scheduler follows."""

from phasesplit.api.reports import StepProfile
from phasesplit.planner import performance
from phasesplit_worker.scheduling import scheduler


def test_both_sides_have_the_same_rule() -> None:
    assert performance.PREFILL_STEP_S == scheduler.PREFILL_STEP_S
    assert performance.PREFILL_BASE_STEPS == scheduler.PREFILL_BASE_STEPS


def test_where_steps_have_a_long_fixed_part_chunks_do_not_shrink_to_nothing() -> None:
    slow = StepProfile(base_s=0.155, per_prefill_token_s=0.0088)
    assert performance.prefill_chunk_tokens(slow, 1000) >= 64
