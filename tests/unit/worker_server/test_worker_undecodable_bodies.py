"""Bodies that no server can decode, or only at a price: a 400 before the engine, or a turn in a queue."""

import asyncio
import json
import threading
import time

import pytest

from helpers_worker_server import MODEL
from phasesplit_worker.server.prepare import MAX_LONG_TEXTS

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


async def test_long_texts_become_tokens_few_at_a_time(served, monkeypatch) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def encode(text: str) -> list[int]:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.05)
        with lock:
            running -= 1
        return [1, 2, 3]

    monkeypatch.setattr(served.worker.ready_parts().tokenizer, "encode", encode)

    async def ask() -> int:
        body = {"model": MODEL, "prompt": "x" * 5000, "max_tokens": 1}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            return response.status

    statuses = await asyncio.gather(*(ask() for _ in range(8)))
    assert set(statuses) <= {200, 429}
    assert 1 <= most <= MAX_LONG_TEXTS
