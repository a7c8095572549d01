"""Admin endpoints, probes, metrics, roles, and the life of a worker."""

import asyncio
import threading
import time

import pytest
from aiohttp import ClientSession, web

from helpers_worker_server import ADMIN_TOKEN, LAYOUT, MODEL, config, make_parts, wait_until
from phasesplit.api.manifest import KVManifest
from phasesplit.api.names import Role
from phasesplit.api.reports import ProbeResult, WorkerReport
from phasesplit_worker.errors import ConfigError, ModelLoadError, ModelUnreachableError
from phasesplit_worker.server.app import build_app, build_runner
from phasesplit_worker.server.auth import AdminAuth
from phasesplit_worker.server.worker import Worker

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
PROMPT = {"model": MODEL, "prompt": "x", "max_tokens": 4}


async def post(served, path: str, body: object, headers: dict = ADMIN):
    async with served.session.post(served.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def get(served, path: str, headers: dict = ADMIN):
    async with served.session.get(served.url + path, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": ADMIN_TOKEN}, 401),
        ({"Authorization": f"Bearer {ADMIN_TOKEN} "}, 200),
        ({"Authorization": f"bearer {ADMIN_TOKEN}"}, 200),
    ],
)
async def test_admin_needs_the_token(served, headers: dict, status: int) -> None:
    assert (await get(served, "/admin/state", headers))[0] == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/role"),
        ("POST", "/admin/probe"),
        ("POST", "/admin/cancel"),
        ("POST", "/admin/drain"),
        ("GET", "/v1/kv/x"),
    ],
)
async def test_every_admin_endpoint_asks_for_it(served, method: str, path: str) -> None:
    async with served.session.request(method, served.url + path, json={}) as response:
        assert response.status == 401
        assert "Bearer" in (await response.json())["error"]["message"]


async def test_without_a_token_file_admin_is_disabled(served) -> None:
    served.worker.auth = AdminAuth(None)
    status, body = await get(served, "/admin/state")
    assert status == 403
    assert "--admin-token-file" in body["error"]["message"]


def test_an_empty_token_file_is_refused(tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        AdminAuth.from_file(path)


async def test_state_is_a_worker_report(served) -> None:
    _, body = await get(served, "/admin/state")
    report = WorkerReport.model_validate(body)
    assert (report.state, report.role, report.pool, report.engine_id) == (
        "ready", "colocated", "prefill", "engine-1",
    )  # fmt: skip
    assert report.model.kv_layout == LAYOUT
    assert report.kv_total_blocks == 100
    assert report.max_num_seqs == served.worker.config.max_num_seqs == 64
    assert report.profile.base_s == 0.01


async def test_a_newer_role_is_taken_and_an_older_one_ignored(served) -> None:
    _, body = await post(served, "/admin/role", {"role": "decode", "version": 4, "max_step_s": 0.05})
    assert (body["role"], body["role_version"]) == ("decode", 4)
    assert served.engine.roles[-1] == (Role.DECODE, None, 0.05)
    _, body = await post(served, "/admin/role", {"role": "prefill", "version": 4})
    assert (body["role"], body["role_version"]) == ("decode", 4)
    _, body = await post(served, "/admin/role", {"role": "prefill", "version": 3})
    assert body["role"] == "decode"


async def test_a_legs_headers_bring_a_newer_role(served) -> None:
    headers = {"x-phasesplit-role": "prefill", "x-phasesplit-role-version": "6"}
    await post(served, "/v1/completions", PROMPT, headers)
    assert served.worker.role.role is Role.COLOCATED  # anybody can send headers
    await post(served, "/v1/completions", PROMPT, ADMIN | headers)
    assert (served.worker.role.role, served.worker.role.version) == (Role.PREFILL, 6)
    # The operator's own message of the same version still brings the limits.
    await post(served, "/admin/role", {"role": "prefill", "version": 6, "max_batched_tokens": 99})
    assert served.engine.roles[-1] == (Role.PREFILL, 99, None)


@pytest.mark.parametrize("headers", [{"x-phasesplit-role": "king", "x-phasesplit-role-version": "9"},
                                     {"x-phasesplit-role": "decode", "x-phasesplit-role-version": "x"},
                                     {"x-phasesplit-role": "decode"}])  # fmt: skip
async def test_malformed_role_headers_change_nothing(served, headers: dict) -> None:
    status, _ = await post(served, "/v1/completions", PROMPT, ADMIN | headers)
    assert status == 200
    assert served.worker.role.role is Role.COLOCATED


async def test_a_malformed_admin_body_is_a_400(served) -> None:
    status, body = await post(served, "/admin/role", {"role": "king", "version": 1})
    assert (status, body["error"]["param"]) == (400, "role")


async def test_a_probe_answers_with_its_error(served) -> None:
    status, body = await post(served, "/admin/probe", {"host": "peer", "port": 1})
    assert (status, ProbeResult.model_validate(body).error) == (200, "cannot reach peer")


async def test_cancelling_an_unknown_request_says_so(served) -> None:
    assert await post(served, "/admin/cancel", {"request_id": "nobody"}) == (200, {"cancelled": False})


async def test_the_manifest_of_the_newest_try(served) -> None:
    assert (await get(served, "/v1/kv/r1"))[0] == 404
    served.transfer.manifests["r1"] = KVManifest(
        request_id="r1", model_fingerprint="f", kv_layout=LAYOUT, token_ids_hash=(), num_tokens=3
    )
    status, body = await get(served, "/v1/kv/r1")
    assert status == 200
    assert KVManifest.model_validate(body).num_tokens == 3


async def test_drain_finishes_what_runs_and_refuses_the_rest(served) -> None:
    served.engine.step_s = 0.02
    running = asyncio.create_task(post(served, "/v1/completions", PROMPT))
    await wait_until(lambda: not served.engine.is_idle())
    assert (await post(served, "/admin/drain", {}))[0] == 202
    assert (await post(served, "/v1/completions", PROMPT))[0] == 503
    status, body = await get(served, "/ready")
    assert (status, body["state"]) == (503, "draining")
    assert (await running)[0] == 200
    assert await served.worker.drained(2.0)


async def test_health_and_ready_of_a_serving_worker(served) -> None:
    assert await get(served, "/health") == (200, {"status": "ok"})
    assert (await get(served, "/ready"))[0] == 200


async def test_metrics_have_the_names_and_labels(served) -> None:
    await post(served, "/v1/completions", PROMPT)
    served.worker.metrics.observe_expired_blocks(5)
    async with served.session.get(served.url + "/metrics") as response:
        text = await response.text()
    labels = '{model="chat",namespace="ns",pool="prefill",role="colocated"}'
    for line in (
        f"phasesplit_kv_cache_usage_perc{labels}",
        f"phasesplit_num_requests_running{labels}",
        f"phasesplit_num_requests_waiting{labels}",
        f"phasesplit_weights_bytes{labels}",
        f"phasesplit_num_preemptions_total{labels} 2.0",
        f"phasesplit_prefix_cache_hits_total{labels}",
        f"phasesplit_kv_expired_blocks_total{labels} 5.0",
    ):
        assert line in text.replace('role="colocated",pool="prefill"', 'pool="prefill",role="colocated"')


class LoadGate:
    """A load that waits until told how to end."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        self.parts = make_parts()

    def __call__(self, *_: object):
        assert self.go.wait(5)
        if self.error is not None:
            raise self.error
        return self.parts


@pytest.fixture
async def loading():
    gate = LoadGate()
    worker = Worker(config(), AdminAuth(ADMIN_TOKEN), "engine-1", gate)
    runner = build_runner(build_app(worker))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    worker.start()
    async with ClientSession() as session:
        yield gate, worker, session, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    gate.go.set()
    await worker.stop()
    await runner.cleanup()


async def test_while_loading_it_is_alive_not_ready_and_answers_503(loading) -> None:
    gate, worker, session, url = loading
    async with session.get(url + "/health") as response:
        assert response.status == 200
    async with session.get(url + "/ready") as response:
        assert (response.status, (await response.json())["state"]) == (503, "loading")
    async with session.post(url + "/v1/completions", json=PROMPT) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "loading" in (await response.json())["error"]["message"]
    async with session.get(url + "/admin/state", headers=ADMIN) as response:
        assert (await response.json())["state"] == "loading"
    async with session.get(url + "/metrics") as response:
        assert response.status == 200
    async with session.post(
        url + "/admin/role", json={"role": "decode", "version": 2}, headers=ADMIN
    ) as response:
        assert (await response.json())["role"] == "decode"
    gate.go.set()
    await wait_until(lambda: worker.state == "ready")
    assert gate.parts.engine.roles == [(Role.DECODE, None, None)]


LASTING = [
    (ModelLoadError("a GPU is asked for but CUDA finds none"), "CUDA finds none"),
    (ConfigError("--pace /p cannot be read"), "/p cannot be read"),
]
PASSING = [
    (ModelUnreachableError("model a/b could not be downloaded; check the network"), "check the network"),
    (OSError(98, "Address already in use"), "already in use"),
    (RuntimeError("boom"), "RuntimeError: boom"),
]


@pytest.mark.parametrize(
    ("error", "text", "is_lasting"),
    [(*case, True) for case in LASTING] + [(*case, False) for case in PASSING],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_a_failed_load_says_why_and_ends_unless_it_would_fail_again(
    loading, error: Exception, text: str, is_lasting: bool
) -> None:
    gate, worker, session, url = loading
    broken = asyncio.ensure_future(worker.wait_broken())
    gate.error = error
    gate.go.set()
    await wait_until(lambda: worker.state == "failed")
    await asyncio.sleep(0)
    assert broken.done() != is_lasting
    broken.cancel()
    async with session.get(url + "/ready") as response:
        assert response.status == 503
        assert text in (await response.json())["message"]
    async with session.get(url + "/admin/state", headers=ADMIN) as response:
        assert text in (await response.json())["message"]
    async with session.get(url + "/health") as response:
        assert response.status == 200  # a restart would not help
    async with session.post(url + "/v1/completions", json=PROMPT) as response:
        assert response.status == 503
        assert text in (await response.json())["error"]["message"]


async def test_a_dead_engine_ends_the_process(served) -> None:
    served.engine.failure = "IntegrityError: block 3 has 2 references"
    await asyncio.wait_for(served.worker.wait_broken(), 5)
    assert served.worker.state == "failed"
    assert "block 3 has 2 references" in served.worker.message


async def test_a_hanging_engine_is_unready_before_it_is_dead(served) -> None:
    served.engine.is_stuck = True
    served.engine.heartbeat_s -= 7.0  # of the ten seconds that liveness allows
    status, body = await get(served, "/ready")
    assert status == 503
    assert "no sign of life" in body["message"]
    assert (await get(served, "/health"))[0] == 200
    served.engine.heartbeat_s -= 7.0
    assert (await get(served, "/health"))[0] == 503


async def test_a_process_that_stood_still_gives_its_engine_time_again(served, monkeypatch) -> None:
    monkeypatch.setattr("phasesplit_worker.server.worker.PAUSE_S", 0.8)
    monkeypatch.setattr("phasesplit_worker.server.worker.MIN_LIVENESS_S", 1.2)
    await asyncio.sleep(0.6)  # the watchdog has looked
    served.engine.is_stuck = True
    time.sleep(1.0)  # noqa: ASYNC251  the whole process stands still, as on a frozen node
    served.engine.heartbeat_s -= 60.0
    assert (await get(served, "/health"))[0] == 200
    assert served.worker.state == "ready"
    # An engine that does not go on is found all the same.
    await asyncio.wait_for(served.worker.wait_broken(), 10)
    assert "no sign of life" in served.worker.message


async def test_a_body_that_does_not_arrive_is_a_408(served, monkeypatch) -> None:
    monkeypatch.setattr("phasesplit_worker.server.errors.BODY_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(5):
        assert b" 408 " in await reader.readline()
    writer.close()
