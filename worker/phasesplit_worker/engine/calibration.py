"""Measures some steps of made-up requests before the first real one, for a first step profile."""

from collections.abc import Callable

from phasesplit_worker.engine.core import EngineCore
from phasesplit_worker.engine.profiler import StepProfiler, record_of, since
from phasesplit_worker.requests import EngineRequest
from phasesplit_worker.sequence import SamplingParams

# (sequences, prompt tokens, output tokens): small steps of every kind, cheapest first.
_ROUNDS = ((1, 8, 4), (1, 8, 4), (4, 12, 4), (1, 64, 3), (2, 96, 4), (1, 200, 3), (8, 16, 4))
_LONGEST_S = 3.0
# No step may look like a hang, however slow the machine: larger rounds are left out.
_LONGEST_STEP_S = 1.0


def calibrate(
    core: EngineCore,
    profiler: StepProfiler,
    vocabulary_size: int,
    *,
    clock: Callable[[], float],
    processor_clock: Callable[[], float | None],
    beat: Callable[[], None],
) -> None:
    """Run rounds until all are done or the time is over. Leaves no trace in the engine.

    `beat` is called before every step: calibration must not look like a hung engine.
    """
    end_s = clock() + _LONGEST_S
    seconds_per_token = 0.0
    limits = core.scheduler.limits
    longest = core.scheduler.blocks.num_blocks * core.scheduler.blocks.block_size // 2
    for index, (num_sequences, num_prompt, num_output) in enumerate(_ROUNDS):
        if num_sequences * (num_prompt + num_output) > longest or num_sequences > limits.max_num_seqs:
            continue
        if clock() > end_s or num_sequences * num_prompt * seconds_per_token > _LONGEST_STEP_S:
            break
        for number in range(num_sequences):
            tokens = tuple((7 * position + 31 * number) % vocabulary_size for position in range(num_prompt))
            sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
            request = EngineRequest(
                request_id=f"calibration-{index}-{number}", prompt_token_ids=tokens, sampling=sampling
            )
            core.add(request, lambda _: None, clock())
        seconds_per_token = _run(
            core, profiler, clock=clock, processor_clock=processor_clock, beat=beat, is_warm=index > 0
        )
        core.scheduler.blocks.clear_cache()
    core.scheduler.blocks.hit_tokens_total = core.scheduler.blocks.query_tokens_total = 0
    profiler.refit()


def _run(
    core: EngineCore,
    profiler: StepProfiler,
    *,
    clock: Callable[[], float],
    processor_clock: Callable[[], float | None],
    beat: Callable[[], None],
    is_warm: bool,
) -> float:
    """Run what is queued to its end; returns seconds per prompt token of the last prompt step."""
    seconds_per_token = 0.0
    while core.scheduler.has_work():
        beat()
        started_s, processor_started_s = clock(), processor_clock()
        plan = core.step()
        if plan is None:
            break
        ended_s = clock()
        seconds = ended_s - started_s
        if plan.load.prefill_tokens:
            seconds_per_token = seconds / plan.load.prefill_tokens
        if is_warm:
            processor_s = since(processor_started_s, processor_clock())
            profiler.add(record_of(plan.load, seconds), ended_s, processor_s)
    return seconds_per_token
