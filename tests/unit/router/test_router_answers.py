"""What the client gets of workers' chunks, whatever the legs send."""

import json
from typing import Any

from phasesplit_router.answers import Answer, usage_of
from phasesplit_router.request import Endpoint


def make(
    endpoint: Endpoint = Endpoint.CHAT, *, include_usage: bool = False, keep_text: bool = True
) -> Answer:
    return Answer(endpoint, "id", "m", 5, include_usage, keep_text)


def chat(
    content: str | None, token_ids: list[int], finish: str | None = None, **delta: Any
) -> dict[str, Any]:
    fields = delta | ({} if content is None else {"content": content})
    choice = {"index": 3, "delta": fields, "token_ids": token_ids, "finish_reason": finish, "logprobs": None}
    return {"id": "x", "choices": [choice]}


def events(answer: Answer, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    taken = [choice for chunk in chunks if (choice := answer.take(chunk)) is not None]
    return [json.loads(answer.chunk(choice)[6:]) for choice in taken]


def test_two_legs_make_one_stream_with_one_role_and_one_end() -> None:
    answer = make()
    out = events(
        answer,
        [
            chat("", [], role="assistant"),
            chat("He", [1]),
            chat("", [], role="assistant"),  # the second leg says it again
            chat("llo", [2, 3]),
            chat(None, [], "stop"),
            chat(None, [], "stop"),
            chat("late", [9]),
        ],
    )
    deltas = [event["choices"][0]["delta"] for event in out]
    assert deltas == [{"role": "assistant", "content": "He"}, {"content": "llo"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in out] == [None, None, "stop"]
    assert {(event["id"], event["object"], event["model"]) for event in out} == {
        ("chatcmpl-id", "chat.completion.chunk", "m")
    }
    assert all("token_ids" not in event["choices"][0] for event in out)
    assert (answer.token_ids, answer.text, answer.num_tokens) == ([1, 2, 3], "Hello", 3)


def test_a_token_without_text_is_still_a_token() -> None:
    answer = make()
    (event,) = events(answer, [chat("", [7])])
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.num_tokens == 1


def test_usage_chunks_and_empty_ones_are_not_passed_on() -> None:
    answer = make()
    assert events(answer, [{"choices": [], "usage": {"prompt_tokens": 1}}, {}, chat(None, [])]) == []


def test_usage_is_null_until_the_last_chunk() -> None:
    answer = make(include_usage=True)
    (event,) = events(answer, [chat("a", [1])])
    assert event["usage"] is None
    last = json.loads(answer.usage_chunk(usage_of(3, 2, 1))[6:])
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert last["id"] == event["id"]


def test_whole_chat_answer() -> None:
    answer = make()
    logprobs = [
        {"content": [{"token": "a"}], "refusal": None},
        {"content": [{"token": "b"}], "refusal": None},
    ]
    for text, token, item in zip("ab", (1, 2), logprobs, strict=True):
        chunk = chat(text, [token])
        chunk["choices"][0]["logprobs"] = item
        answer.take(chunk)
    answer.take(chat(None, [], "length"))
    body = json.loads(answer.whole(usage_of(1, 2, 0)))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": {"content": [{"token": "a"}, {"token": "b"}], "refusal": None},
            "finish_reason": "length",
        }
    ]


def test_whole_completion_answer() -> None:
    answer = make(Endpoint.COMPLETION)
    answer.take({"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": None}]})
    answer.take({"choices": [{"index": 0, "text": "y", "token_ids": [2], "finish_reason": "stop"}]})
    body = json.loads(answer.whole(usage_of(1, 2, 0)))
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "xy")
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_stream_keeps_no_text() -> None:
    answer = make(keep_text=False)
    answer.take(chat("abc", [1]))
    assert answer.text == ""


def test_a_worker_without_token_ids_is_counted_by_chunks() -> None:
    answer = make()
    events(answer, [{"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {"content": "b"}}]}])
    assert (answer.num_tokens, answer.token_ids) == (2, [])
