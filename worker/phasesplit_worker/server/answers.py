"""Answers in OpenAI's format: chunks, whole bodies, usage, log probabilities. Pure values.

Knows the wire format of both endpoints; knows neither tokenizer nor engine nor HTTP.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasesplit.api.legs import FIELD_TOKEN_IDS

Json = dict[str, Any]


@dataclass(frozen=True)
class TokenText:
    """One token with its text, for log probabilities."""

    text: str
    raw: bytes


@dataclass(frozen=True)
class LogprobEntry:
    """Log probability of one emitted token with its alternatives, best first."""

    token: TokenText
    logprob: float
    text_offset: int
    top: tuple[tuple[TokenText, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a request so far; replayed tokens and leg 1's token count as output."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0

    def to_json(self) -> Json:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass
class CollectedAnswer:
    """What a non-streaming answer is made of."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)


def _completion_logprobs(entries: Iterable[LogprobEntry]) -> Json:
    items = list(entries)
    return {
        "tokens": [item.token.text for item in items],
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{token.text: value for token, value in item.top} for item in items],
        "text_offset": [item.text_offset for item in items],
    }


def _chat_logprobs(entries: Iterable[LogprobEntry]) -> Json:
    def one(token: TokenText, logprob: float) -> Json:
        return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}

    content = [
        one(item.token, item.logprob) | {"top_logprobs": [one(token, value) for token, value in item.top]}
        for item in entries
    ]
    return {"content": content, "refusal": None}


@dataclass(frozen=True)
class AnswerFormat:
    """Format of one endpoint's answers for one request."""

    request_id: str
    model: str
    created: int  # unix seconds
    is_chat: bool
    wants_logprobs: bool = False
    includes_usage: bool = False  # then every chunk has `usage`, null but in the last
    includes_token_ids: bool = False  # the caller is a router

    @property
    def answer_id(self) -> str:
        """`id` of every chunk and body; both legs of a request share it."""
        return ("chatcmpl-" if self.is_chat else "cmpl-") + self.request_id

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> Json | None:
        if not self.wants_logprobs or not entries:
            return None
        return _chat_logprobs(entries) if self.is_chat else _completion_logprobs(entries)

    def _chunk(self, choice: Json, token_ids: Sequence[int]) -> Json:
        if self.includes_token_ids:
            choice[FIELD_TOKEN_IDS] = list(token_ids)
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion", [choice])
        return chunk | {"usage": None} if self.includes_usage else chunk

    def role_chunk(self) -> Json:
        """The first chunk of a streamed chat: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}, ())

    def text_chunk(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[LogprobEntry] = (),
        finish_reason: str | None = None,
    ) -> Json:
        """New text; with a finish reason only where one chunk must carry both (leg 1)."""
        body: Json = {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0} | body | {"logprobs": self._logprobs(logprobs), "finish_reason": finish_reason}
        return self._chunk(choice, token_ids)

    def finish_chunk(self, finish_reason: str) -> Json:
        """Why the answer ends."""
        body: Json = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk({"index": 0} | body | {"logprobs": None, "finish_reason": finish_reason}, ())

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk that `stream_options.include_usage` asks for."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._head(kind, []) | {"usage": usage.to_json()}

    def whole(self, answer: CollectedAnswer, usage: Usage) -> Json:
        """The body of a non-streaming answer."""
        body: Json = (
            {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            if self.is_chat
            else {"text": answer.text}
        )
        tail = {"logprobs": self._logprobs(answer.logprobs), "finish_reason": answer.finish_reason}
        choice: Json = {"index": 0} | body | tail
        if self.includes_token_ids:
            choice[FIELD_TOKEN_IDS] = answer.token_ids
        return self._head("chat.completion" if self.is_chat else "text_completion", [choice]) | {
            "usage": usage.to_json()
        }


def models_body(model: str, created: int, max_model_length: int) -> Json:
    """`GET /v1/models`."""
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "phasesplit",
        "max_model_len": max_model_length,
    }
    return {"object": "list", "data": [entry]}
