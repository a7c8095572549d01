"""What the client gets: chunks without the router's own fields, whole answers, usage. Pure.

One object per request, fed with workers' chunks of any leg in order. It makes sure that a chat
stream has one role, one finish reason and one id, whatever the legs sent.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from phasesplit.api.legs import FIELD_TOKEN_IDS
from phasesplit_router.request import Endpoint

Json = dict[str, Any]


# One encoder for all chunks: `json.dumps` with separators would make one for each.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _dumps(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


@dataclass(slots=True)
class Answer:
    """The answer to one request so far."""

    endpoint: Endpoint
    request_id: str
    model: str
    created: int
    include_usage: bool
    keep_text: bool  # a whole answer or a trace needs it; a stream need not keep it
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_chunks: int = 0
    texts: list[str] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)
    _head: bytes = b""

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.endpoint is Endpoint.CHAT else "text_completion"
        self._head = _dumps(self._identity(kind))[:-1] + b',"choices":'

    def _identity(self, kind: str) -> Json:
        prefix = "chatcmpl-" if self.endpoint is Endpoint.CHAT else "cmpl-"
        return {
            "id": prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    @property
    def num_tokens(self) -> int:
        """Tokens so far; chunks where a worker sends no token ids."""
        return len(self.token_ids) or self.num_chunks

    @property
    def text(self) -> str:
        """All text so far, if it is kept."""
        return "".join(self.texts)

    def take(self, event: Json) -> Json | None:
        """Take one chunk in; the choice to send to the client, None if there is nothing new in it."""
        choices = event.get("choices")
        if not choices or self.finish_reason is not None:
            return None
        choice: Json = choices[0]
        token_ids = choice.pop(FIELD_TOKEN_IDS, None) or ()
        self.token_ids.extend(token_ids)
        self.finish_reason = choice.get("finish_reason")
        is_chat = self.endpoint is Endpoint.CHAT
        delta = choice.setdefault("delta", {}) if is_chat else choice
        if is_chat:
            delta.pop("role", None)
        text = delta.get("content" if is_chat else "text") or ""
        if not (text or token_ids or self.finish_reason or choice.get("logprobs")):
            return None
        if self.keep_text:
            if text:
                self.texts.append(text)
            if choice.get("logprobs"):
                self._logprobs.append(choice["logprobs"])
        choice["index"] = 0
        if is_chat and not self.num_chunks:
            choice["delta"] = {"role": "assistant", "content": "", **delta}
        self.num_chunks += 1
        return choice

    def chunk(self, choice: Json) -> bytes:
        """One choice as an event."""
        tail = b',"usage":null}\n\n' if self.include_usage else b"}\n\n"
        return b"data: " + self._head + b"[" + _dumps(choice) + b"]" + tail

    def usage_chunk(self, usage: Json) -> bytes:
        """The last chunk, when the client asked for usage."""
        return b"data: " + self._head + b'[],"usage":' + _dumps(usage) + b"}\n\n"

    def whole(self, usage: Json) -> bytes:
        """The body of a non-streaming answer."""
        is_chat = self.endpoint is Endpoint.CHAT
        choice: Json = {"index": 0}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            choice["text"] = self.text
        choice |= {"logprobs": _joined(self._logprobs), "finish_reason": self.finish_reason}
        kind = "chat.completion" if is_chat else "text_completion"
        return _dumps(self._identity(kind) | {"choices": [choice], "usage": usage})


def _joined(parts: list[Json]) -> Json | None:
    """Log probabilities of several chunks as one: every field is a list over tokens, or null."""
    if not parts:
        return None
    joined: Json = {}
    for part in parts:
        for name, values in part.items():
            if isinstance(values, list):
                joined[name] = [*(joined.get(name) or ()), *values]
            else:
                joined.setdefault(name, values)
    return joined


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """OpenAI's `usage`: the prompt counts once, however many legs read it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
