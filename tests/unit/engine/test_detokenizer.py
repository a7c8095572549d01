"""Text comes out whole, at once, never past a stop string, and as a function of the tokens alone."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_models import tiny_model_dir
from phasesplit_worker.engine.tokenizer import Detokenizer, Tokenizer
from phasesplit_worker.errors import ModelLoadError, RequestError


@functools.lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny_model_dir("llama"))


def pieces(token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer(), stop)
    return [*(detokenizer.append(token) for token in token_ids), detokenizer.flush()], detokenizer


@pytest.mark.parametrize(
    "text", ["The pool of workers.", "naïve café ☕ 日本語 👩‍🚀!", "  spaces \n\n lines\t", ""]
)
def test_any_text_survives_the_round_trip(text: str) -> None:
    token_ids = tokenizer().encode_text(text)
    parts, _ = pieces(token_ids)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=30))
def test_pieces_of_any_tokens_make_their_text(token_ids: list[int]) -> None:
    parts, _ = pieces(token_ids)
    assert "".join(parts) == tokenizer().decode(token_ids)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.integers(0, 30))
def test_a_decode_worker_continues_where_the_prefill_stopped(text: str, handover: int) -> None:
    token_ids = tokenizer().encode_text(text)
    whole, _ = pieces(token_ids, stop=("zz", "the end"))
    detokenizer = Detokenizer(tokenizer(), ("zz", "the end"))
    for token in token_ids[:handover]:
        detokenizer.append(token)
    rest = [*(detokenizer.append(token) for token in token_ids[handover:]), detokenizer.flush()]
    assert rest == whole[min(handover, len(token_ids)) :]


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one two three", ("three", "two"), "one ", "two"),
        ("one two three", ("wo th",), "one t", "wo th"),
        ("one two three", ("e t", "e two"), "on", "e two"),
        ("one two three", ("threefold",), "one two three", None),
        ("aaab", ("aab",), "a", "aab"),
        ("stop", ("stop",), "", "stop"),
        ("end", ("",), "end", None),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str, reason: str | None) -> None:
    parts, detokenizer = pieces(tokenizer().encode_text(text), stop)
    assert "".join(parts) == expected
    assert detokenizer.stop_reason == reason


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(tokenizer(), ("\n\nUser:",))
    out = "".join(detokenizer.append(token) for token in tokenizer().encode_text("fine\n\nUs"))
    assert out == "fine"
    assert detokenizer.flush() == "\n\nUs"


def test_stop_strings_wait_for_the_minimum() -> None:
    token_ids = tokenizer().encode_text("a b a b")
    detokenizer = Detokenizer(tokenizer(), ("b",), min_tokens=len(token_ids))
    text = "".join(detokenizer.append(token) for token in token_ids)
    assert text == "a b a " and detokenizer.stop_reason == "b"


def test_chat_is_rendered_by_the_template() -> None:
    token_ids = tokenizer().encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer().decode(token_ids, skip_special_tokens=False) == "<|user|>Hi<|end|><|assistant|>"
    assert tokenizer().decode(token_ids) == "Hi"


def test_messages_that_the_template_refuses_name_the_parameter() -> None:
    with pytest.raises(RequestError, match="unknown role") as caught:
        tokenizer().encode_chat([{"role": "tool", "content": "x"}])
    assert caught.value.parameter == "messages"


def test_a_missing_tokenizer_is_a_sentence(tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer.load(tmp_path)  # type: ignore[arg-type]
