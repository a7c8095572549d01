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
from dataclasses import dataclass

import torch

from phasesplit_worker.engine.sampler import sample
from phasesplit_worker.engine.timings import timings_of
from phasesplit_worker.model.batch import build_batch
from phasesplit_worker.model.loader import LoadedModel
from phasesplit_worker.requests import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    OnOutput,
    RequestTimings,
    Reservation,
    TokenLogprob,
    TransferHooks,
)
from phasesplit_worker.scheduling.scheduler import Scheduler, StepPlan
from phasesplit_worker.sequence import RequestKind, Sequence, SequenceStatus

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """A sequence and who waits for it."""

    sequence: Sequence
    on_output: OnOutput
    reservation: Future[Reservation] | None = None
    is_over: bool = False  # the last output was given; only blocks may be left
    quarantined_until_s: float | None = None  # aborted while a transfer may write into its blocks


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
        self.hooks: TransferHooks | None = None
        self._loaded = loaded
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._entries: dict[str, _Entry] = {}

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
            on_output(_error_output(request.request_id, message))
            return
        sequence = _to_sequence(request, arrival_s, awaits_remote=reservation is not None)
        entry = _Entry(sequence, on_output, reservation)
        self._entries[request.request_id] = entry
        self.scheduler.add(sequence)
        if sequence.is_prefill_only:
            self._call_hook(entry, lambda hooks: hooks.on_prefill_accepted(sequence))

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
            self._end(entry, finish_reason="abort")
            self._drop(entry)

    def abort(self, request_id: str, reason: str) -> None:
        """End a request wherever it is."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        sequence = entry.sequence
        self._report_aborted(entry, reason)
        self._end(entry, finish_reason=reason)
        if sequence.status is SequenceStatus.REMOTE:
            if entry.quarantined_until_s is None:
                entry.quarantined_until_s = self._clock() + self._quarantine_s
        else:
            self._drop(entry)

    def abort_all(self, error: str | None) -> None:
        """End everything, reserved blocks included; the process is going away."""
        for entry in list(self._entries.values()):
            self._report_aborted(entry, "error" if error else "abort")
            self._end(entry, finish_reason="error" if error else "abort", error=error)
            self._drop(entry)

    def free_expired(self) -> None:
        """Free reserved blocks of aborted requests that the transfer side never let go."""
        now_s = self._clock()
        for entry in list(self._entries.values()):
            if entry.quarantined_until_s is not None and entry.quarantined_until_s <= now_s:
                self._drop(entry)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> StepPlan | None:
        """Run one step; None when nothing can be computed now."""
        plan = self.scheduler.schedule()
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
        for sequence, count in plan.scheduled:
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens += count
            blocks.commit(sequence, before)
            if sequence.is_prefill_only:
                self._report_blocks(sequence)
        for sequence, (token_id, logprob) in zip(batch.sampled, tokens, strict=True):
            self._take_token(sequence, token_id, logprob)
        return plan

    def fail_running(self, message: str) -> None:
        """A step failed: end what took part with an error, keep what only waits."""
        for sequence in list(self.scheduler.running):
            entry = self._entries[sequence.request_id]
            self._report_aborted(entry, "error")
            self._end(entry, finish_reason="error", error=message)
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

    def _reserved_entry(self, request_id: str) -> _Entry | None:
        """The entry whose transfer ends now; what was aborted meanwhile is freed."""
        entry = self._entries.get(request_id)
        if entry is None or entry.sequence.status is not SequenceStatus.REMOTE:
            return None
        if entry.is_over:
            self._drop(entry)
            return None
        return entry

    def _resolve(self, entry: _Entry) -> None:
        sequence = entry.sequence
        if entry.reservation is None:
            return
        try:
            entry.reservation.set_result(
                Reservation(tuple(sequence.block_table), sequence.num_computed_tokens)
            )
        except InvalidStateError:  # the caller has cancelled and nobody writes into the blocks
            self._end(entry, finish_reason="abort")
            self._drop(entry)

    def _report_blocks(self, sequence: Sequence) -> None:
        entry = self._entries[sequence.request_id]
        ready, table = sequence.num_computed_tokens, tuple(sequence.block_table)
        self._call_hook(entry, lambda hooks: hooks.on_blocks_ready(sequence.request_id, ready, table))

    def _report_aborted(self, entry: _Entry, reason: str) -> None:
        """A leg 1's blocks are about to go: the transfer side must not read them any more."""
        sequence = entry.sequence
        if sequence.is_prefill_only:
            self._call_hook(entry, lambda hooks: hooks.on_prefill_aborted(sequence.request_id, reason))

    def _take_first_token(self, entry: _Entry, first_token: int) -> None:
        """Leg 2 learns the first token, which the client has from leg 1."""
        sequence = entry.sequence
        sequence.output_token_ids.append(first_token)
        sequence.num_emitted_tokens += 1
        finish_reason = self._finish_reason(sequence, first_token)
        self._emit(entry, EngineOutput(request_id=sequence.request_id, skipped_token_ids=(first_token,)))
        if finish_reason is not None:
            self._end(entry, finish_reason=finish_reason)
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
        sequence.num_emitted_tokens += 1
        finish_reason = self._finish_reason(sequence, token_id)
        logprobs = None if logprob is None else (logprob,)
        if finish_reason is None and not sequence.is_prefill_only:
            self._emit(
                entry,
                EngineOutput(request_id=sequence.request_id, token_ids=(token_id,), logprobs=logprobs),
            )
            return
        if finish_reason is None:
            self._hold(entry, token_id, logprobs)
            return
        self._report_aborted(entry, finish_reason)  # a leg 1 without a leg 2: nobody will pull
        self._end(entry, finish_reason=finish_reason, token_ids=(token_id,), logprobs=logprobs)
        self._drop(entry)

    def _hold(self, entry: _Entry, token_id: int, logprobs: tuple[TokenLogprob, ...] | None) -> None:
        """Leg 1 has its first token: keep the blocks, give the token out."""
        sequence = entry.sequence
        self.scheduler.remove(sequence, SequenceStatus.HELD)
        state = {"seed": sequence.seed, "position": sequence.num_tokens}
        self._call_hook(entry, lambda hooks: hooks.on_prefill_finished(sequence.request_id, token_id, state))
        self._end(entry, finish_reason=None, token_ids=(token_id,), logprobs=logprobs)
        if self.hooks is None:
            self._drop(entry)  # nobody could ever pull or release it

    def _finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        sampling, num_output = sequence.sampling, len(sequence.output_token_ids)
        if num_output >= sampling.min_tokens:
            is_eos = token_id in self._loaded.eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return "stop"
        if num_output >= sampling.max_tokens or sequence.num_tokens >= self._loaded.facts.max_model_length:
            return "length"
        return None

    def _end(
        self,
        entry: _Entry,
        *,
        finish_reason: str | None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> None:
        """Give the last output, once."""
        if entry.is_over:
            return
        entry.is_over = True
        sequence = entry.sequence
        sequence.finished_s = self._clock()
        if entry.reservation is not None and not entry.reservation.done():
            entry.reservation.cancel()
        self._emit(
            entry,
            EngineOutput(
                request_id=sequence.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                error=error,
                timings=timings_of(sequence),
            ),
        )

    def _drop(self, entry: _Entry) -> None:
        """Free the blocks and forget the sequence."""
        if self._entries.pop(entry.sequence.request_id, None) is not None:
            self.scheduler.remove(entry.sequence, SequenceStatus.FINISHED)

    def _emit(self, entry: _Entry, output: EngineOutput) -> None:
        try:
            entry.on_output(output)
        except Exception:  # somebody else's callback must not end the engine
            logger.exception("the receiver of request %s failed", output.request_id)

    def _call_hook(self, entry: _Entry, call: Callable[[TransferHooks], None]) -> None:
        if self.hooks is None:
            return
        try:
            call(self.hooks)
        except Exception:  # the transfer side must not end the engine; leg 2 recomputes
            logger.exception("the transfer side failed on request %s", entry.sequence.request_id)


def _to_sequence(request: EngineRequest, arrival_s: float, *, awaits_remote: bool) -> Sequence:
    seed = request.seed if request.seed is not None else request.sampling.seed
    return Sequence(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling=request.sampling,
        seed=seed if seed is not None else _seed_of(request.request_id),
        kind=request.kind,
        priority=request.priority,
        slo_class=request.slo_class,
        num_emitted_tokens=len(request.output_token_ids),
        awaits_remote=awaits_remote,
        arrival_s=arrival_s,
    )


def _seed_of(request_id: str) -> int:
    """Both legs of a request without a seed draw the same noise: they share the id."""
    return int.from_bytes(request_id.encode()[-8:].rjust(8, b"\0"), "little") >> 1


def _error_output(request_id: str, message: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason="error", error=message, timings=RequestTimings())
