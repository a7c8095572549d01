"""Bodies that no server can decode are the client's mistake: a 400 before engine and tokenizer."""

import json

import pytest

from helpers_worker_server import MODEL

HALF = "\ud83d"  # the first half of an emoji, as from a client that cuts text in the middle of one
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
HALVES = {
    "text": ("/v1/completions", {"model": MODEL, "prompt": f"x{HALF}"}, "prompt"),
    "list": ("/v1/completions", {"model": MODEL, "prompt": [HALF]}, "prompt"),
    "stop": ("/v1/completions", {"model": MODEL, "prompt": "x", "stop": [HALF]}, "stop"),
    "model": ("/v1/completions", {"model": HALF, "prompt": "x"}, "model"),
    "content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, "messages"),
    "part": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        "messages",
    ),
    "name": ("/v1/chat/completions", CHAT | {HALF: 1}, None),
    "deep": ("/v1/chat/completions", CHAT | {"metadata": {"a": [{"b": HALF}]}}, "metadata"),
}


@pytest.mark.parametrize("case", HALVES)
async def test_half_a_character_is_refused_wherever_it_stands(served, case: str) -> None:
    path, body, param = HALVES[case]
    for raw in (
        json.dumps(body).encode(),
        json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
    ):
        async with served.session.post(served.url + path, data=raw) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["param"] == param
            assert "surrogate pair" in error["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_compressed_as_it_says_is_a_400(served, encoding: str, caplog) -> None:
    headers = {"Content-Encoding": encoding}
    async with served.session.post(
        served.url + "/v1/completions", data=b"no such thing" * 9, headers=headers
    ) as response:
        assert response.status == 400
        assert "cannot be decoded" in (await response.json())["error"]["message"]
    assert "unexpected error" not in caplog.text


LONG = {
    "unknown field": {"x" * 500_000: 1},
    "model": {"model": "m" * 500_000},
    "wrong value": {"max_tokens": "9" * 500_000},
    "token": {"prompt": [10**4000]},
}


@pytest.mark.parametrize("case", LONG)
async def test_an_error_never_sends_a_long_value_back(served, case: str) -> None:
    body = {"model": MODEL, "prompt": "x"} | LONG[case]
    async with served.session.post(served.url + "/v1/completions", json=body) as response:
        assert 400 <= response.status < 500
        assert len(await response.read()) < 3000
