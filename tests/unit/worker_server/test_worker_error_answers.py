"""What bad input gets: OpenAI error bodies of the right status that name field and remedy."""

import asyncio

import pytest

from helpers_worker_server import MODEL, wait_until

PROMPT = {"model": MODEL, "prompt": "x"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

BAD_COMPLETIONS = {
    "n": ({"n": 2}, "n", "only n = 1"),
    "echo": ({"echo": True}, "echo", "not supported"),
    "best_of": ({"best_of": 3}, "best_of", "best_of = 1"),
    "suffix": ({"suffix": "s"}, "suffix", "not supported"),
    "logit bias": ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    "hot": ({"temperature": 3}, "temperature", "less than or equal to 2"),
    "text for a number": ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "top_p": ({"top_p": 0}, "top_p", "greater than 0"),
    "empty stop": ({"stop": ""}, "stop", "1 to 256 characters"),
    "many stops": ({"stop": ["a"] * 17}, "stop", "at most 16"),
    "unknown": ({"temprature": 1}, "temprature", "Unrecognized request argument"),
    "empty prompt": ({"prompt": ""}, "prompt", "empty"),
    "no prompt at all": ({"prompt": []}, "prompt", "empty"),
    "two prompts": ({"prompt": ["a", "b"]}, "prompt", "one per request"),
    "token outside": ({"prompt": [1, 999]}, "prompt", "999 is not in the vocabulary"),
    "negative token": ({"prompt": [-1]}, "prompt", "vocabulary"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed"),
    "min over max": ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "more than max_tokens 2"),
    "router's field": ({"kv_transfer_params": {}}, "kv_transfer_params", "reserved"),
    "router's other field": ({"phasesplit": {"priority": 9}}, "phasesplit", "reserved"),
    "too long": ({"prompt": "x" * 200}, "prompt", "length is 200 tokens, but your prompt has 200"),
    "too long together": ({"max_tokens": 200}, "prompt", "201 tokens (1 in your prompt, 200 for the answer)"),
}  # fmt: skip

BAD_CHATS = {
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages",
        "'text'",
    ),
    "role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'user'"),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    "json": ({"response_format": {"type": "json_object"}}, "response_format", "only response_format"),
    "top logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "only allowed when logprobs"),
    "refused by the template": (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages",
        "user's message first",
    ),
}


async def _post(served, path: str, body: object, **kwargs):
    async with served.session.post(served.url + path, json=body, **kwargs) as response:
        return response, await response.json()


@pytest.mark.parametrize("case", BAD_COMPLETIONS)
async def test_a_bad_completion_is_refused_by_name(served, case: str) -> None:
    change, param, text = BAD_COMPLETIONS[case]
    response, body = await _post(served, "/v1/completions", PROMPT | change)
    assert response.status == 400, body
    error = body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert text in error["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize("case", BAD_CHATS)
async def test_a_bad_chat_is_refused_by_name(served, case: str) -> None:
    change, param, text = BAD_CHATS[case]
    response, body = await _post(served, "/v1/chat/completions", CHAT | change)
    assert response.status == 400, body
    assert body["error"]["param"].startswith(param)
    assert text in body["error"]["message"]


@pytest.mark.parametrize("raw", [b"{", b"", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
async def test_malformed_json_is_a_400(served, raw: bytes) -> None:
    async with served.session.post(served.url + "/v1/completions", data=raw) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_an_unknown_model_names_the_served_one(served) -> None:
    response, body = await _post(served, "/v1/completions", PROMPT | {"model": "gpt-9"})
    assert response.status == 404
    assert body["error"]["code"] == "model_not_found"
    assert "`gpt-9`" in body["error"]["message"]
    assert f"`{MODEL}`" in body["error"]["message"]


async def test_a_body_over_four_mebibytes_is_a_413(served) -> None:
    response, body = await _post(served, "/v1/completions", PROMPT | {"prompt": "x" * (4 << 20)})
    assert response.status == 413
    assert "4194304 bytes" in body["error"]["message"]


async def test_unknown_paths_and_methods_have_error_bodies(served) -> None:
    async with served.session.get(served.url + "/v1/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with served.session.get(served.url + "/v1/completions") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("value", ["a" * 129, "with space", "newline%", ""])
async def test_a_malformed_request_id_is_refused(served, value: str) -> None:
    headers = {"x-request-id": value}
    response, body = await _post(served, "/v1/completions", PROMPT, headers=headers)
    assert response.status == 400
    assert body["error"]["param"] == "x-request-id"


async def test_a_full_queue_is_a_429_with_retry_after(served) -> None:
    served.engine.max_requests = 0
    response, body = await _post(served, "/v1/completions", PROMPT)
    assert response.status == 429
    assert response.headers["Retry-After"] == "1"
    assert body["error"]["code"] == "rate_limit_exceeded"


async def test_a_draining_worker_is_a_503_with_retry_after(served) -> None:
    served.worker.drain()
    response, body = await _post(served, "/v1/completions", PROMPT)
    assert response.status == 503
    assert int(response.headers["Retry-After"]) > 0
    assert "draining" in body["error"]["message"]


async def test_an_engine_error_is_a_500_without_a_stack_trace(served) -> None:
    served.engine.step_s = 0.05

    async def fail() -> None:
        await wait_until(lambda: not served.engine.is_idle())
        served.engine.fail(served.engine.requests[-1].request_id, "out of memory")

    task = asyncio.create_task(fail())
    response, body = await _post(served, "/v1/completions", PROMPT)
    await task
    assert response.status == 500
    assert body["error"]["message"] == "The engine could not finish the request: out of memory"
