"""Engine outputs of one leg as pieces of an answer: text, tokens, log probabilities, the end.

Enforces stop strings (the engine knows no text). Knows nothing of HTTP or of answer formats.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from phasesplit_http.errors import ApiError, unavailable
from phasesplit_worker.requests import EngineOutput, EngineRequest, RequestTimings, TokenLogprob
from phasesplit_worker.sequence import RequestKind
from phasesplit_worker.server.answers import LogprobEntry, TokenText
from phasesplit_worker.server.bridge import OutputQueue
from phasesplit_worker.server.errors import internal_error
from phasesplit_worker.server.ports import EngineApi, TokenizerApi

CANCELLED = "cancelled"


@dataclass(frozen=True)
class Piece:
    """What one engine output adds to the answer. The last piece has a finish reason."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    finish_reason: str | None = None


def _token_text(tokenizer: TokenizerApi, token_id: int) -> TokenText:
    raw = tokenizer.token_bytes(token_id)
    return TokenText(raw.decode("utf-8", "replace"), raw)


class Generation:
    """The answer of one leg, piece by piece."""

    def __init__(
        self, request: EngineRequest, queue: OutputQueue, engine: EngineApi, tokenizer: TokenizerApi
    ) -> None:
        self._request = request
        self._queue = queue
        self._engine = engine
        self._tokenizer = tokenizer
        self._text = tokenizer.decoder(request.sampling.stop, request.sampling.min_tokens)
        self._num_chars = 0  # sent so far, by this leg or an earlier one
        self._last_token: int | None = None
        self.num_output_tokens = 0  # replayed and leg 1's tokens included
        self.timings = RequestTimings()
        self.is_finished = False  # the engine has ended the sequence
        for token_id in request.output_token_ids:
            self._append(token_id)
        # Set when the replayed tokens already are the whole answer.
        self.finish_reason = self._own_end()

    def _append(self, token_id: int) -> str:
        self.num_output_tokens += 1
        self._last_token = token_id
        text = self._text.append(token_id)
        self._num_chars += len(text)
        return text

    @property
    def _is_stopped(self) -> bool:
        return self._text.stop_reason is not None

    def _own_end(self) -> str | None:
        """Why the tokens so far are the whole answer, None when they are not."""
        sampling = self._request.sampling
        if self._is_stopped:
            return "stop"
        ends = () if sampling.ignore_eos else self._tokenizer.end_token_ids
        is_end_token = self._last_token in ends or self._last_token in sampling.stop_token_ids
        if is_end_token and self.num_output_tokens >= sampling.min_tokens:
            return "stop"
        return "length" if self.num_output_tokens >= sampling.max_tokens else None

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces up to the end; raises ApiError when the engine ended the request otherwise.

        Leg 1's piece with the first token already says whether this token ends the request.
        """
        while not self.is_finished:
            piece = self._take(await self._queue.next())
            if piece.text or piece.token_ids or piece.finish_reason:
                yield piece

    def _take(self, output: EngineOutput) -> Piece:
        for token_id in output.skipped_token_ids:
            self._append(token_id)
        was_finished = self.finish_reason is not None
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[LogprobEntry] = []
        for index, token_id in enumerate(output.token_ids):
            if self._is_stopped:
                break  # computed before the engine heard of the stop string
            offset = self._num_chars
            texts.append(self._append(token_id))
            token_ids.append(token_id)
            if output.logprobs is not None:
                logprobs.append(self._entry(output.logprobs[index], offset))
        self._update_end(output)
        is_end = self.finish_reason is not None and not was_finished
        if is_end:
            texts.append(self._text.flush())
        reason = self.finish_reason if is_end else None
        return Piece("".join(texts), tuple(token_ids), tuple(logprobs), reason)

    def _entry(self, item: TokenLogprob, offset: int) -> LogprobEntry:
        return LogprobEntry(
            token=_token_text(self._tokenizer, item.token_id),
            logprob=item.logprob,
            text_offset=offset,
            top=tuple((_token_text(self._tokenizer, token_id), value) for token_id, value in item.top),
        )

    def _update_end(self, output: EngineOutput) -> None:
        """Find out whether the answer ends, and tell the engine when it cannot know."""
        if output.timings is not None:  # the last one; of a leg 1 that hands over it has no reason
            self.is_finished, self.timings = True, output.timings
        if self.finish_reason is not None:
            return
        is_prefill = self._request.kind is RequestKind.PREFILL
        if self._is_stopped or (is_prefill and output.token_ids):
            self.finish_reason = self._own_end()
        if self._is_stopped or (is_prefill and self.finish_reason is not None):
            # Also frees KV that leg 1 would hold for a leg 2 that will not come.
            self._engine.abort(self._request.request_id, "stop")
        if self.finish_reason is None and output.finish_reason is not None:
            self._finish(output)

    def _finish(self, output: EngineOutput) -> None:
        if output.finish_reason == "error":
            raise end_error(output.error)
        if output.finish_reason in (CANCELLED, "abort"):
            raise unavailable("The request was cancelled before its end.", 1)
        self.finish_reason = output.finish_reason


def end_error(message: str | None) -> ApiError:
    """The engine failed this request."""
    return internal_error(f"The engine could not finish the request: {message or 'no reason given'}")
