"""What a plan would have done with a trace: event-driven, deterministic, both architectures.

Events are the ends of runs of equal steps (see `simulation_steps`), arrivals, ends of transfers and
failures. A sequence reserves KV room for its whole answer, so none is preempted; what does not fit
waits. Knows nothing of where the trace came from.
"""

import math
from heapq import heappop, heappush

from phasesplit.planner.performance import longest_prefill_step_s
from phasesplit.planner.simulation_steps import Law
from phasesplit.planner.simulation_types import (
    Outcome,
    Simulation,
    SimulationResult,
    SplitPlan,
)
from phasesplit.planner.simulation_worker import Prompt, Worker

_RUN, _JOIN, _FAILURE = range(3)
_FINISHED, _REJECTED = int(Outcome.FINISHED), int(Outcome.REJECTED)  # enum look-ups cost in the inner loop
Event = tuple[float, int, int, int, int]  # time, order, kind, subject, version or remaining tokens


def simulate(given: Simulation) -> SimulationResult:
    """Run a trace on a plan to its end."""
    return Simulator(given).run()


class Simulator:
    """All state of one run. Open to extension: `_handle` takes further kinds of events."""

    def __init__(self, given: Simulation) -> None:
        self._given = given
        self._trace = given.trace
        count = len(given.trace)
        nan = math.nan
        self._split = isinstance(given.plan, SplitPlan)
        self._workers = make_workers(given)
        plan = given.plan
        prefill = plan.prefill if isinstance(plan, SplitPlan) else plan.workers
        self._prefillers = list(range(prefill))
        self._decoders = list(range(prefill, plan.workers)) if self._split else self._prefillers
        self._links_free_at = [0.0] * plan.workers
        hardware = given.hardware
        self._wire_s_per_token = hardware.kv_bytes_per_token / hardware.link_bytes_per_s
        self._longest_prefill_s = longest_prefill_step_s(hardware.prefill_profile)
        self._first_at = [nan] * count
        self._targets = [-1] * count  # decode worker of each request
        self._events: list[Event] = []
        self._order = 0
        self._result = SimulationResult(
            classes=given.classes,
            class_indexes=[arrival.class_index for arrival in given.trace],
            ttft_s=[nan] * count,
            tpot_s=[nan] * count,
            second_token_gap_s=[nan] * count,
            transfer_s=[nan] * count,
            outcomes=[int(Outcome.UNFINISHED)] * count,
            workers=plan.workers,
            arrivals_s=[arrival.at_s for arrival in given.trace],
        )

    def run(self) -> SimulationResult:
        """Handle events until none is left."""
        for failure in self._given.failures:
            self._push(failure.at_s, _FAILURE, failure.worker, round(failure.down_s * 1e6))
        trace, result = self._trace, self._result
        index, count = 0, len(trace)
        events, workers = self._events, self._workers
        now, handled = 0.0, 0
        next_at = trace[0].at_s if count else math.inf
        while True:
            if events:
                # At one instant arrivals come before events.
                if next_at > events[0][0]:
                    now, _, kind, subject, detail = heappop(events)
                    handled += 1
                    if kind == _RUN:
                        if workers[subject].version == detail:
                            self._end_run(now, subject)
                    elif kind == _JOIN:
                        self._join(now, subject, detail)
                    else:
                        self._handle(now, kind, subject, detail)
                    continue
            elif index == count:
                break
            now = next_at
            self._arrive(now, index)
            index += 1
            next_at = trace[index].at_s if index < count else math.inf
        result.num_events = handled
        result.end_s = now
        return result

    def _handle(self, now: float, kind: int, subject: int, detail: int) -> None:
        """Every event that is neither a run nor a transfer."""
        if kind == _FAILURE:
            self._fail(now, subject, detail / 1e6)

    def _push(self, at_s: float, kind: int, subject: int, detail: int) -> None:
        self._order += 1
        heappush(self._events, (at_s, self._order, kind, subject, detail))

    def _arrive(self, now: float, index: int) -> None:
        arrival = self._trace[index]
        target = self._given.classes[arrival.class_index]
        cached = arrival.cached_tokens
        tokens = arrival.prompt_tokens - cached
        tokens = max(tokens, 1)
        chosen = self._least_queued(now)
        if chosen is None or (
            self._given.admission and would_miss(self._workers[chosen], tokens, target.ttft_s)
        ):
            self._result.outcomes[index] = _REJECTED
            return
        prompt = Prompt(-target.priority, index, index, tokens, cached, arrival.output_tokens - 1)
        self._send(now, chosen, prompt)

    def _send(self, now: float, chosen: int, prompt: Prompt) -> None:
        worker = self._workers[chosen]
        worker.enqueue(prompt)
        if not worker.busy:
            self._begin(now, chosen, [])
        elif worker.interrupt(now):
            self._push(worker.run_end, _RUN, chosen, worker.version)

    def _least_queued(self, now: float) -> int | None:
        """The worker with the fewest prompt tokens before a new one, then the fewest sequences."""
        workers = self._workers
        best: int | None = None
        best_tokens, best_size = 0, 0
        for index in self._prefillers:
            worker = workers[index]
            tokens = worker.queued_tokens
            if worker.down_until > now or (best is not None and tokens > best_tokens):
                continue
            size = worker.size + len(worker.waiting)
            if best is None or tokens < best_tokens or size < best_size:
                best, best_tokens, best_size = index, tokens, size
        return best

    def _least_loaded(self, now: float) -> int | None:
        best: int | None = None
        least = 0
        for index in self._decoders:
            worker = self._workers[index]
            size = worker.size + len(worker.waiting) + worker.coming
            if worker.down_until <= now and (best is None or size < least):
                best, least = index, size
        return best

    def _begin(self, now: float, index: int, joined: list[int]) -> None:
        """Start the next run; requests that join the batch see their second token after its first step."""
        worker = self._workers[index]
        if worker.begin(now):
            self._order += 1
            heappush(self._events, (worker.run_end, self._order, _RUN, index, worker.version))
            if joined:
                gaps, second_at = self._result.second_token_gap_s, now + worker.first_step_s()
                for request in joined:
                    if gaps[request] != gaps[request]:  # NaN: not yet known
                        gaps[request] = second_at - self._first_at[request]

    def _end_run(self, now: float, index: int) -> None:
        worker = self._workers[index]
        if worker.run_prefill:
            firsts, done = worker.finish_run()
            for prompt in firsts:
                self._first_token(now, worker, prompt)
        else:
            done = worker.finish_run()[1]
        for request in done:
            self._finish(now, request)
        self._begin(now, index, worker.admit() if worker.waiting else [])

    def _first_token(self, now: float, worker: Worker, prompt: Prompt) -> None:
        request = prompt.request
        first_at = self._first_at
        if first_at[request] != first_at[request]:  # NaN: this is the first
            first_at[request] = now
            self._result.ttft_s[request] = now - self._trace[request].at_s
        if prompt.remaining <= 0:
            self._finish(now, request)
        elif self._split:
            self._transfer(now, worker, prompt)
        else:
            worker.waiting.append((request, prompt.cached + prompt.tokens + 1, prompt.remaining))

    def _transfer(self, now: float, worker: Worker, prompt: Prompt) -> None:
        """Pull chunk by chunk: what could not be moved during the prefill is still to come."""
        target = self._least_loaded(now)
        if target is None:
            return  # nobody can decode; the request stays unfinished and counts as a miss
        law, tokens = worker.law, prompt.tokens
        whole_s = (prompt.cached + tokens) * self._wire_s_per_token
        chunk = law.chunk_within(self._longest_prefill_s, (prompt.cached + tokens) / 2, 0, 0.0)
        steps = -(-tokens // chunk)
        begins_at = self._links_free_at[target]
        if begins_at < now:
            since_first_s = 0.0
            if steps > 1:
                since_first_s = law.run_s(steps, tokens / steps, prompt.cached, 0, 0.0) * (1 - 1 / steps)
            begins_at = max(now - since_first_s, begins_at)
        ends_at = max(now + whole_s / steps, begins_at + whole_s)
        self._result.transfer_s[prompt.request] = ends_at + self._given.transfer_latency_s - now
        self._links_free_at[target] = begins_at + whole_s
        self._targets[prompt.request] = target
        self._workers[target].coming += 1
        self._push(ends_at + self._given.transfer_latency_s, _JOIN, prompt.request, prompt.remaining)

    def _join(self, now: float, request: int, remaining: int) -> None:
        """The KV has arrived: decode from the next step boundary on."""
        index = self._targets[request]
        worker = self._workers[index]
        worker.coming -= 1
        if worker.down_until > now:
            self._replay(now, request, remaining)
            return
        arrival = self._trace[request]
        context = arrival.prompt_tokens + arrival.output_tokens - remaining
        worker.waiting.append((request, context, remaining))
        if not worker.busy:
            self._begin(now, index, worker.admit())
        elif worker.has_room(context, remaining) and worker.interrupt(now):
            self._push(worker.run_end, _RUN, index, worker.version)

    def _finish(self, now: float, request: int) -> None:
        steps = self._trace[request].output_tokens - 1
        self._result.tpot_s[request] = (now - self._first_at[request]) / steps if steps > 0 else 0.0
        self._result.outcomes[request] = _FINISHED

    def _fail(self, now: float, index: int, down_s: float) -> None:
        worker = self._workers[index]
        worker.down_until = now + down_s
        for request, remaining in worker.lose_everything():
            self._replay(now, request, remaining)

    def _replay(self, now: float, request: int, remaining: int) -> None:
        """Another worker recomputes prompt and answer so far; its prefill yields the next token."""
        chosen = self._least_queued(now)
        if chosen is None:
            return
        arrival = self._trace[request]
        tokens = arrival.prompt_tokens + arrival.output_tokens - remaining
        rank = -self._given.classes[arrival.class_index].priority
        self._result.num_replays += 1
        self._send(now, chosen, Prompt(rank, request, request, tokens, 0, remaining - 1))


def make_workers(given: Simulation) -> list[Worker]:
    """Workers of a plan, prefill before decode."""
    plan, hardware = given.plan, given.hardware
    room = hardware.kv_tokens_per_worker
    decode = Law(hardware.decode_profile)
    if isinstance(plan, SplitPlan):
        prefill = Law(hardware.prefill_profile)
        longest_s = longest_prefill_step_s(hardware.prefill_profile)
        phases = [(prefill, 1 << 30)] * plan.prefill + [(decode, given.max_num_seqs)] * plan.decode
        return [
            Worker(law, chunk=None, budget_s=longest_s, max_num_seqs=most, kv_room=room)
            for law, most in phases
        ]
    budget_s = plan.step_budget_s or min(item.tpot_s for item in given.classes)
    return [
        Worker(
            decode,
            chunk=plan.chunk_tokens,
            budget_s=budget_s,
            max_num_seqs=given.max_num_seqs,
            kv_room=room,
        )
        for _ in range(plan.workers)
    ]


def would_miss(worker: Worker, tokens: int, ttft_s: float) -> bool:
    """Would waiting for the queue make a request late that alone would be in time?"""
    law = worker.law
    chunk = worker.chunk or law.chunk_within(worker.budget_s, 0, worker.size, worker.contexts)
    step = law.step_s(chunk, chunk * tokens / 2, worker.size, worker.contexts)
    alone_s = max(1.0, tokens / chunk) * step
    return alone_s <= ttft_s < alone_s + worker.queued_tokens / chunk * step
