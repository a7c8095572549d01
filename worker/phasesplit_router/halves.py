"""Which mode a request is tried in while a trial serves both at once: a fair draw within alike requests.

Within a latency class and a band of prompt lengths requests are dealt out in blocks, so that both
modes get the same mix whatever comes. Knows no workers; randomness is passed in.
"""

import random
from collections.abc import Callable

from phasesplit.api.routing import RoutingTable, ServedMode, TrialTable

_BLOCK = 4  # requests alike that are dealt out together
_MAX_STRATA = 1024

Stratum = tuple[str, int]


class Halves:
    """Deals requests out to both modes of the trial in the routing table, if there is one."""

    def __init__(self, draw: random.Random, table: Callable[[], RoutingTable | None]) -> None:
        self._draw = draw
        self._table = table
        self._trial = ""
        self._dealt: dict[Stratum, list[ServedMode]] = {}

    def assign(self, slo_class: str, prompt_tokens: int) -> tuple[str, ServedMode] | None:
        """The trial and the mode of a new request; None without a trial."""
        trial = self._trial_now()
        if trial is None:
            return None
        if trial.id != self._trial or len(self._dealt) > _MAX_STRATA:
            self._trial, self._dealt = trial.id, {}
        cards = self._dealt.setdefault((slo_class, prompt_tokens.bit_length()), [])
        if not cards:
            exact = trial.split_share * _BLOCK
            # A share that does not fill a block is met on average.
            split = int(exact) + (self._draw.random() < exact - int(exact))
            cards += [ServedMode.SPLIT] * split + [ServedMode.COLOCATED] * (_BLOCK - split)
            self._draw.shuffle(cards)
        return trial.id, cards.pop()

    def mode(self, assigned: tuple[str, ServedMode] | None) -> ServedMode | None:
        """The mode that still holds for a request: a trial that is over binds nobody."""
        trial = self._trial_now()
        if assigned is None or trial is None or trial.id != assigned[0]:
            return None
        return assigned[1]

    def _trial_now(self) -> TrialTable | None:
        table = self._table()
        return table.trial if table is not None else None
