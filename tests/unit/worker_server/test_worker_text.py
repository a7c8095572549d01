"""Text from tokens: stop strings, held-back text, and the rule that makes replay exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_worker_server import ByteDecoder
from phasesplit_worker.server.text import TextStream


def run(text: str, stops: tuple[str, ...], min_tokens: int = 0) -> tuple[str, bool]:
    stream = TextStream(ByteDecoder(), stops, min_tokens)
    out = []
    for byte in text.encode():
        emission = stream.append(byte)
        out.append(emission.text)
        if emission.is_stopped:
            return "".join(out), True
    return "".join(out) + stream.flush(), False


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world", (), ("hello world", False)),
        ("hello world", ("wor",), ("hello ", True)),
        ("hello wo", ("wor",), ("hello wo", False)),
        ("aaab", ("aab",), ("a", True)),
        ("abcabd", ("abd",), ("abc", True)),
        ("x\n\ny", ("\n\n",), ("x", True)),
        ("naïve café", ("é",), ("naïve caf", True)),
        ("one two", ("two", "one t"), ("", True)),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert run(text, stops) == expected


def test_a_stop_string_before_min_tokens_does_not_stop() -> None:
    assert run("a.b.c", (".",), min_tokens=3) == ("a.b", True)


@given(
    text=st.text(alphabet="abé\n", max_size=30),
    stops=st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_the_text_is_cut_at_the_first_stop_that_is_complete(text: str, stops: list[str]) -> None:
    emitted, is_stopped = run(text, tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (emitted, is_stopped) == (text, False)
    else:
        first = min(ends)
        cut = min(text.find(stop) for stop in stops if stop in text[:first])
        assert (emitted, is_stopped) == (text[:cut], True)


@given(
    text=st.text(alphabet="abé\n", max_size=20),
    stops=st.lists(st.text(alphabet="abé\n", min_size=2, max_size=4), max_size=2),
    cut=st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_what_is_emitted_depends_on_the_tokens_alone(text: str, stops: list[str], cut: int) -> None:
    tokens = text.encode()
    first, second = TextStream(ByteDecoder(), stops), TextStream(ByteDecoder(), stops)
    before = [first.append(token).text for token in tokens]
    after = [second.append(token).text for token in tokens]
    assert before == after
    assert first.flush() == second.flush()
    assert "".join(before[:cut]) + "".join(after[cut:]) == "".join(before)
