"""What the engine keeps per request: the sequence and who waits for it."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from phasesplit_worker.engine.outcome import timings_of
from phasesplit_worker.requests import (
    EngineOutput,
    EngineRequest,
    OnOutput,
    RequestTimings,
    Reservation,
    TokenLogprob,
)
from phasesplit_worker.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Entry:
    """A sequence and who waits for it."""

    sequence: Sequence
    on_output: OnOutput
    reservation: Future[Reservation] | None = None
    is_over: bool = False  # the last output was given; only blocks may be left
    quarantined_until_s: float | None = None  # aborted while a transfer may write into its blocks

    def emit(self, output: EngineOutput) -> None:
        """Give an output to whoever waits."""
        try:
            self.on_output(output)
        except Exception:  # somebody else's callback must not end the engine
            logger.exception("the receiver of request %s failed", output.request_id)

    def end(
        self,
        now_s: float,
        *,
        finish_reason: str | None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> None:
        """Give the last output, once."""
        if self.is_over:
            return
        self.is_over = True
        self.sequence.finished_s = now_s
        if self.reservation is not None and not self.reservation.done():
            self.reservation.cancel()
        self.emit(
            EngineOutput(
                request_id=self.sequence.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                error=error,
                timings=timings_of(self.sequence),
            )
        )


def to_sequence(request: EngineRequest, arrival_s: float, *, awaits_remote: bool) -> Sequence:
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
        awaits_remote=awaits_remote,
        arrival_s=arrival_s,
    )


def _seed_of(request_id: str) -> int:
    """Both legs of a request without a seed draw the same noise: they share the id."""
    return int.from_bytes(request_id.encode()[-8:].rjust(8, b"\0"), "little") >> 1


def error_output(request_id: str, message: str) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason="error", error=message, timings=RequestTimings())
