"""What clients may send: request bodies of the OpenAI API, checked field by field.

Knows the API and its bounds; knows neither tokenizer nor engine. Unknown fields are refused, as
OpenAI does, so that a misspelt parameter is never silently without effect.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from phasesplit.api.legs import FIELD_INTERNAL, FIELD_TRANSFER, InternalParams, KVTransferParams
from phasesplit_http.errors import ApiError, bad_request

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 4096

# Accepted because clients send them by default; they change nothing about the answer's text.
_HARMLESS_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)

ModelT = TypeVar("ModelT", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, has no effect


class _Sampling(_Body):
    """Fields that both endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_STRINGS)] = []
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int) -> int:
        if value != 1:
            raise ValueError("only n = 1 is supported; send one request per choice")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> None:
        if value:
            raise ValueError("logit_bias is not supported; leave it out")

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        for text in texts:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise ValueError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "_Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Does the client want a usage chunk?"""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool = False
    best_of: int = 1
    suffix: str | None = None

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, value: bool) -> bool:
        if value:
            raise ValueError("echo is not supported; the prompt is known to the client")
        return value

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int) -> int:
        if value != 1:
            raise ValueError("only best_of = 1 is supported")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("suffix is not supported; leave it out")
        return value

    def one_prompt(self) -> str | list[int]:
        """The single prompt: text, or token ids."""
        prompt = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or _are_token_ids(prompt) else prompt
        if len(prompts) > 1:
            raise bad_request("prompt: one per request is supported; send one request each.", "prompt")
        if not prompts or not prompts[0]:
            raise bad_request("prompt: it is empty; send at least one token of text.", "prompt")
        return cast("str | list[int]", prompts[0])


def _are_token_ids(prompt: Sequence[object]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


class ContentPart(BaseModel):
    """One part of a message's content; only text is supported."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat. Fields that a text template does not use are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    @field_validator("tool_calls")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> None:
        if value:
            raise ValueError("tool calls are not supported; send their text as content")

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        content = (
            self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        )
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message | ({"name": self.name} if self.name else {})


class ChatBody(_Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> None:
        if value:
            raise ValueError("tools are not supported; leave the field out")

    @field_validator("tool_choice")
    @classmethod
    def _no_tool_choice(cls, value: object) -> object:
        if value not in (None, "none", "auto"):
            raise ValueError("tools are not supported; leave tool_choice out")
        return value

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError("only response_format {'type': 'text'} is supported")
        return value

    @field_validator("modalities")
    @classmethod
    def _text_modality(cls, value: list[str] | None) -> list[str] | None:
        if value not in (None, ["text"]):
            raise ValueError("only the modality 'text' is supported")
        return value

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _sentence(field: str, problem: str) -> str:
    text = problem.removeprefix("Value error, ").rstrip(".")
    if not field or text.startswith(f"{field}:"):
        return f"{text}."
    return f"{field}: {text[:1].lower()}{text[1:]}."


def _is_union_label(part: str | int) -> bool:
    """pydantic puts the tried type of a union into the path of a problem."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def validation_error(error: ValidationError) -> ApiError:
    """The first problem of a body as a 400 that names the field."""
    # Of a union the deepest problem says most, e.g. the part of a message that is not text.
    first = max(error.errors(include_url=False, include_context=False), key=lambda item: len(item["loc"]))
    shallow = error.errors(include_url=False, include_context=False)[0]
    problem = first if first["loc"][:1] == shallow["loc"][:1] else shallow
    path = [str(part) for part in problem["loc"] if not _is_union_label(part)]
    field = ".".join(path)
    if problem["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {field}.", field)
    if not field and ":" in problem["msg"]:
        field = problem["msg"].removeprefix("Value error, ").split(":", 1)[0]
    return bad_request(_sentence(field, problem["msg"]), field or None)


def parse_body(model: type[ModelT], body: Mapping[str, object]) -> ModelT:
    """Check a body; null fields mean "not sent", harmless ones are dropped."""
    fields = {key: value for key, value in body.items() if value is not None and key not in _HARMLESS_FIELDS}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from error


def split_internal(
    body: dict[str, object], is_router: bool
) -> tuple[dict[str, object], KVTransferParams | None, InternalParams]:
    """Take the fields between router and worker off a body; anybody else sending them gets a 400."""
    public = {key: value for key, value in body.items() if key not in (FIELD_TRANSFER, FIELD_INTERNAL)}
    if len(public) != len(body) and not is_router:
        name = FIELD_TRANSFER if FIELD_TRANSFER in body else FIELD_INTERNAL
        raise bad_request(f"{name}: this field is reserved for the router; leave it out.", name)
    transfer, internal = body.get(FIELD_TRANSFER), body.get(FIELD_INTERNAL)
    try:
        return (
            public,
            None if transfer is None else KVTransferParams.model_validate(transfer),
            InternalParams() if internal is None else InternalParams.model_validate(internal),
        )
    except ValidationError as error:
        raise validation_error(error) from error
