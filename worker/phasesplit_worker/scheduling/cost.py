"""Predicted duration of a step under a StepProfile, and the largest chunk that fits a budget.

Pure arithmetic; the same law as `phasesplit.api.reports.StepProfile` states.
"""

import math
from dataclasses import dataclass

from phasesplit.api.reports import StepProfile


@dataclass(frozen=True)
class StepLoad:
    """What a step computes."""

    prefill_tokens: int = 0
    prefill_context: float = 0.0  # sum over prefill tokens of the tokens each attends to
    decode_sequences: int = 0
    decode_context_tokens: int = 0

    def with_chunk(self, num_tokens: int, num_computed_tokens: int) -> "StepLoad":
        """This load plus one prefill chunk."""
        return StepLoad(
            self.prefill_tokens + num_tokens,
            self.prefill_context + chunk_context(num_tokens, num_computed_tokens),
            self.decode_sequences,
            self.decode_context_tokens,
        )

    def with_decode(self, context_tokens: int) -> "StepLoad":
        """This load plus one decoding sequence."""
        return StepLoad(
            self.prefill_tokens,
            self.prefill_context,
            self.decode_sequences + 1,
            self.decode_context_tokens + context_tokens,
        )


def chunk_context(num_tokens: int, num_computed_tokens: int) -> float:
    """Tokens attended to, summed over a chunk that starts after `num_computed_tokens`."""
    return num_tokens * (num_computed_tokens + (num_tokens + 1) / 2)


def prefill_s(profile: StepProfile, load: StepLoad) -> float:
    """Prefill's part of a step."""
    return (
        load.prefill_tokens * profile.per_prefill_token_s
        + load.prefill_context * profile.per_prefill_context_s
    )


def decode_s(profile: StepProfile, load: StepLoad) -> float:
    """Decode's part of a step."""
    return (
        load.decode_sequences * profile.per_decode_sequence_s
        + load.decode_context_tokens * profile.per_decode_context_s
    )


def step_s(profile: StepProfile, load: StepLoad) -> float:
    """Predicted duration of a step."""
    prefill, decode = prefill_s(profile, load), decode_s(profile, load)
    return profile.base_s + max(prefill, decode) + (1.0 - profile.overlap) * min(prefill, decode)


def largest_chunk(
    profile: StepProfile, load: StepLoad, num_computed_tokens: int, budget_s: float, max_tokens: int
) -> int:
    """Most tokens of one more chunk such that the step stays within `budget_s`; 0 when none fits."""
    if max_tokens <= 0 or step_s(profile, load.with_chunk(1, num_computed_tokens)) > budget_s:
        return 0
    low, high = 1, max_tokens
    if step_s(profile, load.with_chunk(high, num_computed_tokens)) <= budget_s:
        return high
    for _ in range(math.ceil(math.log2(max_tokens + 1))):  # step_s grows with the chunk: bisect
        middle = (low + high + 1) // 2
        if step_s(profile, load.with_chunk(middle, num_computed_tokens)) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low
