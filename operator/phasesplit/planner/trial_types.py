"""A trial as values: where it is, what its windows saw, and what it says in the end."""

from dataclasses import dataclass
from enum import StrEnum


class TrialVerdict(StrEnum):
    """Where a trial stands."""

    RUNNING = "Running"
    CONFIRMED = "Confirmed"  # the split keeps more requests in target, at 95 %
    REFUTED = "Refuted"  # it does not, or nothing was certain after the last window
    STOPPED = "Stopped"  # attainment dropped clearly
    STARVED = "Starved"  # too few requests came


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive requests of one mode."""

    counted: int = 0
    attained: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A finished window of one mode, in parts of equal time."""

    split: bool
    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        """All of it."""
        return total(self.parts)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that runs. `windows` are those whose requests have ended."""

    started_s: float
    window_s: float
    skip_s: float  # at a window's start, in which requests of the mode before still run
    index: int = 0
    window_started_s: float = 0.0
    windows: tuple[Window, ...] = ()
    # Of the split half, where both modes are served at once and windows come in pairs; None: in turn.
    prefill_share: float | None = None


@dataclass(frozen=True, slots=True)
class TrialReading:
    """Both modes as measured so far."""

    split: Part
    colocated: Part
    difference: float = 0.0  # of the shares in target, split over colocated
    low: float = -1.0  # 95 % interval
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class TrialStep:
    """What to do now."""

    verdict: TrialVerdict
    split: bool  # serve the split now?
    reading: TrialReading
    trial: Trial  # to be passed in again


def total(parts: tuple[Part, ...]) -> Part:
    """Sum of parts."""
    return Part(sum(part.counted for part in parts), sum(part.attained for part in parts))
