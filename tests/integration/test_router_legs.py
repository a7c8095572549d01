"""The router process in front of scripted workers: legs, answers, refusals of bad input."""

import asyncio
import json

import pytest

from helpers_fake_worker import ADMIN_TOKEN, expected_text
from helpers_router import RouterProcess, colocated_table, running_site, split_table, wait_until
from phasesplit.api.names import PATH_ROUTER_TRACE
from phasesplit.api.traces import TraceBatch

pytestmark = pytest.mark.integration
QUESTION = "What is a phase?"
ANSWER = expected_text(f"user:{QUESTION}")


async def test_split_chat_is_made_of_two_legs() -> None:
    async with running_site() as site:
        router = site.router
        body = router.chat_body(QUESTION, stream_options={"include_usage": True}, seed=7)
        seen = await router.stream(body, x_request_id="my-id")
        assert seen.text == ANSWER
        assert (seen.roles, seen.finish_reasons, seen.done, seen.error) == (1, ["length"], True, None)
        assert seen.usage is not None
        assert (seen.usage["prompt_tokens"], seen.usage["completion_tokens"]) == (5, 8)
        assert seen.headers["X-Request-ID"] == "my-id"
        assert seen.headers["x-phasesplit-mode"] == "Split"
        assert seen.headers["x-phasesplit-pair"] == "obj-prefill-0,obj-decode-0"
        assert len({chunk["id"] for chunk in seen.chunks}) == 1
        first, second = site.prefills[0].legs[0], site.decodes[0].legs[0]
        assert first.transfer is not None
        assert first.transfer.do_remote_decode
        assert second.transfer is not None
        assert second.transfer.do_remote_prefill
        assert second.transfer.remote_pod == "obj-prefill-0"
        assert (first.role, second.role, first.role_version) == ("prefill", "decode", 1)
        assert first.internal.seed == second.internal.seed == 7
        assert first.internal.priority == 100
        trace = await router.trace("my-id")
        assert trace.prefill is not None
        assert trace.decode is not None
        assert trace.decode.kv_transport == "TCP"
        assert trace.text is None


async def test_a_repeated_request_id_never_names_the_same_legs() -> None:
    """The cancellation of the first request may reach a worker after the second has begun there."""
    async with running_site() as site:
        body = site.router.chat_body(QUESTION)
        for _ in range(2):
            seen = await site.router.stream(body, x_request_id="again")
            assert (seen.text, seen.headers["X-Request-ID"]) == (ANSWER, "again")
        first, second = site.prefills[0].legs
        assert first.request_id != second.request_id
        assert all(leg.request_id.startswith("again.") for leg in (first, second))


async def test_a_trial_serves_both_modes_at_once_and_tells_which() -> None:
    roles = {
        "obj-prefill-0": "prefill",
        "obj-decode-0": "decode",
        "obj-prefill-1": "colocated",
        "obj-decode-1": "colocated",
    }
    table = colocated_table(roles=roles, trial={"id": "t1", "split_share": 0.5})
    async with running_site(2, 2, table) as site:
        router = site.router
        seen = [await router.stream(router.chat_body(QUESTION)) for _ in range(16)]
        assert all(item.text == ANSWER for item in seen)
        pairs = [item.headers["x-phasesplit-pair"] for item in seen]
        assert pairs.count("obj-prefill-0,obj-decode-0") == 8
        assert {pair for pair in pairs if "," not in pair} <= {"obj-prefill-1", "obj-decode-1"}
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        async with router.session.get(router.url + PATH_ROUTER_TRACE, headers=headers) as response:
            rows = TraceBatch.model_validate_json(await response.read())
        assert len(rows.drawn) == 16
        assert rows.drawn == rows.split
        # A trial that is over binds nobody.
        router.route(colocated_table(2), site.workers)
        await router.wait_version(2)
        later = await router.stream(router.chat_body(QUESTION))
        assert "," not in later.headers["x-phasesplit-pair"]


async def test_whole_answer_equals_stream() -> None:
    async with running_site() as site:
        router = site.router
        status, body, headers = await router.post(router.chat_body(QUESTION))
        assert status == 200
        assert body["choices"][0]["message"]["content"] == ANSWER
        assert body["usage"]["completion_tokens"] == 8
        assert headers["x-phasesplit-pair"] == "obj-prefill-0,obj-decode-0"
        completion = {"model": "fake", "prompt": QUESTION, "max_tokens": 5}
        status, body, _ = await router.post(completion, "/v1/completions")
        assert body["choices"][0]["text"] == expected_text(QUESTION, 5)
        assert body["choices"][0]["finish_reason"] == "length"
        seen = await router.stream(completion, "/v1/completions")
        assert seen.text == expected_text(QUESTION, 5)


async def test_one_token_needs_no_second_leg() -> None:
    async with running_site() as site:
        seen = await site.router.stream(site.router.chat_body(QUESTION, max_tokens=1))
        assert seen.text == expected_text(f"user:{QUESTION}", 1)
        assert (seen.finish_reasons, seen.done) == (["length"], True)
        assert site.decodes[0].legs == []


async def test_first_token_does_not_wait_for_the_second_leg() -> None:
    async with running_site() as site:
        site.decodes[0].stall_at = 1
        body = json.dumps({**site.router.chat_body(QUESTION), "stream": True})
        async with (
            asyncio.timeout(5),
            site.router.session.post(site.router.url + "/v1/chat/completions", data=body) as response,
        ):
            line = await response.content.readline()
        assert expected_text(f"user:{QUESTION}", 1) in json.loads(line[6:])["choices"][0]["delta"]["content"]


async def test_colocated_requests_have_one_leg_and_spread() -> None:
    async with running_site(table=colocated_table()) as site:
        router = site.router
        for worker in site.workers:
            worker.token_s = 0.02
        seen = await asyncio.gather(*(router.stream(router.chat_body(QUESTION)) for _ in range(12)))
        assert {item.text for item in seen} == {ANSWER}
        assert {item.headers["x-phasesplit-mode"] for item in seen} == {"Colocated"}
        assert [len(worker.legs) for worker in site.workers] == [6, 6]
        assert all(leg.role == "colocated" and leg.transfer is None for leg in site.prefills[0].legs)


async def test_roles_are_told_and_stamped() -> None:
    async with running_site() as site:
        assert [worker.role for worker in site.workers] == ["prefill", "decode"]
        site.router.route(colocated_table(2), site.workers)

        async def told() -> bool:
            return {worker.role_version for worker in site.workers} == {2}

        await wait_until(told, 3)
        assert {worker.role for worker in site.workers} == {"colocated"}


_CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
BAD_INPUT = [
    (b"{", 400, "not valid JSON"),
    (b"\xff", 400, "not UTF-8"),
    (b"[1]", 400, "must be a JSON object"),
    (b'{"temperature":NaN}', 400, "NaN"),
    (b"[" * 100_000, 400, "nested too deeply"),
    ({"model": "fake", "messages": []}, 400, "messages"),
    ({"model": "fake", "messages": "hi"}, 400, "messages"),
    (_CHAT | {"model": "other"}, 404, "other"),
    (_CHAT | {"n": 2}, 400, "n: 2"),
    (_CHAT | {"stream": 1}, 400, "stream"),
    (_CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (_CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    (_CHAT | {"seed": "x"}, 400, "seed"),
    (_CHAT | {"phasesplit": {}}, 400, "phasesplit"),
    (_CHAT | {"kv_transfer_params": {}}, 400, "kv_transfer_params"),
]


async def test_bad_input_gets_an_openai_error() -> None:
    router = RouterProcess()
    router.route(split_table(), [])
    try:
        await router.start()
        for body, status, named in BAD_INPUT:
            got, answer, _ = await router.post(body)
            assert got == status, answer
            assert named in answer["error"]["message"]
            assert set(answer["error"]) == {"message", "type", "param", "code"}
    finally:
        await router.stop()


async def test_without_workers_it_is_ready_and_says_why_it_cannot_serve() -> None:
    router = RouterProcess()
    router.route(split_table(colocated_allowed=False, reason="the prefill pool has no ready worker"), [])
    try:
        await router.start()
        status, answer, headers = await router.post(router.chat_body("a"))
        assert status == 503
        assert "the prefill pool has no ready worker" in answer["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        status, answer, _ = await router.post(router.chat_body("a"), x_slo_class="gold")
        assert status == 400
        assert "interactive, batch" in answer["error"]["message"]
        async with router.session.get(router.url + "/v1/models") as response:
            assert [item["id"] for item in (await response.json())["data"]] == ["fake"]
        async with router.session.post(router.url + "/v1/completions", data=b"x" * (5 << 20)) as response:
            assert response.status == 413
            assert "4194304" in (await response.json())["error"]["message"]
        async with router.session.get(router.url + "/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_found"
        async with router.session.get(router.url + "/v1/phasesplit/status") as response:
            assert response.status == 401
    finally:
        await router.stop()


async def test_a_worker_refusing_the_request_is_quoted() -> None:
    async with running_site() as site:
        site.prefills[0].refuse_status = 400
        site.prefills[0].refuse_body = {
            "error": {"message": "temperature: too hot.", "type": "invalid_request_error"}
        }
        status, answer, _ = await site.router.post(site.router.chat_body("a", temperature=9))
        assert status == 400
        assert answer["error"]["message"] == "temperature: too hot."
        assert len(site.prefills[0].legs) == 0
        report = await site.router.report()
        assert (report.in_flight, report.failed_total, report.classes[0].finished) == (0, 0, 0)


async def test_api_keys_guard_the_openai_endpoints_alone(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "alice").write_text("key-a\n")
    (tmp_path / "bob").write_text("key-b")
    async with running_site(flags=("--api-keys-dir", str(tmp_path))) as site:
        router = site.router
        for key, status in (("", 401), ("key-c", 401), ("key-a", 200), ("key-b", 200)):
            got, answer, _ = await router.post(router.chat_body("a"), Authorization=f"Bearer {key}")
            assert got == status, answer
        async with router.session.get(router.url + "/v1/models") as response:
            assert response.status == 401
        for path in ("/health", "/ready", "/metrics"):
            async with router.session.get(router.url + path) as response:
                assert response.status == 200


async def test_metrics_have_targets_as_buckets() -> None:
    async with running_site() as site:
        router = site.router
        await router.stream(router.chat_body(QUESTION), x_slo_class="batch")
        await router.stream(router.chat_body(QUESTION))
        async with router.session.get(router.url + "/metrics") as response:
            text = await response.text()
        common = 'model="obj",namespace="ns",slo="interactive"'
        assert f"phasesplit_slo_requests_total{{{common}}} 1.0" in text
        assert f"phasesplit_slo_attained_requests_total{{{common}}} 1.0" in text
        split = 'mode="Split",model="obj",namespace="ns",slo="interactive"'
        assert f'phasesplit_time_to_first_token_seconds_bucket{{le="2.0",{split}}} 1.0' in text
        assert f'phasesplit_request_time_per_output_token_seconds_bucket{{le="0.2",{split}}} 1.0' in text
        assert "phasesplit_second_token_gap_seconds_count" in text
        assert 'phase="prefill"' in text
        assert "phasesplit_inter_token_latency_seconds_count{" in text
        assert "request_id" not in text


async def test_text_is_kept_only_on_demand() -> None:
    async with running_site(flags=("--trace-text",)) as site:
        await site.router.stream(site.router.chat_body(QUESTION))
        assert (await site.router.trace("last")).text == ANSWER
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        async with site.router.session.get(site.router.url + "/v1/kv/unknown", headers=headers) as response:
            assert response.status == 404


async def test_local_prefill_on_the_decode_pool_when_there_is_no_prefill_worker() -> None:
    async with running_site(prefills=0) as site:
        seen = await site.router.stream(site.router.chat_body(QUESTION))
        assert seen.text == ANSWER
        assert seen.headers["x-phasesplit-mode"] == "Colocated"
        assert (await site.router.report()).local_prefills_total == {"no_prefill_worker": 1}


async def test_fingerprints_that_differ_never_pair() -> None:
    async with running_site(prefills=1, decodes=2) as site:
        site.decodes[0].fingerprint = "old"
        site.router.route(split_table(2), site.workers)

        async def known() -> bool:
            return "old" in {w.model.fingerprint for w in (await site.router.report()).workers if w.model}

        await wait_until(known, 5)
        for _ in range(6):
            seen = await site.router.stream(site.router.chat_body(QUESTION))
            assert seen.headers["x-phasesplit-pair"] == "obj-prefill-0,obj-decode-1"


async def test_traffic_spreads_over_equal_pairs() -> None:
    async with running_site(prefills=2, decodes=2) as site:
        for worker in site.workers:
            worker.token_s = 0.01
        router = site.router
        seen = await asyncio.gather(*(router.stream(router.chat_body(QUESTION)) for _ in range(24)))
        assert {item.text for item in seen} == {ANSWER}
        counts = [len(worker.legs) for worker in site.workers]
        assert all(8 <= count <= 16 for count in counts), counts
