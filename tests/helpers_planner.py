"""Situations for the planner's tests: objects, pools, workers, loads."""

from dataclasses import replace

from hypothesis import HealthCheck, settings

from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import StepProfile
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode
from phasesplit.planner.facts import LinkFacts, LoadFacts, WorkerFacts
from phasesplit.planner.mode_types import ModeInput, ModeMemory, PoolPresence
from phasesplit.planner.scaling_types import PoolBounds, ScalingInput

# Properties are about values; how busy the machine is must not fail them.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

MBIT = 1e6 / 8
# One core with SmolLM2-135M in float32: about 210 prompt tokens/s, 72 ms per decoded token.
CPU = StepProfile(
    base_s=0.012, per_prefill_token_s=0.0045, per_decode_sequence_s=0.06, num_samples=500, residual=0.05
)
# A small GPU with an 8B model.
GPU = StepProfile(
    base_s=0.02,
    per_prefill_token_s=1.5e-4,
    per_prefill_context_s=8e-9,
    per_decode_sequence_s=1e-4,
    per_decode_context_s=1e-7,
    num_samples=5000,
    residual=0.03,
)
TARGETS = (LatencyClass(name="default", ttft_s=10.0, tpot_s=0.25),)


def workers(*, prefill: int = 1, decode: int = 1, decode_fingerprint: str = "f") -> tuple[WorkerFacts, ...]:
    made = [
        WorkerFacts(f"m-prefill-{i}", f"p{i}", Pool.PREFILL, Role.PREFILL, fingerprint="f")
        for i in range(prefill)
    ]
    made += [
        WorkerFacts(f"m-decode-{i}", f"d{i}", Pool.DECODE, Role.DECODE, fingerprint=decode_fingerprint)
        for i in range(decode)
    ]
    return tuple(made)


def pools(prefill: int = 1, decode: int = 1, **changes: object) -> dict[Pool, PoolPresence]:
    return {
        Pool.PREFILL: PoolPresence(Pool.PREFILL, desired=max(1, prefill), ready=prefill),
        Pool.DECODE: replace(PoolPresence(Pool.DECODE, desired=max(1, decode), ready=decode), **changes),
    }


def link(mbit: float, age_s: float = 1.0) -> tuple[LinkFacts, ...]:
    return (LinkFacts("p0", "d0", mbit * MBIT, age_s),)


def split_object(**changes: object) -> ModeInput:
    base = ModeInput(
        now_s=1000.0,
        wanted=Mode.SPLIT,
        fallback=Fallback.ALWAYS,
        served=ServedMode.SPLIT,
        pools=pools(),
        classes=TARGETS,
        workers=workers(),
        links=link(16_000),
        profiles={Pool.PREFILL: CPU, Pool.DECODE: CPU},
        kv_bytes_per_token=46_080,
        dwell_s=60.0,
        memory=ModeMemory(since_s=100.0),
    )
    return replace(base, **changes)


# Long prompts, a tight TPOT and a relaxed TTFT near capacity: the split's home ground.
LONG = LoadFacts(
    arrival_rate_per_s=1.3, mean_prompt_tokens=4000, mean_output_tokens=200, finished=500, attainment=0.3
)
TIGHT = (LatencyClass(name="default", ttft_s=8.0, tpot_s=0.04),)


def auto_object(**changes: object) -> ModeInput:
    base = split_object(
        wanted=Mode.AUTO,
        served=ServedMode.COLOCATED,
        pools=pools(2, 2),
        workers=workers(prefill=2, decode=2),
        links=tuple(LinkFacts(f"p{a}", f"d{b}", 25e9) for a in range(2) for b in range(2)),
        profiles={Pool.PREFILL: GPU, Pool.DECODE: GPU},
        kv_bytes_per_token=131_072,
        loads=(LONG,),
        classes=TIGHT,
        memory=ModeMemory(since_s=0.0),
    )
    return replace(base, **changes)


SMALL_GPU = StepProfile(
    base_s=0.02,
    per_prefill_token_s=1e-4,
    per_decode_sequence_s=2e-4,
    per_decode_context_s=1e-7,
    num_samples=999,
)
SCALING_CLASSES = (LatencyClass(name="default", ttft_s=2.0, tpot_s=0.05),)


def scaling_load(rate: float, **changes: object) -> LoadFacts:
    base = LoadFacts(
        arrival_rate_per_s=rate,
        mean_prompt_tokens=2000,
        p95_prompt_tokens=4000,
        mean_output_tokens=200,
        finished=100,
    )
    return replace(base, **changes)


def pool_bounds(pool: Pool, desired: int, ready: int | None = None, **changes: object) -> PoolBounds:
    base = PoolBounds(pool, min=1, max=8, desired=desired, ready=desired if ready is None else ready)
    return replace(base, **changes)


def scaling_workers(prefill: int, decode: int, *, helping: int = 0) -> tuple[WorkerFacts, ...]:
    made = [WorkerFacts(f"m-prefill-{i}", "n", Pool.PREFILL, Role.PREFILL) for i in range(prefill)]
    for i in range(decode):
        role = Role.PREFILL if i >= decode - helping else Role.DECODE
        made.append(WorkerFacts(f"m-decode-{i}", "n", Pool.DECODE, role))
    return tuple(made)


def scaling_input(rate: float, prefill: int = 1, decode: int = 1, **changes: object) -> ScalingInput:
    base = ScalingInput(
        now_s=1000.0,
        mode=ServedMode.SPLIT,
        pools={
            Pool.PREFILL: pool_bounds(Pool.PREFILL, prefill),
            Pool.DECODE: pool_bounds(Pool.DECODE, decode),
        },
        classes=SCALING_CLASSES,
        loads=(scaling_load(rate),),
        workers=scaling_workers(prefill, decode),
        profiles={Pool.PREFILL: SMALL_GPU, Pool.DECODE: SMALL_GPU},
        down_stabilization_s=300.0,
    )
    return replace(base, **changes)
