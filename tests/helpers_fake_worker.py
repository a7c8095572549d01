"""Scripted workers for router tests: they speak the leg protocol with deterministic text, without a model.

Token number i of the answer to a prompt is a function of both alone, so that any mix of legs,
replays and workers must give the same text.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from phasesplit.api.legs import InternalParams, KVTransferParams, LegReport, PrefillAccepted
from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import LinkSample, ModelFacts, StepProfile, WorkerReport, WorkerState

MODEL = "fake"
ADMIN_TOKEN = "secret"
DEFAULT_LENGTH = 8
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")


def token_at(prompt: str, position: int) -> int:
    """Id of the token at a position of the answer to a prompt."""
    digest = hashlib.blake2b(f"{position}|{prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 50_000


def text_of(token: int) -> str:
    """Text of a token; some have characters outside ASCII."""
    return f" w{token}" if token % 7 else f" ü{token}"


def expected_text(prompt: str, length: int = DEFAULT_LENGTH) -> str:
    """The whole answer to a prompt."""
    return "".join(text_of(token_at(prompt, position)) for position in range(length))


def prompt_of(body: dict[str, Any]) -> str:
    """The text a body asks about."""
    if "messages" in body:
        return "\n".join(f"{message['role']}:{message['content']}" for message in body["messages"])
    return str(body["prompt"])


@dataclass
class FakeCluster:
    """What workers of one test share: the KV that prefill workers hold."""

    held: dict[str, asyncio.Event] = field(default_factory=dict)


@dataclass
class Seen:
    """One leg that a worker got."""

    request_id: str
    role: str
    role_version: int
    body: dict[str, Any]
    internal: InternalParams
    transfer: KVTransferParams | None


class FakeWorker:
    """One scripted worker on a local port."""

    _engines = itertools.count()

    def __init__(self, cluster: FakeCluster, pod: str, pool: Pool, *, node: str = "node") -> None:
        self.cluster = cluster
        self.pod, self.pool, self.node = pod, pool, node
        self.role, self.role_version = Role.COLOCATED, 0
        self.state = WorkerState.READY
        self.engine_id = f"engine-{next(self._engines)}"
        self.fingerprint = "same"
        self.profile: StepProfile | None = None
        self.links: list[LinkSample] = []
        self.kv_total_blocks = 10_000
        # Behaviour
        self.prefill_s = 0.0
        self.token_s = 0.0
        self.refuse_status = 0  # answer legs with this status
        self.refuse_body: dict[str, Any] = {"error": {"message": "scripted refusal", "type": "server_error"}}
        self.die_at: int | None = None  # break the connection before this position, once per leg
        self.deaths_left = 10**9
        self.stall_at: int | None = None  # send nothing more before this position
        self.recompute_reason: str | None = None
        self.tokens_per_chunk = 1
        # What happened
        self.legs: list[Seen] = []
        self.refusals = 0
        self.running: set[str] = set()
        self.most_running = 0
        self.cancelled: list[str] = []
        self.polls = 0
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    # Life

    async def start(self, port: int = 0) -> "FakeWorker":
        """Listen; on the same port again after `kill`."""
        app = web.Application(client_max_size=8 << 20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._leg),
                web.post("/v1/completions", self._leg),
                web.get("/admin/state", self._state),
                web.post("/admin/role", self._role),
                web.post("/admin/cancel", self._cancel),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.engine_id = f"engine-{next(self._engines)}"
        return self

    async def kill(self) -> None:
        """Die as a process does: every connection breaks, the port refuses."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for task in list(self._tasks.values()):
            task.cancel()
        with contextlib.suppress(Exception):
            await self._runner.cleanup()
        self._runner = None

    async def stop(self) -> None:
        """End at the end of a test."""
        if self._runner is not None:
            await self.kill()

    def endpoint(self) -> dict[str, Any]:
        """Its entry in a routing file."""
        return {
            "pod": self.pod,
            "node": self.node,
            "pool": str(self.pool),
            "host": "127.0.0.1",
            "port": self.port,
            "transfer_port": 8100,
        }

    # Admin

    def _report(self) -> web.Response:
        report = WorkerReport(
            pod=self.pod,
            node=self.node,
            pool=self.pool,
            role=self.role,
            role_version=self.role_version,
            state=self.state,
            engine_id=self.engine_id,
            model=ModelFacts(
                name=MODEL,
                fingerprint=self.fingerprint,
                weights_bytes=1,
                kv_layout=LAYOUT,
                max_model_length=8192,
            ),
            kv_total_blocks=self.kv_total_blocks,
            num_running=len(self.running),
            profile=self.profile,
            links=self.links,
        )
        return web.Response(text=report.model_dump_json(), content_type="application/json")

    async def _state(self, request: web.Request) -> web.Response:
        self._check(request)
        self.polls += 1
        return self._report()

    async def _role(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        self._adopt(body["role"], body["version"])
        return self._report()

    async def _cancel(self, request: web.Request) -> web.Response:
        self._check(request)
        request_id = (await request.json())["request_id"]
        self.cancelled.append(request_id)
        self.cluster.held.pop(f"{self.pod}/{request_id}", None)
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
        return web.json_response({"cancelled": task is not None})

    def _check(self, request: web.Request) -> None:
        assert request.headers["Authorization"] == f"Bearer {ADMIN_TOKEN}"

    def _adopt(self, role: str, version: int) -> None:
        if version > self.role_version:
            self.role, self.role_version = Role(role), version

    # Legs

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        request_id = request.headers["x-request-id"]
        body = await request.json()
        if self.refuse_status:
            self.refusals += 1
            return web.json_response(self.refuse_body, status=self.refuse_status)
        self._adopt(request.headers["x-phasesplit-role"], int(request.headers["x-phasesplit-role-version"]))
        transfer = body.pop("kv_transfer_params", None)
        seen = Seen(
            request_id,
            request.headers["x-phasesplit-role"],
            int(request.headers["x-phasesplit-role-version"]),
            body,
            InternalParams.model_validate(body.pop("phasesplit")),
            None if transfer is None else KVTransferParams.model_validate(transfer),
        )
        self.legs.append(seen)
        self.running.add(request_id)
        self.most_running = max(self.most_running, len(self.running))
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request_id] = task
        try:
            return await self._run_leg(request, seen)
        finally:
            self.running.discard(request_id)
            self._tasks.pop(request_id, None)

    async def _run_leg(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(*events: dict[str, Any]) -> None:
            await response.write(
                b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            )

        try:
            async for events in self._events(seen):
                await send(*events)
        except _DeathError:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(self, seen: Seen) -> AsyncIterator[list[dict[str, Any]]]:  # noqa: C901  a script
        prompt = prompt_of(seen.body)
        length = seen.body.get("max_completion_tokens") or seen.body.get("max_tokens") or DEFAULT_LENGTH
        position = len(seen.internal.output_token_ids)
        for index, token in enumerate(seen.internal.output_token_ids):
            assert token == token_at(prompt, index), "replayed tokens are not those of the prompt"
        is_chat = "messages" in seen.body
        is_leg_1 = seen.transfer is not None and seen.transfer.do_remote_decode
        is_leg_2 = seen.transfer is not None and seen.transfer.do_remote_prefill
        prompt_tokens = max(1, len(prompt.encode()) // 4)
        if is_leg_1:
            yield [self._accepted(seen, prompt_tokens)]
        if is_leg_2:
            await self._pull(seen)
            position += 1
        else:
            self._check_script(position)
            await asyncio.sleep(self.prefill_s)
        if is_chat:
            yield [_chunk({"delta": {"role": "assistant", "content": ""}, "token_ids": []})]
        while position < length:
            if self.stall_at is not None and position >= self.stall_at:
                await asyncio.sleep(3600)
            tokens: list[int] = []
            while position < length and len(tokens) < self.tokens_per_chunk:
                if tokens == []:
                    self._check_script(position)
                tokens.append(token_at(prompt, position))
                position += 1
                if is_leg_1:
                    break
            text = "".join(map(text_of, tokens))
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            finish = "length" if is_leg_1 and position >= length else None
            if is_leg_1:
                self.cluster.held[f"{self.pod}/{seen.request_id}"].set()
            yield [_chunk(choice | {"token_ids": tokens, "finish_reason": finish})]
            if is_leg_1:
                break
            await asyncio.sleep(self.token_s)
        tail = [self._report_event(seen, prompt_tokens, position, is_leg_2)]
        if not is_leg_1:
            end = {"delta": {}} if is_chat else {"text": ""}
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": position, "total_tokens": 0}
            tail = [
                _chunk(end | {"token_ids": [], "finish_reason": "length"}),
                {"object": "chat.completion.chunk", "choices": [], "usage": usage},
                *tail,
            ]
        yield tail

    def _check_script(self, position: int) -> None:
        if self.die_at is not None and position >= self.die_at and self.deaths_left > 0:
            self.deaths_left -= 1
            raise _DeathError

    def _accepted(self, seen: Seen, prompt_tokens: int) -> dict[str, Any]:
        self.cluster.held[f"{self.pod}/{seen.request_id}"] = asyncio.Event()
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=seen.request_id,
            remote_host="127.0.0.1",
            remote_port=8100,
            remote_num_tokens=prompt_tokens,
            remote_pod=self.pod,
        )
        return PrefillAccepted(kv_transfer_params=params, num_prompt_tokens=prompt_tokens).model_dump()

    async def _pull(self, seen: Seen) -> None:
        assert seen.transfer is not None
        key = f"{seen.transfer.remote_pod}/{seen.transfer.remote_request_id}"
        held = self.cluster.held.get(key)
        if held is not None:
            async with asyncio.timeout(30):
                await held.wait()
            self.cluster.held.pop(key, None)

    def _report_event(
        self, seen: Seen, prompt_tokens: int, num_output: int, is_leg_2: bool
    ) -> dict[str, Any]:
        return LegReport(
            request_id=seen.request_id,
            pod=self.pod,
            node=self.node,
            role=seen.role,
            num_prompt_tokens=prompt_tokens,
            num_output_tokens=num_output,
            recomputed=self.recompute_reason if is_leg_2 else None,
            kv_bytes=prompt_tokens * LAYOUT.bytes_per_token if is_leg_2 else 0,
            kv_transport="TCP" if is_leg_2 else None,
        ).model_dump()


class _DeathError(Exception):
    """The script says: die now."""


def _chunk(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "worker-id",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": None, "logprobs": None} | choice],
    }
