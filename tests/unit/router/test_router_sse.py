"""The parser of server-sent events: any cut of the bytes gives the same events."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasesplit_router.sse import MAX_EVENT_BYTES, SseError, SseParser, encode_event

STREAM = (
    b': a comment\n\ndata: {"a": 1}\n\ndata:{"b":2}\r\n\r\nevent: x\nid: 1\ndata: first\ndata: second\n\n'
    b"data: \xc3\xbc\xf0\x9f\x98\x80\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b":2}', b"first\nsecond", "ü😀".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    events = []
    for start, end in itertools.pairwise(edges):
        events += parser.feed(STREAM[start:end])
    assert events == EVENTS


@given(
    st.lists(
        st.binary(max_size=50).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=10
    ),
    st.integers(1, 7),
)
def test_what_is_encoded_comes_back(payloads: list[bytes], step: int) -> None:
    stream = b"".join(encode_event(payload) for payload in payloads)
    parser = SseParser()
    events = []
    for start in range(0, len(stream), step):
        events += parser.feed(stream[start : start + step])
    assert events == payloads


def test_an_unfinished_event_is_kept_back() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


def test_an_endless_line_is_refused() -> None:
    parser = SseParser()
    with pytest.raises(SseError):
        for _ in range(MAX_EVENT_BYTES // (1 << 20) + 1):
            parser.feed(b"x" * (1 << 20))
