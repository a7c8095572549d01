"""From tokens to the text a client sees: detokenising, stop strings, what is already sent.

What is emitted after n tokens depends on these n tokens alone. That is why a leg that starts in the
middle (leg 2, replay) can feed the earlier tokens, throw their text away, and go on exactly where
the earlier leg stopped, held-back text included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TextDecoder(Protocol):
    """Incremental detokeniser: text that is complete after each token."""

    def append(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def _held_length(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may turn out to begin a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest stop string in `text` begins."""
    found = [index for index in (text.find(stop) for stop in stops) if index >= 0]
    return min(found, default=None)


@dataclass(frozen=True)
class Emission:
    """Text to send now, and whether a stop string ended the answer."""

    text: str
    is_stopped: bool = False


class TextStream:
    """Text of one answer. Stop strings count only from the `min_tokens`-th token on."""

    def __init__(self, decoder: TextDecoder, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_emitted = 0  # characters
        self._held = ""
        self._is_stopped = False

    @property
    def num_emitted_chars(self) -> int:
        """Characters sent so far, by this leg or an earlier one."""
        return self._num_emitted

    @property
    def is_stopped(self) -> bool:
        """Has a stop string ended the answer?"""
        return self._is_stopped

    def append(self, token_id: int) -> Emission:
        """Take one more token. After a stop string nothing is emitted any more."""
        if self._is_stopped:
            return Emission("", is_stopped=True)
        self._num_tokens += 1
        return self._take(self._decoder.append(token_id))

    def flush(self) -> str:
        """Text still held back, when the answer ends for another reason than a stop string."""
        if self._is_stopped:
            return ""
        emission = self._take(self._decoder.flush())
        rest, self._held = self._held, ""
        self._num_emitted += len(rest)
        return emission.text + rest

    def _take(self, delta: str) -> Emission:
        text = self._held + delta
        if not self._stops or self._num_tokens < self._min_tokens:
            self._held = ""
            return self._emit(text)
        stop = _first_stop(text, self._stops)
        if stop is not None:
            self._is_stopped, self._held = True, ""
            return self._emit(text[:stop], is_stopped=True)
        held = _held_length(text, self._stops)
        self._held = text[len(text) - held :]
        return self._emit(text[: len(text) - held])

    def _emit(self, text: str, *, is_stopped: bool = False) -> Emission:
        self._num_emitted += len(text)
        return Emission(text, is_stopped)
