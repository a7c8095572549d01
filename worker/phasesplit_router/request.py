"""A client's request as a value: checked where the router must know, left alone elsewhere.

Knows the fields the router acts on; everything else is for the worker to judge. No I/O.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phasesplit.api.legs import FIELD_INTERNAL, FIELD_TRANSFER
from phasesplit.api.routing import LatencyClass, RoutingTable
from phasesplit_http.bodies import encode_json, json_object
from phasesplit_http.errors import ApiError, bad_request

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_MESSAGE_OVERHEAD_BYTES = 16  # what a chat template adds to one message, roughly
_TOKEN_BYTES = 4  # a prompt given as token ids


class Endpoint(StrEnum):
    """Which OpenAI endpoint was called."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client."""

    request_id: str  # in the client's answer
    leg_id: str  # at the workers, where several routers and repeated requests meet
    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    seed: int
    prompt_bytes: int
    latency_class: LatencyClass
    leg_body: bytes  # JSON object without its closing brace; legs add their own fields

    @property
    def path(self) -> str:
        """Path at the worker."""
        return "/v1/chat/completions" if self.endpoint is Endpoint.CHAT else "/v1/completions"


def clean_request_id(sent: str | None) -> str | None:
    """The client's own id when it is short and harmless, else None."""
    return sent if sent is not None and _REQUEST_ID.fullmatch(sent) else None


def find_class(table: RoutingTable, asked: str | None) -> LatencyClass:
    """The class asked for, or the first one. Raises a 400 that names the classes there are."""
    if not asked:
        return table.classes[0]
    for latency_class in table.classes:
        if latency_class.name == asked:
            return latency_class
    known = ", ".join(item.name for item in table.classes)
    raise bad_request(f"x-slo-class: there is no class {asked[:100]!r}; use one of: {known}.", "x-slo-class")


def parse_request(
    raw: bytes,
    endpoint: Endpoint,
    table: RoutingTable,
    *,
    request_id: str,
    leg_id: str,
    asked_class: str | None,
    random_seed: int,
) -> ClientRequest:
    """Check a body. Raises `ApiError` 400 or 404 with one sentence."""
    body = json_object(raw)
    for name in (FIELD_TRANSFER, FIELD_INTERNAL):
        if name in body:
            raise bad_request(f"{name}: this field is reserved for the router; leave it out.", name)
    model = _model(body, table)
    if body.get("n") not in (None, 1):
        # Cut: what was sent may be megabytes.
        raise bad_request(
            f"n: {repr(body['n'])[:40]} is not supported; send one request per choice (n = 1).", "n"
        )
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise bad_request(
            "stream_options: only allowed as an object and when stream is true.", "stream_options"
        )
    include_usage = bool(options) and _boolean(options or {}, "include_usage")
    max_tokens = _max_tokens(body)
    seed = body.get("seed")
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63
    ):
        raise bad_request("seed: it must be an integer of 64 bits.", "seed")
    prompt_bytes = _prompt_bytes(body, endpoint)
    leg = {key: value for key, value in body.items() if key not in {"stream", "stream_options"}}
    leg |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    return ClientRequest(
        request_id=request_id,
        leg_id=leg_id,
        endpoint=endpoint,
        model=model,
        stream=stream,
        include_usage=include_usage,
        max_tokens=max_tokens,
        seed=random_seed if seed is None else seed,
        prompt_bytes=prompt_bytes,
        latency_class=find_class(table, asked_class),
        leg_body=encode_json(leg)[:-1],
    )


def _model(body: dict[str, Any], table: RoutingTable) -> str:
    model = body.get("model", table.model)
    if not isinstance(model, str):
        raise bad_request("model: it must be a string.", "model")
    if model != table.model:
        raise ApiError(
            404,
            f"The model {model[:200]!r} does not exist here; this server serves {table.model!r}.",
            param="model",
            code="model_not_found",
        )
    return model


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name}: it must be true or false.", name)
    return bool(value)


def _max_tokens(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad_request(f"{name}: it must be an integer of at least 1.", name)
        return value
    return None


def _prompt_bytes(body: dict[str, Any], endpoint: Endpoint) -> int:
    """Bytes of the text the model will read, about."""
    if endpoint is Endpoint.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages: it must be a list with at least one message.", "messages")
        return sum(_message_bytes(message) for message in messages)
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return _TOKEN_BYTES * len(prompt)
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return len(prompt[0].encode("utf-8", "surrogatepass"))
        if len(prompt) == 1 and isinstance(prompt[0], list):
            return _TOKEN_BYTES * len(prompt[0])
        raise bad_request("prompt: one prompt per request is supported; send one request each.", "prompt")
    raise bad_request("prompt: it must be text or a list of token ids, not empty.", "prompt")


def _message_bytes(message: Any) -> int:
    if not isinstance(message, dict):
        raise bad_request("messages: every message must be an object with role and content.", "messages")
    content = message.get("content")
    if isinstance(content, str):
        return _MESSAGE_OVERHEAD_BYTES + len(content.encode("utf-8", "surrogatepass"))
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return _MESSAGE_OVERHEAD_BYTES + sum(
            len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str)
        )
    return _MESSAGE_OVERHEAD_BYTES
