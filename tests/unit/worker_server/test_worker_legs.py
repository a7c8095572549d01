"""The legs between router and worker: order of events, replay, refusals, ends."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from helpers_worker_server import ADMIN_TOKEN, DEFAULT_ANSWER, EOS, MODEL, sse_events, wait_until
from phasesplit_worker.server.ports import PullFailedError
from phasesplit_worker.server.streaming import EventStream

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
PROMPT = {"model": MODEL, "prompt": "x", "max_tokens": 60, "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
LEG_1 = {"kv_transfer_params": {"do_remote_decode": True}}
LEG_2 = {
    "stream": True,
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_engine_id": "e0",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 8100,
    },
}


async def events(served, body: dict, path: str = "/v1/completions", **headers: str) -> list:
    async with served.session.post(served.url + path, json=body, headers=ADMIN | headers) as response:
        text = await response.text()
        assert response.status == 200, text
    return [event if event == "[DONE]" else json.loads(event) for event in sse_events(text)]


def text_of(chunks: list) -> str:
    parts = [c["choices"][0] for c in chunks if isinstance(c, dict) and c.get("choices")]
    return "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in parts)


def tokens_of(chunks: list) -> list[int]:
    return [
        t for c in chunks if isinstance(c, dict) and c.get("choices") for t in c["choices"][0]["token_ids"]
    ]


async def test_leg_1_accepts_gives_the_first_token_reports_and_ends(served) -> None:
    accepted, chunk, report, done = await events(served, PROMPT | LEG_1, **{"x-request-id": "r1"})
    assert accepted["object"] == "phasesplit.prefill"
    assert accepted["kv_transfer_params"]["remote_request_id"] == "r1"
    assert accepted["kv_transfer_params"]["do_remote_prefill"] is True
    assert accepted["num_prompt_tokens"] == 1
    assert accepted["kv_bytes"] == 2 * 2 * 2 * 4 * 4
    assert chunk["choices"][0] == {
        "index": 0, "text": "T", "logprobs": None, "finish_reason": None, "token_ids": [ord("T")],
    }  # fmt: skip
    assert (report["object"], report["request_id"], report["num_output_tokens"]) == (
        "phasesplit.leg",
        "r1",
        1,
    )
    assert done == "[DONE]"
    assert served.engine.stats().num_held == 1


async def test_leg_1_of_a_chat_begins_with_the_role(served) -> None:
    received = await events(served, CHAT | LEG_1, "/v1/chat/completions")
    assert received[1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert received[2]["choices"][0]["delta"] == {"content": "T"}


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop": ["T"]}])
async def test_a_first_token_that_ends_the_request_says_so_and_holds_nothing(served, end: dict) -> None:
    body = PROMPT | LEG_1 | {"stream": True, "stream_options": {"include_usage": True}} | end
    received = await events(served, body)
    choice = received[1]["choices"][0]
    assert choice["finish_reason"] == ("length" if "max_tokens" in end else "stop")
    assert choice["text"] == ("T" if "max_tokens" in end else "")
    assert received[2]["usage"]["completion_tokens"] == 1
    assert received[-1] == "[DONE]"
    assert served.engine.is_idle()


async def test_leg_1_without_an_end_sends_no_usage(served) -> None:
    body = PROMPT | LEG_1 | {"stream": True, "stream_options": {"include_usage": True}}
    received = await events(served, body)
    assert not any(isinstance(event, dict) and event.get("usage") for event in received)


async def test_leg_2_streams_from_the_second_token_on(served) -> None:
    received = await events(served, CHAT | LEG_2, "/v1/chat/completions")
    assert text_of(received) == DEFAULT_ANSWER[1:]
    assert tokens_of(received) == [*DEFAULT_ANSWER.encode()[1:], EOS]
    assert not any("role" in c["choices"][0]["delta"] for c in received if c != "[DONE]" and "choices" in c)
    report = received[-2]
    assert report["object"] == "phasesplit.leg"
    assert (report["kv_bytes"], report["kv_transport"]) == (4096, "TCP")
    assert (report["kv_transfer_s"], report["kv_busy_s"], report["kv_exposed_s"]) == (0.02, 0.01, 0.005)
    assert report["recomputed"] is None
    assert report["num_output_tokens"] == len(DEFAULT_ANSWER.encode()) + 1


async def test_leg_2_usage_counts_the_whole_answer(served) -> None:
    received = await events(served, PROMPT | LEG_2 | {"stream_options": {"include_usage": True}})
    usage = next(c["usage"] for c in received if c != "[DONE]" and c.get("usage"))
    assert usage["completion_tokens"] == len(DEFAULT_ANSWER.encode()) + 1


async def test_a_failed_pull_is_recomputed_with_its_reason(served) -> None:
    served.transfer.fails_with = PullFailedError("checksum", "block 3 differs")
    received = await events(served, PROMPT | LEG_2)
    assert text_of(received) == DEFAULT_ANSWER[1:]
    assert received[-2]["recomputed"] == "checksum"
    assert received[-2]["kv_bytes"] == 0
    assert 'reason="checksum"' in served.worker.metrics.render().decode()


async def test_both_legs_give_the_local_answer(served) -> None:
    local = await events(served, PROMPT | {"stream": True})
    first = await events(served, PROMPT | LEG_1)
    second = await events(served, PROMPT | LEG_2)
    assert text_of(first) + text_of(second) == text_of(local) == DEFAULT_ANSWER
    assert tokens_of(first) + tokens_of(second) == tokens_of(local)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_replay_at_every_cut_repeats_nothing_and_misses_nothing(served, path: str) -> None:
    tokens = [*DEFAULT_ANSWER.encode(), EOS]
    body = (PROMPT if path == "/v1/completions" else CHAT) | {"stream": True, "stop": ["cut", "too!"]}
    whole = await events(served, body, path)
    sent: list[str] = [""]
    for chunk in whole:
        if isinstance(chunk, dict) and chunk.get("choices") and chunk["choices"][0]["token_ids"]:
            sent.append(sent[-1] + text_of([chunk]))
    for cut in range(1, len(tokens) + 1):
        replay = {"phasesplit": {"output_token_ids": tokens[:cut]}}
        rest = await events(served, body | replay, path)
        assert sent[cut] + text_of(rest) == DEFAULT_ANSWER
        assert tokens_of(rest) == tokens[cut:]
        assert rest[-2]["num_output_tokens"] == len(tokens)
        assert rest[-3]["choices"][0]["finish_reason"] == "stop"


async def test_a_replay_that_was_complete_gets_its_end_only(served) -> None:
    replay = {"phasesplit": {"output_token_ids": list(b"The")}, "max_tokens": 3, "stream": True}
    received = await events(served, PROMPT | replay)
    assert [c["choices"][0]["finish_reason"] for c in received[:1]] == ["length"]
    assert text_of(received) == ""
    assert served.engine.requests == []


async def test_the_routers_priority_class_and_seed_reach_the_engine(served) -> None:
    await events(
        served, PROMPT | {"stream": True, "phasesplit": {"priority": 7, "slo_class": "a", "seed": 5}}
    )
    request = served.engine.requests[-1]
    assert (request.priority, request.slo_class, request.seed) == (7, "a", 5)


async def test_a_clients_seed_goes_before_the_routers(served) -> None:
    await events(served, PROMPT | {"stream": True, "seed": 9, "phasesplit": {"seed": 5}})
    assert served.engine.requests[-1].seed == 9


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"do_remote_prefill": True}, "remote_engine_id is needed"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "exclude each other"),
        ({"do_remote_decode": "perhaps"}, "valid boolean"),
        ({"remote_port": 99999}, "less than 65536"),
    ],
)
async def test_malformed_transfer_parameters_are_refused(served, params: dict, text: str) -> None:
    body = PROMPT | {"kv_transfer_params": params}
    async with served.session.post(served.url + "/v1/completions", json=body, headers=ADMIN) as response:
        assert response.status == 400
        assert text in (await response.json())["error"]["message"]


async def test_a_wrong_token_is_a_client_like_any_other(served) -> None:
    headers = {"Authorization": "Bearer wrong"}
    async with served.session.post(
        served.url + "/v1/completions", json=PROMPT | LEG_1, headers=headers
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "kv_transfer_params"


async def _disconnect_in_the_middle(served, body: dict) -> None:
    async with served.session.post(served.url + "/v1/completions", json=body, headers=ADMIN) as response:
        await response.content.readany()
    # leaving the context closes the connection because the answer is not read to its end


async def _idle(served, timeout_s: float = 10.0) -> None:
    await wait_until(served.engine.is_idle, timeout_s)


async def test_a_disconnect_in_the_stream_frees_the_blocks(served) -> None:
    served.engine.step_s = 0.05
    await _disconnect_in_the_middle(served, PROMPT | {"stream": True})
    await _idle(served)
    assert len(served.worker.open_requests) == 0


async def test_a_disconnect_while_nothing_is_sent_frees_the_blocks(served) -> None:
    served.engine.is_stuck = True
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.2):
            await events(served, PROMPT | {"stream": True})
    await _idle(served)


async def test_a_first_token_that_nobody_reads_holds_nothing(served, monkeypatch) -> None:
    async def send(stream: EventStream, *events: dict) -> None:
        if "choices" in events[0]:
            raise ConnectionResetError("the router is gone")
        await original(stream, *events)

    original = EventStream.send
    monkeypatch.setattr(EventStream, "send", send)
    with contextlib.suppress(aiohttp.ClientError):
        await events(served, PROMPT | LEG_1)
    await _idle(served)


async def test_a_disconnect_during_the_pull_ends_the_pull_first(served) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            assert not served.engine.is_idle()  # the blocks are still reserved while the pull ends
            ended.set()

    served.transfer.gate = hang
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.3):
            await events(served, PROMPT | LEG_2)
    await _idle(served)
    assert ended.is_set()


async def test_cancel_during_the_pull_answers_and_frees(served) -> None:
    served.transfer.gate = lambda: asyncio.sleep(60)
    headers = ADMIN | {"x-request-id": "r9"}
    body = PROMPT | LEG_2
    task = asyncio.create_task(
        served.session.post(served.url + "/v1/completions", json=body, headers=headers)
    )
    await wait_until(lambda: served.worker.open_requests.pull_of("r9"))
    async with served.session.post(
        served.url + "/admin/cancel", json={"request_id": "r9"}, headers=ADMIN
    ) as response:
        assert await response.json() == {"cancelled": True}
    response = await task
    assert response.status == 503
    assert "cancelled" in (await response.json())["error"]["message"]
    await _idle(served)


async def test_cancel_frees_held_kv_at_once(served) -> None:
    await events(served, PROMPT | LEG_1, **{"x-request-id": "r5"})
    await events(served, PROMPT | LEG_1, **{"x-request-id": "r5"})  # a retry under the same id
    assert served.engine.stats().num_held == 2
    async with served.session.post(
        served.url + "/admin/cancel", json={"request_id": "r5"}, headers=ADMIN
    ) as response:
        assert await response.json() == {"cancelled": True}
    assert served.engine.is_idle()


async def test_an_error_in_the_stream_is_an_event_and_no_done(served) -> None:
    served.engine.step_s = 0.02
    headers = ADMIN | {"x-request-id": "r7"}
    async with served.session.post(
        served.url + "/v1/completions", json=PROMPT | {"stream": True}, headers=headers
    ) as response:
        await response.content.readany()
        served.engine.fail("r7", "step failed")
        rest = (await response.content.read()).decode()
    last = json.loads(sse_events(rest)[-1])
    assert "step failed" in last["error"]["message"]
    assert "[DONE]" not in rest


async def test_a_dead_engine_ends_every_stream(served) -> None:
    served.engine.step_s = 0.02
    async with served.session.post(
        served.url + "/v1/completions", json=PROMPT | {"stream": True}, headers=ADMIN
    ) as response:
        await response.content.readany()
        served.engine.is_stuck = True
        served.engine.failure = "the thread died"
        rest = (await response.content.read()).decode()
    assert "the thread died" in rest
    async with served.session.get(served.url + "/health") as response:
        assert response.status == 503
    async with served.session.get(served.url + "/ready") as response:
        assert (response.status, (await response.json())["state"]) == (503, "failed")
