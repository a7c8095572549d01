"""Text to tokens and back. `Detokenizer` is a deterministic function of the list of tokens.

Knows tokenizers, templates and stop strings. Does not know sequences or HTTP.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from phasesplit_worker.errors import ModelLoadError, RequestError

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe for encoding and decoding."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def load(directory: Path) -> "Tokenizer":
        """Read the tokenizer of a model directory; raises ModelLoadError."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise ModelLoadError(f"the tokenizer in {directory} cannot be loaded: {first}") from error
        return Tokenizer(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of plain text, with what the tokenizer puts in front by itself."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation rendered by the model's template; raises RequestError."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **dict(template_arguments or {}),
            )
        except Exception as error:  # templates are programs of the model's author: anything can come out
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise RequestError(f"the chat template refused these messages: {first}", "messages") from error
        return self.encode_text(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included; for logprobs."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int]:
        """UTF-8 bytes of `token_text`; for logprobs."""
        return list(self.token_text(token_id).encode())


class Detokenizer:
    """Text of a growing list of tokens, piece by piece.

    Never gives out an incomplete UTF-8 character, nor text that may turn out to be the beginning of
    a stop string. The concatenation of all pieces depends on the tokens alone, so a decode worker
    feeds the first token, drops its text, and continues exactly where prefill stopped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        # Tokens from `_window` on are decoded again and again; `_window_text` is what of their text
        # has been taken. Some tokens before the new ones stay in: they decide about spaces.
        self._window = 0
        self._read = 0
        self._window_text = ""
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self.stop_reason: str | None = None  # the stop string that was found

    @property
    def num_tokens(self) -> int:
        """Tokens fed so far."""
        return len(self._token_ids)

    def append(self, token_id: int) -> str:
        """New text that is certain after this token. Empty once a stop string was found."""
        if self.stop_reason is not None:
            return ""
        self._token_ids.append(token_id)
        return self._release(self._decode_new())

    def flush(self) -> str:
        """What was held back; call once, when the sequence has ended for another reason."""
        if self.stop_reason is not None:
            return ""
        rest = self._decode_window()[len(self._window_text) :]
        text = self._release(rest) + self._held
        self._held = ""
        return text

    def _decode_new(self) -> str:
        text = self._decode_window()
        if text.endswith(_REPLACEMENT):  # the bytes of a character that are still to come
            return ""
        new = text[len(self._window_text) :]
        if new:
            self._window, self._read = self._read, len(self._token_ids)
            self._window_text = self._decode_window()
        return new

    def _decode_window(self) -> str:
        return self._tokenizer.decode(
            self._token_ids[self._window :], skip_special_tokens=self._skip_special_tokens
        )

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        if len(self._token_ids) >= self._min_tokens:
            found = [(text.find(stop), stop) for stop in self._stop if stop in text]
            if found:
                position, self.stop_reason = min(found, key=lambda item: (item[0], -len(item[1])))
                self._held = ""
                return text[:position]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
