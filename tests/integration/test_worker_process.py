"""The worker as a process: start, failure to start, drain, and the official OpenAI client."""

import asyncio
import json
import signal
import socket
import subprocess
import time

import aiohttp
import openai
import pytest

from helpers_models import tiny_model_dir
from helpers_worker_processes import ADMIN, MODEL, read_report, run_local, running_workers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SLOW = {"base_s": 0.05, "per_prefill_token_s": 0.001, "per_decode_sequence_s": 0.01}
BODY = {"model": MODEL, "prompt": "the pool reads", "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with running_workers(tmp_path_factory.mktemp("workers")) as running:
        (running.folder / "slow.json").write_text(json.dumps(SLOW))
        yield running


@pytest.fixture(scope="module")
def slow(workers):
    """A paced worker; the last test ends it."""
    pace = str(workers.folder / "slow.json")
    worker = workers.start(
        tiny_model_dir("llama"), "decode-0", "decode", "--pace", pace, "--drain-s", "20",
        "--max-model-length", "512",
    )  # fmt: skip
    return worker.wait_ready()


async def test_the_official_client_chats_streams_and_counts(slow) -> None:
    async with openai.AsyncOpenAI(base_url=slow.url + "/v1", api_key="any", max_retries=0) as client:
        messages = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=12, temperature=0
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True}, logprobs=True, top_logprobs=3,
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 12
    logprobs = [
        item for c in chunks if c.choices and c.choices[0].logprobs for item in c.choices[0].logprobs.content
    ]
    assert len(logprobs) == 12
    assert all(item.top_logprobs[0].logprob == pytest.approx(item.logprob) for item in logprobs)


async def test_the_official_client_gets_typed_errors(slow) -> None:
    async with openai.AsyncOpenAI(base_url=slow.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=f"serves `{MODEL}`"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as raised:
            await client.completions.create(model=MODEL, prompt="word " * 600)
        assert raised.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="only n = 1"):
            await client.completions.create(model=MODEL, prompt="x", n=2)


async def test_a_paced_worker_says_so(slow) -> None:
    async with aiohttp.ClientSession() as session:
        report = await read_report(session, slow)
    assert report.paced
    assert report.profile.base_s == SLOW["base_s"]


async def test_a_role_change_takes_effect_without_a_restart(slow) -> None:
    async with aiohttp.ClientSession() as session:
        for version, role in enumerate(("prefill", "decode", "colocated"), start=1):
            body = {"role": role, "version": version}
            async with session.post(slow.url + "/admin/role", json=body, headers=ADMIN) as response:
                assert (await response.json())["role"] == role
            assert (await run_local(session, slow, BODY | {"max_tokens": 3})).is_done
        async with session.get(slow.url + "/metrics") as response:
            text = await response.text()
    for role in ("prefill", "decode", "colocated"):
        assert (
            f'phasesplit_step_seconds_count{{mix="decode",model="tests",namespace="default",pool="decode",role="{role}"}}'
            in text
            or f'role="{role}"' in text
        )


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model-path", "/nonexistent/model"], "/nonexistent/model"),
        (["--device", "cuda"], "CUDA"),
        (["--kv-cache-bytes", "1000"], "KV cache"),
    ],
)
async def test_a_model_that_cannot_be_served_is_said_and_not_crashed(workers, flags: list, text: str) -> None:
    worker = workers.start(tiny_model_dir("llama"), "prefill-bad", "prefill", *flags)
    await asyncio.to_thread(worker.wait_ready)
    async with aiohttp.ClientSession() as session:
        async with session.get(worker.url + "/ready") as response:
            assert response.status == 503
            assert text in (await response.json())["message"]
        async with session.get(worker.url + "/health") as response:
            assert response.status == 200
        report = await read_report(session, worker)
        assert (report.state, report.model) == ("failed", None)
        async with session.post(worker.url + "/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert text in (await response.json())["error"]["message"]
    assert worker.terminate() == 0


def test_what_a_new_process_may_do_better_ends_this_one(workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = workers.start(
            tiny_model_dir("llama"),
            "prefill-port",
            "prefill",
            "--host",
            "127.0.0.1",
            "--transfer-port",
            str(port),
        )
        assert worker.process.wait(180) == 1
    log = worker.log.read_text()
    assert "ending, to start again" in log
    assert "address already in use" in log.lower()


def test_a_wrong_flag_is_one_sentence(workers) -> None:
    worker = workers.start(tiny_model_dir("llama"), "prefill-flag", "prefill", "--block-size", "0")
    assert worker.process.wait(30) == 2
    message = worker.log.read_text().strip()
    assert len(message.splitlines()) == 1
    assert "block-size" in message


def test_sigterm_while_loading_ends_at_once(workers) -> None:
    worker = workers.start(tiny_model_dir("llama"), "prefill-early", "prefill")
    deadline = time.monotonic() + 60
    while worker.state() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker.terminate(15) == 0


async def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_with_zero(slow) -> None:
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(run_local(session, slow, BODY))
        while (await read_report(session, slow)).num_running == 0:  # noqa: ASYNC110 another process
            await asyncio.sleep(0.02)
        slow.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        async with session.post(slow.url + "/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert "draining" in (await response.json())["error"]["message"]
        async with session.get(slow.url + "/ready") as response:
            assert (response.status, (await response.json())["state"]) == (503, "draining")
        answer = await running
    assert (len(answer.tokens), answer.is_done) == (30, True)
    assert await asyncio.to_thread(_exit_status, slow.process) == 0


def _exit_status(process: subprocess.Popen) -> int:
    return process.wait(15)
