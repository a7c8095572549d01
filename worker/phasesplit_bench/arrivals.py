"""When requests start and how long they are. Pure: randomness and lengths are passed in."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT = (  # words of one token each in most vocabularies
    "the sea was calm and a small boat went out with two men who had been told of fish near the rocks "
    "in the morning light while on the shore people sold bread salt rope and news from other towns "
    "as if no storm could ever come again to this old port where every house has a blue door"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens, or a range drawn from uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Length":
        """`512` or `100:1000`. Raises `ValueError` with one sentence."""
        low, _, high = text.partition(":")
        try:
            length = cls(int(low), int(high or low))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a number of tokens; write 512 or 100:1000.") from error
        if not 1 <= length.low <= length.high:
            raise ValueError(f"{text!r} is not a range of tokens; write 512 or 100:1000.")
        return length

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a run."""

    index: int
    at_s: float  # since the start of the run; 0 in a closed loop
    prompt: str
    max_tokens: int


def make_prompt(tokens: int, source: random.Random) -> str:
    """Text of about so many tokens that shares no prefix with others."""
    words = [f"[{source.randrange(10**8)}]"]
    words += [source.choice(_WORDS) for _ in range(max(1, tokens - 6))]
    return " ".join(words)


def poisson(
    rate_per_s: float, duration_s: float, prompt: Length, output: Length, source: random.Random
) -> Iterator[Arrival]:
    """Open loop: requests come whether or not earlier ones are done."""
    at_s, index = source.expovariate(rate_per_s), 0
    while at_s < duration_s:
        yield Arrival(index, at_s, make_prompt(prompt.draw(source), source), output.draw(source))
        at_s += source.expovariate(rate_per_s)
        index += 1


def back_to_back(prompt: Length, output: Length, source: random.Random) -> Iterator[Arrival]:
    """Closed loop: the next request starts when one ends. Endless."""
    index = 0
    while True:
        yield Arrival(index, 0.0, make_prompt(prompt.draw(source), source), output.draw(source))
        index += 1
