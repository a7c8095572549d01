"""Which tokens each step computes. No phases: every sequence catches up with its known tokens.

Order of a step: running decodes, then prompts by (priority, already started, arrival). One budget
per step, in predicted seconds, plus a cap on prompt tokens. Priority is strict between classes;
within a class the order is arrival, so nothing starves. Knows no clock, no tensors, no text.
"""

from bisect import insort
from dataclasses import dataclass, field

from phasesplit.api.names import Role
from phasesplit.api.reports import StepProfile
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.scheduling.cost import StepLoad, largest_chunk, step_s
from phasesplit_worker.sequence import Sequence, SequenceStatus

# The first prompt of a step always gets this many tokens, so that it progresses under any budget.
MIN_CHUNK_TOKENS = 8
# A prefill step is at most this long, so that switch, cancel and overlapped transfer stay quick.
PREFILL_STEP_S = 0.25
# But where the fixed part of a step is long, short steps would do little else.
PREFILL_BASE_STEPS = 5.0
# Colocated steps without a known TPOT target.
DEFAULT_STEP_S = 0.25
# Tokens per step while the profile is only a guess, and the hard cap afterwards.
MAX_GUESSED_TOKENS = 256
MAX_STEP_TOKENS = 8192


@dataclass(frozen=True)
class StepLimits:
    """A role's profile of the one scheduler."""

    max_num_seqs: int
    max_step_s: float | None = None  # None: only the token cap counts
    max_prefill_tokens: int = MAX_STEP_TOKENS
    min_base_steps: float = 0.0  # a step may last this many times its fixed part, whatever max_step_s says

    @staticmethod
    def for_role(
        role: Role, max_num_seqs: int, max_batched_tokens: int | None, max_step_s: float | None
    ) -> "StepLimits":
        """Prefill: steps of at most 250 ms. Decode and colocated: so many seconds, or a chunk budget."""
        if role is Role.PREFILL:
            return StepLimits(max_num_seqs, PREFILL_STEP_S, min_base_steps=PREFILL_BASE_STEPS)
        if max_batched_tokens is not None:
            return StepLimits(max_num_seqs, None, max_batched_tokens)
        return StepLimits(max_num_seqs, max_step_s or DEFAULT_STEP_S)


@dataclass(frozen=True)
class StepPlan:
    """One step: sequences with the number of tokens each computes, in batch order."""

    scheduled: tuple[tuple[Sequence, int], ...]
    load: StepLoad
    predicted_s: float
    preempted: tuple[Sequence, ...] = ()
    reserved: tuple[Sequence, ...] = ()  # leg 2 sequences that got their blocks just now


@dataclass
class _Step:
    """A step while it is being planned."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)
    is_full: bool = False  # no prompt tokens fit any more

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule `num_tokens` of a sequence."""
        self.scheduled.append((sequence, num_tokens))
        self.load = _load_with(self.load, sequence, num_tokens)

    def drop(self, victim: Sequence) -> None:
        """Take a sequence that was preempted after it was scheduled out again."""
        kept = [(sequence, count) for sequence, count in self.scheduled if sequence is not victim]
        if len(kept) != len(self.scheduled):
            self.scheduled, self.load = [], StepLoad()
            for sequence, count in kept:
                self.add(sequence, count)


def _load_with(load: StepLoad, sequence: Sequence, num_tokens: int) -> StepLoad:
    if sequence.is_decoding:
        return load.with_decode(sequence.num_tokens)
    return load.with_chunk(num_tokens, sequence.num_computed_tokens)


def _order(sequence: Sequence) -> tuple[int, float, str]:
    """Who goes first: higher priority, then earlier arrival."""
    return (-sequence.priority, sequence.arrival_s, sequence.request_id)


class Scheduler:
    """Owns the queues; the engine thread owns it. Sequences change state only here and in the engine."""

    def __init__(self, blocks: BlockManager, limits: StepLimits, profile: StepProfile) -> None:
        self.blocks = blocks
        self.limits = limits
        self.profile = profile
        self.waiting: list[Sequence] = []  # in order
        self.running: list[Sequence] = []  # in order
        self.remote: list[Sequence] = []  # reserved, being filled by a transfer
        self.num_preemptions_total = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that holds no blocks."""
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=_order)

    def start_remote(self, sequence: Sequence) -> None:
        """A reserved sequence has its KV: let it run."""
        self.remote.remove(sequence)
        sequence.awaits_remote = False
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)

    def recompute(self, sequence: Sequence) -> None:
        """Give up on a remote KV: queue the sequence as if it had just arrived, in its old place."""
        self.remove(sequence, SequenceStatus.WAITING)
        sequence.awaits_remote = False
        sequence.num_computed_tokens = 0
        self.add(sequence)

    def remove(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a sequence out of its queue; its blocks are freed unless it is to be held."""
        for queue in (self.waiting, self.running, self.remote):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = status
        if status is not SequenceStatus.HELD:
            self.blocks.free(sequence)

    def has_work(self) -> bool:
        """Whether a step could compute something or hand out a reservation."""
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate what it needs."""
        step = _Step()
        self._schedule_decodes(step)
        self._schedule_prompts(step)
        return StepPlan(
            tuple(step.scheduled),
            step.load,
            step_s(self.profile, step.load),
            tuple(step.preempted),
            tuple(step.reserved),
        )

    def _schedule_decodes(self, step: _Step) -> None:
        for sequence in list(self.running):
            if not sequence.is_decoding or sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._make_room(sequence, step):
                step.add(sequence, 1)

    def _make_room(self, sequence: Sequence, step: _Step) -> bool:
        """Grow by one token, preempting the least important running sequence while blocks are short."""
        while not self.blocks.can_grow(sequence, sequence.num_tokens):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        self.blocks.grow(sequence, sequence.num_tokens)
        return True

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        self.running.remove(victim)
        step.drop(victim)
        self.blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions_total += 1
        self.add(victim)
        step.preempted.append(victim)

    def _schedule_prompts(self, step: _Step) -> None:
        for sequence in self._prompts_in_order(step):
            if sequence.status is SequenceStatus.WAITING:
                if sequence.awaits_remote:  # needs blocks but no time of this step
                    if not self._admit(sequence, step):
                        return
                    self._reserve(sequence, step)
                    continue
                if step.is_full:
                    continue
                if not self._admit(sequence, step):
                    return  # whoever comes first gets blocks first; those behind it wait
            elif step.is_full or sequence.status is not SequenceStatus.RUNNING:
                continue  # the latter: preempted for a more important prompt a moment ago
            num_tokens = self._chunk(sequence, step)
            if num_tokens:
                step.add(sequence, num_tokens)
            step.is_full = num_tokens < sequence.num_pending_tokens

    def _prompts_in_order(self, step: _Step) -> list[Sequence]:
        started = [sequence for sequence in self.running if not sequence.is_decoding]
        waiting = [sequence for sequence in self.waiting if sequence not in step.preempted]
        return sorted(
            started + waiting,
            key=lambda s: (-s.priority, s.status is SequenceStatus.WAITING, s.arrival_s, s.request_id),
        )

    def _chunk(self, sequence: Sequence, step: _Step) -> int:
        """Tokens of this prompt that fit the step; the first prompt always progresses."""
        limits, pending, start = self.limits, sequence.num_pending_tokens, sequence.num_computed_tokens
        cap = MAX_GUESSED_TOKENS if self.profile.guessed else MAX_STEP_TOKENS
        room = min(limits.max_prefill_tokens, cap) - step.load.prefill_tokens
        chunk = min(pending, max(room, 0))
        if limits.max_step_s is not None and not self.profile.guessed:
            longest_s = max(limits.max_step_s, limits.min_base_steps * self.profile.base_s)
            chunk = largest_chunk(self.profile, step.load, start, longest_s, chunk)
        if step.load.prefill_tokens == 0:
            chunk = max(chunk, min(MIN_CHUNK_TOKENS, pending))
        return self._align(chunk, pending, start, step)

    def _align(self, chunk: int, pending: int, num_computed_tokens: int, step: _Step) -> int:
        """End inner chunks on a block boundary where that costs little: whole blocks can be sent."""
        if chunk >= pending:
            return pending
        aligned = chunk - (num_computed_tokens + chunk) % self.blocks.block_size
        if aligned >= max(MIN_CHUNK_TOKENS, chunk // 2):
            return aligned
        return chunk if chunk >= MIN_CHUNK_TOKENS or step.load.prefill_tokens == 0 else 0

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        """Give a waiting sequence all blocks of its known tokens, preempting lower classes if need be."""
        # Leg 2 pulls what is not cached; everything else recomputes at least the last token.
        max_cached = sequence.num_tokens if sequence.awaits_remote else sequence.num_tokens - 1
        while not self._has_room(sequence, max_cached):
            if not self.running or self.running[-1].priority >= sequence.priority:
                return False
            self._preempt(self.running[-1], step)
        cached = self.blocks.admit(sequence, sequence.num_tokens, max_cached)
        sequence.num_computed_tokens = cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = cached
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)
        return True

    def _has_room(self, sequence: Sequence, max_cached_tokens: int) -> bool:
        if len(self.running) + len(self.remote) >= self.limits.max_num_seqs:
            return False
        spare_blocks = len(self.running)  # for the next token of those that run
        return self.blocks.can_admit(sequence, sequence.num_tokens, max_cached_tokens, spare_blocks)

    def _reserve(self, sequence: Sequence, step: _Step) -> None:
        self.running.remove(sequence)
        sequence.status = SequenceStatus.REMOTE
        self.remote.append(sequence)
        step.reserved.append(sequence)
