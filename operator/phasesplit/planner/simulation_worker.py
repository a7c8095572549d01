"""One simulated worker: a queue of prompts and a batch that decodes, advanced run by run.

A run is a number of equal steps between two changes of the batch. The worker knows its own steps and
KV room; who sends it work and what becomes of its results is the simulator's business.
"""

from heapq import heappop, heappush
from typing import NamedTuple

from phasesplit.planner.simulation_steps import Law


class Prompt(NamedTuple):
    """A prompt in a worker's queue; ordered by priority, then by arrival."""

    rank: float  # minus priority
    order: int
    request: int  # index in the trace
    tokens: int  # to compute
    cached: int
    remaining: int  # tokens to decode after the first


Finished = tuple[list[Prompt], list[int]]


class Worker:
    """Queue, batch and the run in progress."""

    __slots__ = (
        "batch_heap",
        "budget_s",
        "chunk",
        "coming",
        "contexts",
        "down_until",
        "ending",
        "head",
        "head_done",
        "joined",
        "kv_room",
        "law",
        "max_num_seqs",
        "queue",
        "queued_tokens",
        "reserved",
        "run_end",
        "run_full",
        "run_prefill",
        "run_start",
        "run_steps",
        "size",
        "steps",
        "version",
        "waiting",
    )

    def __init__(
        self, law: Law, *, chunk: int | None, budget_s: float, max_num_seqs: int, kv_room: float
    ) -> None:
        self.law = law
        self.chunk = chunk
        self.budget_s = budget_s
        self.max_num_seqs = max_num_seqs
        self.kv_room = kv_room
        self.queue: list[Prompt] = []
        self.queued_tokens = 0
        self.head: Prompt | None = None
        self.head_done = 0
        self.ending: list[Prompt] = []  # prompts that the step in progress completes
        # Sequences that decode: (step after which the last token is out, request, context at step 0).
        self.batch_heap: list[tuple[float, int, float]] = []
        self.joined: dict[int, int] = {}  # request -> KV tokens reserved
        self.size = 0
        self.contexts = 0.0  # sum of contexts at the present step
        self.reserved = 0  # KV tokens promised to the sequences that decode
        self.steps = 0.0  # steps done so far
        self.waiting: list[tuple[int, int, int]] = []  # to decode: (request, context, remaining)
        self.coming = 0  # sequences whose KV is on its way
        self.run_start = 0.0
        self.run_end = 0.0
        self.run_steps = 0.0
        self.run_prefill = 0  # chunk tokens of each step of the run
        self.run_full = True  # False: a step that ends a prompt and may take several of them
        self.version = 0
        self.down_until = 0.0

    @property
    def busy(self) -> bool:
        """Is a run in progress?"""
        return self.run_steps > 0

    def enqueue(self, prompt: Prompt) -> None:
        """Add a prompt to the queue."""
        heappush(self.queue, prompt)
        self.queued_tokens += prompt.tokens

    def has_room(self, context: int, remaining: int) -> bool:
        """May one more sequence decode? The first always may."""
        return not self.size or (
            self.size < self.max_num_seqs and self.reserved + context + remaining <= self.kv_room
        )

    def admit(self) -> list[int]:
        """Waiting sequences for which there is room start to decode, in order. Only between two runs."""
        admitted = []
        for request, context, remaining in self.waiting:
            if not self.has_room(context, remaining):
                break
            self.size += 1
            self.contexts += context
            self.reserved += context + remaining
            self.joined[request] = context + remaining
            heappush(self.batch_heap, (self.steps + remaining, request, context - self.steps))
            admitted.append(request)
        del self.waiting[: len(admitted)]
        return admitted

    def interrupt(self, now: float) -> bool:
        """End a run of decode alone at the step boundary at or after `now`. True if its end moved."""
        if not self.run_steps or self.run_prefill:
            return False
        steps = self.law.steps_until(now - self.run_start, self.size, self.contexts)
        steps = max(1.0, steps)
        if steps >= self.run_steps:
            return False
        self.run_steps = steps
        self.run_end = self.run_start + self.law.decode_s(steps, self.size, self.contexts)
        self.version += 1
        return True

    def begin(self, now: float) -> bool:
        """Start the next run; False when there is nothing to do."""
        head = self.head
        if head is None and self.queue:
            self.head = head = heappop(self.queue)
            self.head_done = 0
        self.run_start = now
        self.version += 1
        size = self.size
        # A prompt whose answer would find no place in the batch waits.
        if head is not None and (not size or size + len(self.waiting) < self.max_num_seqs):
            self._begin_mixed(now, head)
            return True
        if size:
            steps = self.batch_heap[0][0] - self.steps
            self.run_steps, self.run_prefill = steps, 0
            self.run_end = now + self.law.decode_s(steps, size, self.contexts)
            return True
        self.run_steps = 0.0
        return False

    def first_step_s(self) -> float:
        """The first step of the run just begun."""
        if self.run_steps <= 1:
            return self.run_end - self.run_start
        before = self.head.cached + self.head_done if self.head is not None and self.run_prefill else 0
        return self.law.run_s(1, self.run_prefill, before, self.size, self.contexts)

    def _begin_mixed(self, now: float, head: Prompt) -> None:
        before = head.cached + self.head_done
        rest = head.tokens - self.head_done
        chunk = self.chunk or self.law.chunk_through(self.budget_s, before, rest, self.size, self.contexts)
        steps = float(rest // chunk)
        self.run_full, self.run_prefill = steps >= 1, chunk
        if not self.run_full:
            self.run_steps = 1.0
            self.run_end = now + self._allot_last_step(head, chunk)
            return
        if self.size:
            steps = min(steps, self.batch_heap[0][0] - self.steps)
        self.run_steps = steps
        self.run_end = now + self.law.run_s(steps, chunk, before, self.size, self.contexts)

    def _allot_last_step(self, head: Prompt, chunk: int) -> float:
        """A step that ends the head's prompt and fills the rest of the budget from the queue.

        What it carries is settled now: prompts that come while it runs wait for the next. Gives the
        step's duration.
        """
        done = self.head_done
        tokens = head.tokens - done
        if not self.queue:  # most often: nothing else to fill it
            self.ending, self.head, self.head_done = [head], None, 0
            self.queued_tokens -= tokens
            pairs = tokens * (head.cached + done + tokens / 2)
            return self.law.step_s(tokens, pairs, self.size, self.contexts)
        tokens, pairs, room = 0, 0.0, chunk
        self.ending = []
        following: Prompt | None = head
        while following is not None:
            part = min(room, following.tokens - done)
            pairs += part * (following.cached + done + part / 2)
            tokens, room, done = tokens + part, room - part, done + part
            if done < following.tokens:
                break
            self.ending.append(following)
            following, done = (heappop(self.queue) if self.queue and room else None), 0
        self.head, self.head_done = following, done
        self.queued_tokens -= tokens
        return self.law.step_s(tokens, pairs, self.size, self.contexts)

    def finish_run(self) -> Finished:
        """Account for the run in progress, which has reached its end.

        Gives the prompts whose last chunk is done, and the requests that have all their tokens.
        """
        steps = self.run_steps
        firsts = self._prefilled(steps) if self.run_prefill else []
        self.run_steps = 0.0
        done: list[int] = []
        if not self.size:
            self.steps += steps
            return firsts, done
        self.steps = reached = self.steps + steps
        self.contexts += steps * self.size
        heap, until = self.batch_heap, reached + 1e-9
        while heap and heap[0][0] <= until:
            _, request, offset = heappop(heap)
            self.reserved -= self.joined.pop(request)
            self.size -= 1
            self.contexts -= offset + reached
            done.append(request)
        if not heap:
            self.contexts = 0.0
        return firsts, done

    def _prefilled(self, steps: float) -> list[Prompt]:
        if not self.run_full:
            return self.ending
        head = self.head
        if head is None:
            return []
        tokens = int(steps) * self.run_prefill
        self.head_done += tokens
        self.queued_tokens -= tokens
        if self.head_done < head.tokens:
            return []
        self.head, self.head_done = None, 0
        return [head]

    def lose_everything(self) -> list[tuple[int, int]]:
        """The worker dies: (request, tokens still to come) of everything it held."""
        prompts = [*self.queue, *([self.head] if self.head is not None else [])]
        if self.run_steps and self.run_prefill and not self.run_full:
            prompts += self.ending
        lost = [(prompt.request, prompt.remaining + 1) for prompt in prompts]
        lost += [(request, max(1, round(end - self.steps))) for end, request, _ in self.batch_heap]
        lost += [(request, remaining) for request, _, remaining in self.waiting]
        self.queue, self.head, self.head_done, self.queued_tokens = [], None, 0, 0
        self.batch_heap, self.joined, self.waiting = [], {}, []
        self.size, self.reserved, self.contexts, self.run_steps = 0, 0, 0.0, 0.0
        self.version += 1
        return sorted(lost)
