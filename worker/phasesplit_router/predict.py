"""How long prefill and decode would take on a worker, from its step profile. Pure arithmetic."""

import math

from phasesplit.api.reports import StepProfile

CHUNK_TOKENS = 512  # assumed prompt tokens per step where the real chunk is unknown
MIN_SAMPLES = 16  # fewer samples say too little to refuse anybody

# Only for ranking workers of which nothing is known; never for refusing a request.
GUESS = StepProfile(base_s=0.01, per_prefill_token_s=1e-3, per_decode_sequence_s=2e-3, guessed=True)


def is_measured(profile: StepProfile | None) -> bool:
    """Whether a profile rests on enough steps of this very worker."""
    return profile is not None and not profile.guessed and profile.num_samples >= MIN_SAMPLES


def prefill_s(profile: StepProfile | None, tokens: int) -> float:
    """Seconds to prefill `tokens` prompt tokens alone."""
    law = profile or GUESS
    steps = max(1, math.ceil(tokens / CHUNK_TOKENS))
    attention = law.per_prefill_context_s * tokens * tokens / 2
    return steps * law.base_s + tokens * law.per_prefill_token_s + attention


def decode_step_s(profile: StepProfile | None, sequences: int, context_tokens: int) -> float:
    """Seconds of one decode step with `sequences` sequences over `context_tokens` tokens of KV."""
    law = profile or GUESS
    return law.base_s + sequences * law.per_decode_sequence_s + context_tokens * law.per_decode_context_s


def exposed_transfer_s(kv_bytes: float, bytes_per_s: float | None, prefill_seconds: float) -> float:
    """Part of a KV transfer that is not hidden behind the prefill; 0 for an unknown link.

    Chunks travel while later ones are computed, so what remains is the last chunk, or all that a
    link slower than the prefill could not carry in time.
    """
    if not bytes_per_s:
        return 0.0
    whole_s = kv_bytes / bytes_per_s
    return max(whole_s - prefill_seconds, 0.0) + min(whole_s, prefill_seconds) * 0.1


class TextLength:
    """Learned bytes per token of prompts, and the usual length of answers."""

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = 128.0) -> None:
        self.bytes_per_token = bytes_per_token
        self.output_tokens = output_tokens

    def learn(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """Take in one finished request. Long prompts weigh more, since templates bias short ones."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            weight = min(0.2, prompt_tokens / 5000)
            ratio = min(max(prompt_bytes / prompt_tokens, 0.25), 16.0)
            self.bytes_per_token += weight * (ratio - self.bytes_per_token)
        if output_tokens > 0:
            self.output_tokens += 0.05 * (output_tokens - self.output_tokens)

    def prompt_tokens(self, prompt_bytes: int) -> int:
        """Estimated tokens of a prompt."""
        return max(1, round(prompt_bytes / self.bytes_per_token))

    def usual_output_tokens(self, max_tokens: int | None) -> int:
        """Tokens of an ordinary answer, never more than asked for."""
        usual = max(1, round(self.output_tokens))
        return usual if max_tokens is None else min(usual, max_tokens)

    def expected_output_tokens(self, max_tokens: int | None) -> int:
        """Tokens of KV to set aside for an answer: twice the usual, never more than asked for."""
        usual = max(64, round(2 * self.output_tokens))
        return usual if max_tokens is None else min(usual, max_tokens)
