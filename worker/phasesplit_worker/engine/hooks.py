"""Calls into the transfer side. Whatever happens there, the engine goes on; leg 2 then recomputes."""

import logging
from collections.abc import Callable

from phasesplit_worker.requests import TransferHooks
from phasesplit_worker.sequence import Sequence

logger = logging.getLogger(__name__)


class HookCaller:
    """The transfer side as the engine sees it; without one nothing happens."""

    def __init__(self) -> None:
        self.target: TransferHooks | None = None

    def prefill_accepted(self, sequence: Sequence) -> None:
        """A leg 1 is queued."""
        self._call(sequence, lambda hooks: hooks.on_prefill_accepted(sequence))

    def blocks_ready(self, sequence: Sequence) -> None:
        """One more chunk of a leg 1 is computed."""
        ready, table = sequence.num_computed_tokens, tuple(sequence.block_table)
        self._call(sequence, lambda hooks: hooks.on_blocks_ready(sequence.request_id, ready, table))

    def blocks_lost(self, sequence: Sequence) -> None:
        """A leg 1 was preempted: its blocks are about to be another's, and it will compute them again."""
        if sequence.is_prefill_only:
            self._call(sequence, lambda hooks: hooks.on_blocks_ready(sequence.request_id, 0, ()))

    def prefill_finished(self, sequence: Sequence, first_token: int) -> None:
        """A leg 1 has its first token; its blocks are held from now on."""
        state = {"seed": sequence.seed, "position": sequence.num_tokens}
        self._call(sequence, lambda hooks: hooks.on_prefill_finished(sequence.request_id, first_token, state))

    def prefill_aborted(self, sequence: Sequence, reason: str) -> None:
        """A leg 1's blocks are about to go: the transfer side must not read them any more."""
        if sequence.is_prefill_only:
            self._call(sequence, lambda hooks: hooks.on_prefill_aborted(sequence.request_id, reason))

    def _call(self, sequence: Sequence, call: Callable[[TransferHooks], None]) -> None:
        if self.target is None:
            return
        try:
            call(self.target)
        except Exception:  # somebody else's code must not end the engine
            logger.exception("the transfer side failed on request %s", sequence.request_id)
