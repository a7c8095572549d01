"""Pairs whose transfers keep failing are left alone for a while, longer each time. Pure state.

The clock is passed in. Knows pods and counts only.
"""

from dataclasses import dataclass

FAILURES = 3  # within `WINDOW_S`
WINDOW_S = 60.0
FIRST_S = 5.0
LONGEST_S = 300.0
MAX_PAIRS = 10_000  # the oldest are forgotten beyond this


@dataclass(slots=True)
class _Pair:
    failures: int = 0
    last_failure_s: float = 0.0
    times: int = 0  # quarantines so far
    until_s: float = 0.0


class Quarantine:
    """Counts transfer failures by (prefill pod, decode pod)."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def failed(self, prefill: str, decode: str, now_s: float) -> bool:
        """Note a failed transfer. True when this starts a quarantine."""
        if len(self._pairs) >= MAX_PAIRS and (prefill, decode) not in self._pairs:
            del self._pairs[next(iter(self._pairs))]
        pair = self._pairs.setdefault((prefill, decode), _Pair())
        if now_s - pair.last_failure_s > WINDOW_S:
            pair.failures = 0
        pair.failures += 1
        pair.last_failure_s = now_s
        # After a quarantine one more failure is enough: the pair is on probation.
        if pair.failures < FAILURES and not pair.times:
            return False
        if now_s < pair.until_s:
            return False
        pair.until_s = now_s + min(FIRST_S * 2**pair.times, LONGEST_S)
        pair.times = min(pair.times + 1, 16)
        pair.failures = 0
        return True

    def succeeded(self, prefill: str, decode: str) -> None:
        """A transfer worked: the pair is as good as new."""
        self._pairs.pop((prefill, decode), None)

    def active(self, now_s: float) -> frozenset[tuple[str, str]]:
        """Pairs to avoid now."""
        return frozenset(key for key, pair in self._pairs.items() if now_s < pair.until_s)

    def keep_only(self, pods: frozenset[str]) -> None:
        """Forget pairs of pods that are gone."""
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[0] in pods and key[1] in pods}
