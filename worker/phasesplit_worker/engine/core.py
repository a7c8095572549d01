"""The engine without its thread: schedule, run, sample, and tell whoever asked.

Single-threaded: every method is called on the engine thread (or by a test). Who frees blocks:
  LOCAL, DECODE   at finish or abort
  PREFILL         at `release_held` (pulled or expired), at abort, or when the first token ends it
  reserved (REMOTE) blocks are written by the transfer side, so an abort keeps them until that side
  lets go (`release_held`, `start_remote`, `recompute`) or its longest time is over
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

import torch

from phasesplit_worker.engine.entries import Entry, error_output, to_sequence
from phasesplit_worker.engine.hooks import HookCaller
from phasesplit_worker.engine.outcome import finish_reason_of
from phasesplit_worker.engine.sampler import sample
from phasesplit_worker.model.batch import build_batch
from phasesplit_worker.model.loader import LoadedModel
from phasesplit_worker.requests import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    OnOutput,
    Reservation,
    TokenLogprob,
    TransferHooks,
)
from phasesplit_worker.scheduling.scheduler import Scheduler, StepPlan
from phasesplit_worker.sequence import RequestKind, Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class EngineCore:
    """Sequences from arrival to their last output."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        clock: Callable[[], float],
        quarantine_s: float,
    ) -> None:
        self.scheduler = scheduler
        self._hooks = HookCaller()
        self._loaded = loaded
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._entries: dict[str, Entry] = {}

    def set_hooks(self, hooks: TransferHooks | None) -> None:
        """Set the transfer side."""
        self._hooks.target = hooks

    @property
    def num_entries(self) -> int:
        """Requests that are not over or still hold blocks."""
        return len(self._entries)

    # -- requests --------------------------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        arrival_s: float,
        reservation: Future[Reservation] | None = None,
    ) -> None:
        """Queue a validated request. With `reservation`: a leg 2 that waits for blocks first."""
        self._forget_finished_prefill(request.request_id)
        if request.request_id in self._entries:
            message = f"request id {request.request_id} is in use"
            on_output(error_output(request.request_id, message))
            return
        sequence = to_sequence(request, arrival_s, awaits_remote=reservation is not None)
        entry = Entry(sequence, on_output, reservation)
        self._entries[request.request_id] = entry
        self.scheduler.add(sequence)
        if sequence.is_prefill_only:
            self._hooks.prefill_accepted(sequence)

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None:
        """The reserved blocks hold the KV of all known tokens: decode."""
        entry = self._reserved_entry(request_id)
        if entry is None:
            return
        sequence = entry.sequence
        if num_computed_tokens != sequence.num_known_tokens:
            self.recompute(request_id, "short_transfer", first_token)
            return
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens = num_computed_tokens
        self.scheduler.blocks.commit(sequence, before)
        self.scheduler.start_remote(sequence)
        sequence.scheduled_s = sequence.scheduled_s or self._clock()
        self._take_first_token(entry, first_token)

    def recompute(self, request_id: str, reason: str, first_token: int | None) -> None:
        """Give up on the pull and prefill here."""
        entry = self._reserved_entry(request_id)
        if entry is None:
            return
        entry.sequence.recomputed = reason
        self.scheduler.recompute(entry.sequence)
        if first_token is not None:
            self._take_first_token(entry, first_token)

    def release_held(self, request_id: str) -> None:
        """The transfer side is done with these blocks."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        status = entry.sequence.status
        if status is SequenceStatus.HELD:
            self._drop(entry)
        elif status is SequenceStatus.REMOTE:
            entry.end(self._clock(), finish_reason="abort")
            self._drop(entry)

    def abort(self, request_id: str, reason: str) -> None:
        """End a request wherever it is."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        sequence = entry.sequence
        self._hooks.prefill_aborted(entry.sequence, reason)
        entry.end(self._clock(), finish_reason=reason)
        if sequence.status is SequenceStatus.REMOTE:
            if entry.quarantined_until_s is None:
                entry.quarantined_until_s = self._clock() + self._quarantine_s
        else:
            self._drop(entry)

    def abort_all(self, error: str | None) -> None:
        """End everything, reserved blocks included; the process is going away."""
        for entry in list(self._entries.values()):
            self._hooks.prefill_aborted(entry.sequence, "error" if error else "abort")
            entry.end(self._clock(), finish_reason="error" if error else "abort", error=error)
            self._drop(entry)

    def free_expired(self) -> None:
        """Free reserved blocks of aborted requests that the transfer side never let go."""
        now_s = self._clock()
        for entry in list(self._entries.values()):
            if entry.quarantined_until_s is not None and entry.quarantined_until_s <= now_s:
                self._drop(entry)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, pace: Callable[[StepPlan], None] | None = None) -> StepPlan | None:
        """Run one step; None when nothing can be computed now.

        `pace` is called when all is computed and nobody has been told of it.
        """
        plan = self.scheduler.schedule()
        for sequence in plan.preempted:  # before this step writes into what were their blocks
            self._hooks.blocks_lost(sequence)
        for sequence in plan.reserved:
            self._resolve(self._entries[sequence.request_id])
        if not plan.scheduled:
            return None
        now_s = self._clock()
        for sequence, _ in plan.scheduled:
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
        blocks = self.scheduler.blocks
        batch = build_batch(plan.scheduled, blocks.block_size, self._loaded.device)
        with torch.inference_mode():
            logits = self._loaded.forward(batch)
            tokens = sample(logits, batch.sampled, self._loaded.eos_token_ids) if batch.sampled else []
        if pace is not None:
            pace(plan)
        for sequence, count in plan.scheduled:
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens += count
            blocks.commit(sequence, before)
            if sequence.is_prefill_only:
                self._hooks.blocks_ready(sequence)
        for sequence, (token_id, logprob) in zip(batch.sampled, tokens, strict=True):
            self._take_token(sequence, token_id, logprob)
        return plan

    def fail_running(self, message: str) -> None:
        """A step failed: end what took part with an error, keep what only waits."""
        for sequence in list(self.scheduler.running):
            entry = self._entries[sequence.request_id]
            self._hooks.prefill_aborted(entry.sequence, "error")
            entry.end(self._clock(), finish_reason="error", error=message)
            self._drop(entry)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the block pool agrees with the sequences."""
        self.scheduler.blocks.check_integrity(entry.sequence for entry in self._entries.values())

    def stats(self) -> EngineStats:
        """The load now."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        catching_up = [s for s in (*scheduler.waiting, *scheduler.running) if not s.is_decoding]
        return EngineStats(
            kv_total_blocks=blocks.num_blocks,
            kv_used_blocks=blocks.num_used_blocks,
            num_running=len(scheduler.running) + len(scheduler.remote),
            num_waiting=len(scheduler.waiting),
            num_waiting_prompt_tokens=sum(s.num_pending_tokens for s in catching_up if not s.awaits_remote),
            num_held=sum(e.sequence.status is SequenceStatus.HELD for e in self._entries.values()),
            num_preemptions_total=scheduler.num_preemptions_total,
            prefix_cache_hit_tokens_total=blocks.hit_tokens_total,
            prefix_cache_query_tokens_total=blocks.query_tokens_total,
        )

    # -- inside ----------------------------------------------------------------------------------

    def _forget_finished_prefill(self, request_id: str) -> None:
        """A leg 1 is asked for again (its decode side was lost): the KV of the first one is stale."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.sequence.status is SequenceStatus.HELD:
            self.abort(request_id, "replaced")

    def _reserved_entry(self, request_id: str) -> Entry | None:
        """The entry whose transfer ends now; what was aborted meanwhile is freed."""
        entry = self._entries.get(request_id)
        if entry is None or entry.sequence.status is not SequenceStatus.REMOTE:
            return None
        if entry.is_over:
            self._drop(entry)
            return None
        return entry

    def _resolve(self, entry: Entry) -> None:
        sequence = entry.sequence
        if entry.reservation is None:
            return
        try:
            entry.reservation.set_result(
                Reservation(tuple(sequence.block_table), sequence.num_computed_tokens)
            )
        except InvalidStateError:  # the caller has cancelled and nobody writes into the blocks
            entry.end(self._clock(), finish_reason="abort")
            self._drop(entry)

    def _take_first_token(self, entry: Entry, first_token: int) -> None:
        """Leg 2 learns the first token, which the client has from leg 1."""
        sequence = entry.sequence
        sequence.output_token_ids.append(first_token)
        finish_reason = self._finish_reason(sequence, first_token)
        entry.emit(EngineOutput(request_id=sequence.request_id, skipped_token_ids=(first_token,)))
        if finish_reason is not None:
            entry.end(self._clock(), finish_reason=finish_reason)
            self._drop(entry)

    def _take_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        entry = self._entries.get(sequence.request_id)
        if entry is None or sequence.status is not SequenceStatus.RUNNING:
            return  # a hook or a callback has ended it during this step
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock()
        is_first = sequence.num_tokens == sequence.num_known_tokens
        sequence.output_token_ids.append(token_id)
        if is_first and sequence.kind is RequestKind.DECODE:
            sequence.output_token_ids.pop()
            self._take_first_token(entry, token_id)
            return
        finish_reason = self._finish_reason(sequence, token_id)
        logprobs = None if logprob is None else (logprob,)
        if finish_reason is None and not sequence.is_prefill_only:
            entry.emit(EngineOutput(request_id=sequence.request_id, token_ids=(token_id,), logprobs=logprobs))
            return
        if finish_reason is None:
            self._hold(entry, token_id, logprobs)
            return
        self._hooks.prefill_aborted(sequence, finish_reason)  # there is no leg 2: nobody will pull
        entry.end(self._clock(), finish_reason=finish_reason, token_ids=(token_id,), logprobs=logprobs)
        self._drop(entry)

    def _hold(self, entry: Entry, token_id: int, logprobs: tuple[TokenLogprob, ...] | None) -> None:
        """Leg 1 has its first token: keep the blocks, give the token out."""
        sequence = entry.sequence
        self.scheduler.remove(sequence, SequenceStatus.HELD)
        self._hooks.prefill_finished(sequence, token_id)
        entry.end(self._clock(), finish_reason=None, token_ids=(token_id,), logprobs=logprobs)
        if self._hooks.target is None:
            self._drop(entry)  # nobody could ever pull or release it

    def _finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        loaded = self._loaded
        return finish_reason_of(sequence, token_id, loaded.eos_token_ids, loaded.facts.max_model_length)

    def _drop(self, entry: Entry) -> None:
        """Free the blocks and forget the sequence."""
        if self._entries.pop(entry.sequence.request_id, None) is not None:
            self.scheduler.remove(entry.sequence, SequenceStatus.FINISHED)
