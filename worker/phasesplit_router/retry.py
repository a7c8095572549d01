"""How often a request may be tried again: a budget per request, one per second for all. Pure."""

import random
from dataclasses import dataclass

MAX_RETRIES = 4  # per request
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


def backoff_s(attempt: int, draw: random.Random) -> float:
    """Jittered wait before retry number `attempt` (from 1); the first is almost at once."""
    longest: float = min(FIRST_BACKOFF_S * 4 ** (attempt - 1), LONGEST_BACKOFF_S)
    return draw.uniform(0.2, 1.0) * longest


@dataclass(slots=True)
class RetryBudget:
    """Tokens that refill with time: a dying pod's streams are replayed at once, a storm is not fed."""

    per_second: float = 20.0
    burst: float = 256.0
    _left: float = 256.0
    _at_s: float = 0.0

    def take(self, now_s: float) -> float:
        """Take one retry; seconds to wait before using it (0: at once)."""
        self._left = min(self.burst, self._left + max(0.0, now_s - self._at_s) * self.per_second)
        self._at_s = now_s
        self._left -= 1
        return 0.0 if self._left >= 0 else -self._left / self.per_second
