"""What each step computes: budget, order, progress, preemption. Exact plans as tables."""

from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.scheduling.cost import StepLoad, largest_chunk, step_s
from phasesplit_worker.scheduling.scheduler import (
    MIN_CHUNK_TOKENS,
    PREFILL_STEP_S,
    Scheduler,
    StepLimits,
    StepPlan,
)
from phasesplit_worker.sequence import RequestKind, SamplingParams, Sequence, SequenceStatus

# 10 ms per step, 1 ms per prompt token, 5 ms per decoding sequence.
PROFILE = StepProfile(base_s=0.010, per_prefill_token_s=0.001, per_decode_sequence_s=0.005)


def scheduler(
    *, max_step_s: float | None = None, max_tokens: int = 8192, num_blocks: int = 100, max_num_seqs: int = 8
) -> Scheduler:
    blocks = BlockManager(num_blocks, 16, b"salt")
    return Scheduler(blocks, StepLimits(max_num_seqs, max_step_s, max_tokens), PROFILE)


def arrive(
    subject: Scheduler, name: str, length: int, *, priority: int = 0, kind: RequestKind = RequestKind.LOCAL
) -> Sequence:
    start = 1000 * (sum(map(ord, name)) + 1)  # no shared prefixes
    sequence = Sequence(
        request_id=name,
        prompt_token_ids=tuple(range(start, start + length)),
        sampling=SamplingParams(),
        seed=0,
        priority=priority,
        kind=kind,
        awaits_remote=kind is RequestKind.DECODE,
        arrival_s=float(len(subject.waiting) + len(subject.running) + len(subject.remote)),
    )
    subject.add(sequence)
    return sequence


def compute(subject: Scheduler, plan: StepPlan) -> None:
    """What the engine does after a step."""
    for sequence, count in plan.scheduled:
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens += count
        subject.blocks.commit(sequence, before)
        if sequence.num_pending_tokens == 0:
            sequence.output_token_ids.append(7)


def step(subject: Scheduler) -> dict[str, int]:
    plan = subject.schedule()
    compute(subject, plan)
    subject.blocks.check_integrity([*subject.waiting, *subject.running, *subject.remote])
    return {sequence.request_id: count for sequence, count in plan.scheduled}


def test_the_whole_prompt_goes_into_one_step_when_it_fits() -> None:
    subject = scheduler()
    arrive(subject, "a", 100)
    assert step(subject) == {"a": 100}
    assert step(subject) == {"a": 1}


def test_decodes_go_first_and_prompts_fill_what_is_left_of_the_step() -> None:
    subject = scheduler(max_step_s=0.080)
    arrive(subject, "a", 20)
    arrive(subject, "b", 20)
    assert step(subject) == {"a": 20, "b": 20}
    arrive(subject, "c", 200)
    # 80 ms - 10 ms base - 2 x 5 ms of decodes leave 60 tokens; 48 end on a block boundary.
    assert step(subject) == {"a": 1, "b": 1, "c": 48}
    assert step(subject) == {"a": 1, "b": 1, "c": 48}


def test_the_token_cap_is_shared_by_the_prompts_of_a_step() -> None:
    subject = scheduler(max_tokens=64)
    arrive(subject, "a", 40)
    arrive(subject, "b", 40)
    assert step(subject) == {"a": 40, "b": 16}
    assert step(subject) == {"a": 1, "b": 24}


def test_a_prompt_progresses_even_when_decodes_take_the_whole_budget() -> None:
    subject = scheduler(max_step_s=0.012)
    arrive(subject, "a", 8)
    assert step(subject) == {"a": 8}
    arrive(subject, "b", 100)
    for _ in range(12):
        assert step(subject) == {"a": 1, "b": MIN_CHUNK_TOKENS}
    assert step(subject) == {"a": 1, "b": 4}


def test_higher_priority_goes_before_a_prompt_that_has_begun() -> None:
    subject = scheduler(max_tokens=32)
    arrive(subject, "batch", 100)
    assert step(subject) == {"batch": 32}
    arrive(subject, "chat", 30, priority=5)
    assert step(subject) == {"chat": 30}
    assert step(subject) == {"chat": 1, "batch": 32}


def test_within_a_class_who_began_goes_on_and_then_arrival_decides() -> None:
    subject = scheduler(max_tokens=48)
    for name in ("a", "b", "c"):
        arrive(subject, name, 64)
    assert step(subject) == {"a": 48}
    assert step(subject) == {"a": 16, "b": 32}
    assert step(subject) == {"a": 1, "b": 32, "c": 16}


def test_the_latest_of_the_lowest_class_is_preempted_and_recomputed() -> None:
    subject = scheduler(num_blocks=6)
    first, second = arrive(subject, "a", 30), arrive(subject, "b", 30)
    assert step(subject) == {"a": 30, "b": 30}
    preempted = False
    for _ in range(40):
        plan = subject.schedule()
        compute(subject, plan)
        preempted |= plan.preempted == (second,)
        subject.blocks.check_integrity([first, second])
        if preempted:
            break
    assert preempted
    assert second.status is SequenceStatus.WAITING
    assert second.num_computed_tokens == 0 and second.num_preemptions == 1
    assert second.output_token_ids  # what was generated is kept
    subject.remove(first, SequenceStatus.FINISHED)
    # Its own prefix is still cached: only the rest is computed again.
    assert step(subject)["b"] < second.num_tokens - 1


def test_a_more_important_prompt_takes_blocks_from_a_less_important_sequence() -> None:
    subject = scheduler(num_blocks=4)
    low = arrive(subject, "low", 40)
    step(subject)
    arrive(subject, "high", 40, priority=1)
    assert step(subject) == {"high": 40}
    assert low.status is SequenceStatus.WAITING


def test_equals_wait_for_blocks_and_nobody_overtakes() -> None:
    subject = scheduler(num_blocks=6)
    arrive(subject, "a", 40)
    step(subject)
    arrive(subject, "big", 60)
    arrive(subject, "small", 8)
    assert step(subject) == {"a": 1}


def test_a_reservation_needs_blocks_but_no_time() -> None:
    subject = scheduler(max_tokens=16)
    arrive(subject, "a", 100)
    remote = arrive(subject, "r", 40, kind=RequestKind.DECODE)
    plan = subject.schedule()
    compute(subject, plan)
    assert plan.reserved == (remote,)
    assert len(remote.block_table) == 3
    assert [sequence.request_id for sequence, _ in plan.scheduled] == ["a"]
    remote.num_computed_tokens = 40
    remote.output_token_ids.append(1)
    subject.start_remote(remote)
    assert step(subject) == {"r": 1, "a": 16}


def test_recomputing_a_reservation_queues_it_in_its_old_place() -> None:
    subject = scheduler()
    remote = arrive(subject, "r", 40, kind=RequestKind.DECODE)
    subject.schedule()
    subject.recompute(remote)
    arrive(subject, "later", 8)
    assert list(step(subject)) == ["r", "later"]


def test_no_more_than_max_num_seqs_run() -> None:
    subject = scheduler(max_num_seqs=2)
    for name in ("a", "b", "c"):
        arrive(subject, name, 8)
    assert step(subject) == {"a": 8, "b": 8}
    assert len(subject.waiting) == 1


def test_roles_are_limits_of_the_same_scheduler() -> None:
    prefill = StepLimits.for_role(Role.PREFILL, 8, 512, 0.05)
    assert prefill.max_step_s == PREFILL_STEP_S
    colocated = StepLimits.for_role(Role.COLOCATED, 8, None, 0.05)
    assert colocated.max_step_s == 0.05
    capped = StepLimits.for_role(Role.COLOCATED, 8, 512, 0.05)
    assert capped.max_step_s is None and capped.max_prefill_tokens == 512


def test_everything_finishes_under_random_load() -> None:
    subject = scheduler(max_step_s=0.05, num_blocks=20)
    sequences = [arrive(subject, f"s{n}", 10 + 13 * n % 90, priority=n % 3) for n in range(20)]
    for _ in range(3000):
        plan = subject.schedule()
        compute(subject, plan)
        for sequence in list(subject.running):
            if len(sequence.output_token_ids) >= 10:
                subject.remove(sequence, SequenceStatus.FINISHED)
        subject.blocks.check_integrity([*subject.waiting, *subject.running])
        if not subject.has_work():
            break
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)


def test_the_largest_chunk_is_the_last_that_fits() -> None:
    profile = StepProfile(base_s=0.01, per_prefill_token_s=0.001, per_prefill_context_s=1e-6)
    load = StepLoad(decode_sequences=3, decode_context_tokens=900)
    for budget_s in (0.02, 0.05, 0.2):
        chunk = largest_chunk(profile, load, 300, budget_s, 10_000)
        assert step_s(profile, load.with_chunk(chunk, 300)) <= budget_s
        assert step_s(profile, load.with_chunk(chunk + 1, 300)) > budget_s
    assert largest_chunk(profile, load, 0, 0.001, 100) == 0
    assert largest_chunk(profile, load, 0, 10.0, 100) == 100


def test_overlap_hides_the_smaller_part() -> None:
    load = StepLoad(prefill_tokens=20, decode_sequences=2)
    assert abs(step_s(PROFILE, load) - 0.040) < 1e-9
    hidden = PROFILE.model_copy(update={"overlap": 1.0})
    assert abs(step_s(hidden, load) - 0.030) < 1e-9
