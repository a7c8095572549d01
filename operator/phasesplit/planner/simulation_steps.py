"""Runs of equal steps in closed form: how long `n` steps take, how many fit until a time.

While a batch neither gains nor loses a sequence each step is longer than the one before by the same
amount, because every context has grown by a token. A run is therefore a quadratic in its steps.
"""

import math

from phasesplit.planner.facts import StepProfile
from phasesplit.planner.performance import MIN_CHUNK_TOKENS

BLOCK_TOKENS = 16  # of a KV block, as workers have it unless told otherwise
_MANY_TOKENS = 1e9


class Law:
    """The step profile's numbers, ready for the inner loop."""

    __slots__ = ("base", "context", "overlap", "pair", "sequence", "token")

    def __init__(self, profile: StepProfile) -> None:
        self.base = profile.base_s
        self.token = profile.per_prefill_token_s
        self.pair = profile.per_prefill_context_s
        self.sequence = profile.per_decode_sequence_s
        self.context = profile.per_decode_context_s
        self.overlap = profile.overlap

    def step_s(self, tokens: float, pairs: float, batch: int, contexts: float) -> float:
        """One step."""
        prefill = tokens * self.token + pairs * self.pair
        decode = batch * self.sequence + contexts * self.context
        return self.base + prefill + decode - self.overlap * (prefill if prefill < decode else decode)

    def run_s(self, steps: float, tokens: float, before: float, batch: int, contexts: float) -> float:
        """`steps` steps, each with a chunk of `tokens` (0: none) that follows the one before.

        `before` are the tokens already computed of the prompt, `contexts` the sum of contexts at the
        first step. The overlap is taken at the middle of the run.
        """
        grown = steps * (steps - 1) / 2
        prefill = steps * tokens * self.token
        if tokens:
            prefill += self.pair * tokens * (steps * (before + tokens / 2) + grown * tokens)
        decode = steps * batch * self.sequence + self.context * (steps * contexts + grown * batch)
        hidden = prefill if prefill < decode else decode
        return steps * self.base + prefill + decode - self.overlap * hidden

    def decode_s(self, steps: float, batch: int, contexts: float) -> float:
        """`run_s` without prefill."""
        return steps * (
            self.base + batch * self.sequence + self.context * (contexts + (steps - 1) / 2 * batch)
        )

    def steps_until(self, seconds: float, batch: int, contexts: float) -> float:
        """Whole steps of decode alone that have begun by then: the last of them ends at or after it."""
        a = self.context * batch / 2
        b = self.base + batch * self.sequence + self.context * contexts - a
        if seconds <= 0:
            return 0.0
        steps = seconds / b if a <= 1e-18 else (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)
        return float(math.ceil(steps - 1e-9))

    def chunk_within(self, budget_s: float, before: float, batch: int, contexts: float) -> int:
        """Most prompt tokens of a step within the budget; never below the smallest chunk."""
        return self._chunk_in(self._prefill_room_s(budget_s, batch, contexts), before)

    def chunk_through(self, budget_s: float, before: float, rest: int, batch: int, contexts: float) -> int:
        """Chunk of equal steps through the `rest` of a prompt that last the budget on average.

        A worker's chunks shrink as the prompt's context grows, each to fill its step. Equal ones of the
        first's size would grow beyond the budget, and every request that decodes beside them would miss a
        target that in truth it keeps. Inner chunks end on block boundaries.
        """
        room_s = self._prefill_room_s(budget_s, batch, contexts)
        first = self._chunk_in(room_s, before)
        if first >= rest:
            return first
        per_token_s = self.token + self.pair * (before + rest)
        last = first if per_token_s <= 0 else max(MIN_CHUNK_TOKENS, min(first, int(room_s / per_token_s)))
        return (_align(first) + _align(last)) // 2

    def _chunk_in(self, room_s: float, before: float) -> int:
        if room_s <= 0:
            return MIN_CHUNK_TOKENS
        per_token_s = self.token + self.pair * before
        if self.pair <= 0:
            tokens = room_s / per_token_s if per_token_s > 0 else _MANY_TOKENS
        else:
            tokens = (math.sqrt(per_token_s * per_token_s + 2 * self.pair * room_s) - per_token_s) / self.pair
        return max(MIN_CHUNK_TOKENS, int(min(tokens, _MANY_TOKENS)))

    def _prefill_room_s(self, budget_s: float, batch: int, contexts: float) -> float:
        """Seconds of prefill that fit a step of this budget beside its decodes."""
        decode = batch * self.sequence + contexts * self.context
        room_s = budget_s - self.base - decode
        # With overlap, prefill up to the decode time is partly hidden, and hides decode beyond it.
        if self.overlap:
            hidden_first = self.overlap * decode
            if room_s + hidden_first > decode:
                return room_s + hidden_first
            return room_s / (1 - self.overlap) if self.overlap < 1 else decode
        return room_s


def _align(tokens: int) -> int:
    """End a chunk on a block boundary where that costs less than half of it."""
    aligned = tokens - tokens % BLOCK_TOKENS
    return aligned if aligned >= tokens // 2 and aligned else tokens
