"""One request from admission to its last token: it is placed, attempted, and placed again when lost.

With tokens already sent the next attempt is a local leg that continues after them, so that the
client sees neither gap nor repeat. Knows queues and budgets; does not know legs or HTTP.
"""

import asyncio
import json
import time
from typing import Any

from phasesplit.api.routing import ServedMode
from phasesplit_http.errors import ApiError
from phasesplit_router import sse
from phasesplit_router.answers import usage_of
from phasesplit_router.attempt import Attempt, Progress, Services
from phasesplit_router.errors import LegError, LegRejectedError, lost
from phasesplit_router.fleet import Demand
from phasesplit_router.queues import Placement
from phasesplit_router.retry import MAX_RETRIES, backoff_s

NEW_PATIENCE_S = 1.0  # a new request waits this long for any worker at all
RETRY_PATIENCE_S = 60.0  # one that has begun waits for a pod to come back
LONGEST_QUEUE_S = 600.0


class Flow:
    """Serves one request."""

    def __init__(self, services: Services, progress: Progress) -> None:
        self._services = services
        self._progress = progress
        self._avoid: set[str] = set()
        self.pods = ""

    async def run(self) -> None:
        """Serve to the end. Raises `ApiError` or `LegRejectedError` when it cannot be served."""
        while True:
            placement = await self._place()
            try:
                await Attempt(self._services, self._progress, placement).run()
            except LegRejectedError as error:
                if self._progress.answer.num_chunks == 0:
                    raise
                failure: LegError = error
            except LegError as error:
                failure = error
            else:
                return
            finally:
                placement.release()
            if self._progress.answer.finish_reason is not None or await self._progress.finish_by_length():
                return
            await self._prepare_retry(failure)

    def demand(self) -> Demand:
        """What the next attempt needs."""
        request, sent = self._progress.request, len(self._progress.answer.token_ids)
        latency_class = request.latency_class
        return Demand(
            request_id=request.request_id,
            prompt_tokens=self._services.lengths.prompt_tokens(request.prompt_bytes) + sent,
            output_tokens=self._services.lengths.expected_output_tokens(request.max_tokens),
            ttft_s=latency_class.ttft_s,
            tpot_s=latency_class.tpot_s,
            priority=latency_class.priority,
            is_replay=sent > 0,
            fingerprint=self._progress.fingerprint,
            avoid=frozenset(self._avoid),
            mode=self._services.halves.mode(self._progress.record.drawn),
        )

    async def _place(self) -> Placement:
        record = self._progress.record
        placement, waits_s = await self._services.queues.place(
            self.demand(),
            deadline_s=record.arrival_s + self._progress.request.latency_class.ttft_s,
            patience_s=RETRY_PATIENCE_S if self._progress.num_attempts else NEW_PATIENCE_S,
            longest_s=LONGEST_QUEUE_S,
        )
        for phase, wait_s in waits_s.items():
            record.waits_s[phase] = record.waits_s.get(phase, 0.0) + wait_s
        if record.first_sent_s is None:
            record.mode, self.pods = placement.choice.mode, placement.pods
        reason = placement.choice.local_reason
        table = self._services.book.table
        if reason is not None and table is not None and table.mode is ServedMode.SPLIT:
            self._services.observer.local_prefill(str(reason))
        return placement

    async def _prepare_retry(self, failure: LegError) -> None:
        self._progress.num_attempts += 1
        self._avoid.add(failure.pod)
        now_s = time.monotonic()
        if worker := self._services.book.workers.get(failure.pod):
            worker.leg_failed(now_s)
            self._services.check(worker)
        sent = self._progress.answer.num_chunks
        if sent and not self._progress.answer.token_ids:
            raise lost(f"The answer broke off and cannot be continued: {failure}.")
        if self._progress.num_attempts > MAX_RETRIES:
            raise lost(
                f"{self._progress.num_attempts} attempts failed, the last one because of {failure}; "
                "retry later."
            )
        if sent:
            self._progress.record.num_migrations += 1
            self._services.observer.migrated()
        wait_s = self._services.retries.take(now_s) + backoff_s(
            self._progress.num_attempts, self._services.draw
        )
        await asyncio.sleep(wait_s)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` over all legs."""
        record = self._progress.record
        completion_tokens = self._progress.completion_tokens or record.num_tokens
        return usage_of(
            record.prompt_tokens, completion_tokens, min(record.cached_tokens, record.prompt_tokens)
        )

    def ending(self) -> bytes:
        """Last bytes of a stream that ended well."""
        answer = self._progress.answer
        end = answer.usage_chunk(self.usage()) if answer.include_usage else b""
        return end + sse.DONE_EVENT


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream, after which there is no `[DONE]`."""
    return sse.encode_event(json.dumps(error.body()).encode())
