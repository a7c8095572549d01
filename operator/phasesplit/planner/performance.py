"""What a step, a prompt and a transfer take, in closed form, from a fitted step profile.

Knows the law of one worker; queues and many workers are `capacity`'s business.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from phasesplit.planner.facts import StepProfile

MIN_CHUNK_TOKENS = 8
MAX_CHUNK_TOKENS = 8192
PREFILL_STEP_S = 0.25  # longest step of the prefill role, so that cancel and role switch stay quick
PREFILL_BASE_STEPS = 5.0  # but at least this many times a step's fixed part, as the worker's scheduler does
TRANSFER_LATENCY_S = 0.002


def step_s(
    profile: StepProfile,
    *,
    prefill_tokens: float = 0.0,
    prefill_pairs: float = 0.0,
    decode_sequences: float = 0.0,
    decode_context_tokens: float = 0.0,
) -> float:
    """Seconds of one step.

    `prefill_pairs` is the sum over prompt tokens of the context each attends to: for a chunk of n
    after c tokens n * (c + n / 2). `decode_context_tokens` is summed over the decoding sequences.
    """
    prefill = prefill_tokens * profile.per_prefill_token_s + prefill_pairs * profile.per_prefill_context_s
    decode = (
        decode_sequences * profile.per_decode_sequence_s
        + decode_context_tokens * profile.per_decode_context_s
    )
    return profile.base_s + prefill + decode - profile.overlap * min(prefill, decode)


def chunk_pairs(tokens: float, context_tokens: float) -> float:
    """Token-context pairs of a chunk that follows `context_tokens` already computed."""
    return tokens * (context_tokens + tokens / 2)


def mixed_step_s(
    profile: StepProfile,
    chunk_tokens: float,
    *,
    chunk_context_tokens: float = 0.0,
    batch: float = 0.0,
    context_tokens: float = 0.0,
) -> float:
    """Seconds of a step with a chunk of prefill beside `batch` sequences of mean `context_tokens`."""
    return step_s(
        profile,
        prefill_tokens=chunk_tokens,
        prefill_pairs=chunk_pairs(chunk_tokens, chunk_context_tokens),
        decode_sequences=batch,
        decode_context_tokens=batch * context_tokens,
    )


def decode_step_s(profile: StepProfile, batch: float, context_tokens: float) -> float:
    """Seconds of a step that only decodes."""
    return mixed_step_s(profile, 0.0, batch=batch, context_tokens=context_tokens)


def num_chunks(tokens: float, chunk_tokens: float) -> int:
    """Steps that a prompt takes."""
    return max(1, math.ceil(tokens / chunk_tokens - 1e-9))


def prefill_s(
    profile: StepProfile,
    prompt_tokens: float,
    chunk_tokens: float,
    *,
    cached_tokens: float = 0.0,
    batch: float = 0.0,
    context_tokens: float = 0.0,
) -> float:
    """Seconds to prefill a prompt in chunks, `batch` sequences decoding in each of its steps.

    Summed over the chunks the pairs are those of the whole prompt, so only the base and the decode
    part repeat; the overlap is taken at the mean chunk.
    """
    tokens = max(1.0, prompt_tokens - cached_tokens)
    steps = num_chunks(tokens, chunk_tokens)
    mean_chunk = tokens / steps
    return steps * step_s(
        profile,
        prefill_tokens=mean_chunk,
        prefill_pairs=chunk_pairs(tokens, cached_tokens) / steps,
        decode_sequences=batch,
        decode_context_tokens=batch * context_tokens,
    )


def prefill_times_s(profile: StepProfile, prompts: Iterable[tuple[int, int, int]]) -> list[float]:
    """`prefill_s` of many prompts (tokens, cached tokens, chunk) with nothing beside them, for less."""
    base_s, token_s, pair_s = profile.base_s, profile.per_prefill_token_s, profile.per_prefill_context_s
    times_s = []
    for prompt_tokens, cached_tokens, chunk_tokens in prompts:
        tokens = prompt_tokens - cached_tokens if prompt_tokens > cached_tokens else 1
        steps = math.ceil(tokens / chunk_tokens - 1e-9) or 1
        pairs = tokens * (cached_tokens + tokens / 2)
        times_s.append(steps * base_s + tokens * token_s + pairs * pair_s)
    return times_s


def prefill_tokens_per_s(profile: StepProfile, prompt_tokens: float) -> float:
    """Prompt tokens per second of a worker in the prefill role, one prompt after the other."""
    tokens = max(1.0, prompt_tokens)
    seconds = prefill_s(profile, tokens, prefill_chunk_tokens(profile, tokens))
    return tokens / seconds if seconds > 0 else math.inf


@lru_cache(maxsize=4096)  # searches over plans ask for the same few steps again and again
def largest_chunk_tokens(
    profile: StepProfile,
    budget_s: float,
    *,
    chunk_context_tokens: float = 0.0,
    batch: float = 0.0,
    context_tokens: float = 0.0,
    max_tokens: int = MAX_CHUNK_TOKENS,
) -> int:
    """Most prompt tokens whose step stays within `budget_s`; never below the smallest chunk."""

    def fits(tokens: int) -> bool:
        seconds = mixed_step_s(
            profile,
            tokens,
            chunk_context_tokens=chunk_context_tokens,
            batch=batch,
            context_tokens=context_tokens,
        )
        return seconds <= budget_s

    low, high = MIN_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, max_tokens)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_prefill_step_s(profile: StepProfile) -> float:
    """How long a step of the prefill role may last."""
    return max(PREFILL_STEP_S, PREFILL_BASE_STEPS * profile.base_s)


def prefill_chunk_tokens(profile: StepProfile, prompt_tokens: float) -> int:
    """Chunk of the prefill role: steps of at most a quarter of a second, or five times their fixed part."""
    return largest_chunk_tokens(
        profile, longest_prefill_step_s(profile), chunk_context_tokens=prompt_tokens / 2
    )


def colocated_chunk_tokens(
    profile: StepProfile,
    tpot_s: float,
    *,
    batch: float,
    context_tokens: float,
    max_tokens: int = MAX_CHUNK_TOKENS,
) -> int:
    """Chunk of the colocated role: the largest whose predicted step keeps the tightest TPOT."""
    return largest_chunk_tokens(
        profile,
        tpot_s,
        chunk_context_tokens=context_tokens / 2,
        batch=batch,
        context_tokens=context_tokens,
        max_tokens=max_tokens,
    )


def kv_bytes(prompt_tokens: float, kv_bytes_per_token: float, block_size: int = 1) -> float:
    """Bytes of a prompt's KV on the wire, whole blocks."""
    return math.ceil(prompt_tokens / block_size) * block_size * kv_bytes_per_token


def transfer_s(size_bytes: float, bytes_per_s: float, latency_s: float = TRANSFER_LATENCY_S) -> float:
    """Seconds to move that many bytes over an otherwise idle link."""
    return latency_s + (size_bytes / bytes_per_s if bytes_per_s > 0 else math.inf)


def exposed_transfer_s(
    size_bytes: float,
    bytes_per_s: float,
    *,
    prefill_seconds: float,
    chunks: int,
    latency_s: float = TRANSFER_LATENCY_S,
) -> float:
    """Part of the transfer that lies after the prefill, when each chunk is pulled once computed.

    On a link faster than the prefill only the last chunk is left; on a slower one all but what could
    be moved since the first chunk.
    """
    whole_s = transfer_s(size_bytes, bytes_per_s, 0.0)
    last_chunk_s = whole_s / max(1, chunks)
    overlapped_s = prefill_seconds * (chunks - 1) / max(1, chunks)
    return latency_s + max(last_chunk_s, whole_s - overlapped_s)


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one device and what share of them a plain engine reaches."""

    flops: float
    bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    overhead_s: float  # per step, whatever it carries


# Substrings of a device name, most telling first. Peaks: dense 16-bit of the makers' data sheets.
# The row "cpu" is one core with wide vector units in float32.
_DEVICES: tuple[tuple[str, Device], ...] = (
    ("cpu", Device(140e9, 12e9, 0.42, 0.65, 0.002)),
    ("b200", Device(2250e12, 7.7e12, 0.4, 0.6, 0.004)),
    ("h200", Device(989e12, 4.8e12, 0.45, 0.6, 0.004)),
    ("h100", Device(989e12, 3.35e12, 0.45, 0.6, 0.004)),
    ("a100", Device(312e12, 2.0e12, 0.4, 0.6, 0.005)),
    ("l40", Device(362e12, 0.864e12, 0.32, 0.6, 0.005)),
    ("4090", Device(165e12, 1.0e12, 0.45, 0.7, 0.005)),
    ("3090", Device(71e12, 0.936e12, 0.45, 0.7, 0.005)),
    ("a10", Device(125e12, 0.6e12, 0.35, 0.7, 0.005)),
    ("l4", Device(121e12, 0.3e12, 0.3, 0.7, 0.005)),
    ("t4", Device(65e12, 0.32e12, 0.3, 0.65, 0.006)),
)
_UNKNOWN_GPU = Device(25e12, 0.36e12, 0.35, 0.6, 0.006)


def find_device(name: str) -> Device:
    """Peaks of a device by its product name; a modest GPU when the name is unknown."""
    lowered = name.lower()
    return next((device for part, device in _DEVICES if part in lowered), _UNKNOWN_GPU)


def guess_profile(
    num_parameters: int,
    device: str,
    *,
    bytes_per_parameter: float | None = None,
    kv_bytes_per_token: float = 0.0,
) -> StepProfile:
    """A roofline guess for before anything is measured; marked as guessed.

    Attention cost needs layers times width, which grow about as 1.5 * sqrt(parameters).
    """
    peaks = find_device(device)
    size = bytes_per_parameter or (4.0 if "cpu" in device.lower() else 2.0)
    flops = peaks.flops * peaks.compute_efficiency
    memory = peaks.bytes_per_s * peaks.memory_efficiency
    token_s = 2.0 * num_parameters / flops
    layers_times_width = 1.5 * math.sqrt(max(1, num_parameters))
    return StepProfile(
        base_s=peaks.overhead_s + num_parameters * size / memory,
        per_prefill_token_s=token_s,
        per_prefill_context_s=4.0 * layers_times_width / flops,
        per_decode_sequence_s=token_s,
        per_decode_context_s=(kv_bytes_per_token or 2.0 * layers_times_width * size / 4) / memory,
        overlap=0.0 if "cpu" in device.lower() else 0.5,
        guessed=True,
    )
