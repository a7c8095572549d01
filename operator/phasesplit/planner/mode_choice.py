"""What one of the rules of the mode has come to, before it becomes a decision. A value only."""

from dataclasses import dataclass

from phasesplit.api.conditions import Reason
from phasesplit.api.routing import ServedMode
from phasesplit.planner.mode_types import ModeMemory
from phasesplit.planner.trial_halves import Halves


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, why, and what to remember."""

    mode: ServedMode
    reason: Reason
    message: str
    memory: ModeMemory
    serving: bool = True
    halves: Halves | None = None
    cause: Reason | None = None  # set when a split is left
