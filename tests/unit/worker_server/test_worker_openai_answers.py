"""Answers of the OpenAI endpoints, through the official client and byte by byte."""

import json

import openai
import pytest

from helpers_worker_server import DEFAULT_ANSWER, MODEL, sse_events

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="anything", max_retries=0) as client:
        yield client


async def test_a_chat_answer_is_whole(client) -> None:
    answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == DEFAULT_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("<user>hi<assistant>")
    assert answer.usage.completion_tokens == len(DEFAULT_ANSWER.encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_completion_has_sixteen_tokens_by_default(client) -> None:
    answer = await client.completions.create(model=MODEL, prompt="once")
    assert answer.choices[0].text == DEFAULT_ANSWER[:16]
    assert answer.choices[0].finish_reason == "length"


async def test_token_ids_are_a_prompt(client, served) -> None:
    await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=1)
    assert served.engine.requests[-1].prompt_token_ids == (1, 2, 3)


async def test_a_streamed_chat_has_role_text_end_usage_and_done(served) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    async with served.session.post(served.url + "/v1/chat/completions", json=body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = sse_events(await response.text())
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in chunks[1:4]] == ["T", "h", "e"]
    assert chunks[4]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert chunks[5]["choices"] == []
    assert chunks[5]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:5])
    assert "token_ids" not in json.dumps(chunks)
    assert "phasesplit" not in json.dumps(chunks)


async def test_a_streamed_chat_through_the_client(client) -> None:
    stream = await client.chat.completions.create(**CHAT, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == DEFAULT_ANSWER


async def test_a_streamed_completion_through_the_client(client) -> None:
    stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=60, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == DEFAULT_ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]


async def test_a_stop_string_ends_the_answer_before_it(client, served) -> None:
    answer = await client.chat.completions.create(**CHAT, stop=[" is", "forty"])
    assert answer.choices[0].message.content == "The answer"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("The answer is")
    assert served.engine.is_idle()


async def test_chat_log_probabilities(client) -> None:
    answer = await client.chat.completions.create(**CHAT, max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [item.token for item in content] == ["T", "h"]
    assert content[0].bytes == [0x54]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("T", -0.5), ("x", -1.5)]


async def test_completion_log_probabilities(client) -> None:
    answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["T", "h", "e"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[1] == {"h": -0.5, "x": -1.5}


async def test_models_names_the_served_model(client) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]


async def test_the_request_id_comes_back(served) -> None:
    headers = {"x-request-id": "abc-1"}
    url = served.url + "/v1/chat/completions"
    async with served.session.post(url, json=CHAT, headers=headers) as response:
        assert response.headers["x-request-id"] == "abc-1"
        assert (await response.json())["id"] == "chatcmpl-abc-1"


async def test_sampling_fields_reach_the_engine(client, served) -> None:
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
        max_completion_tokens=5, temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.1,
        frequency_penalty=0.2, extra_body={"top_k": 5, "ignore_eos": True, "min_tokens": 2}, user="me",
    )  # fmt: skip
    request = served.engine.requests[-1]
    assert bytes(request.prompt_token_ids) == b"<system>a<assistant>"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (5, 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos) == (0.5, 0.9, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert request.seed == 7
