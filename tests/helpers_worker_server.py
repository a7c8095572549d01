"""A worker's parts with behaviour but without torch: an engine that counts, a tokenizer of bytes.

The fake engine's answer to a prompt is a fixed function of it, one token per step, on a thread of
its own, so that the server is tested against real concurrency. Blocks are counted: one per request.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVLayout, KVManifest
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import LinkSample, ModelFacts, ProbeRequest, ProbeResult, StepProfile
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.engine.tokenizer import Detokenizer
from phasesplit_worker.errors import EngineBusyError, EngineStoppedError, RequestError
from phasesplit_worker.requests import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    OnOutput,
    RequestTimings,
    Reservation,
    StepRecord,
    TokenLogprob,
)
from phasesplit_worker.sequence import RequestKind
from phasesplit_worker.server.ports import Parts, Pulled, PullFailedError

EOS = 256
MODEL = "tiny"
ADMIN_TOKEN = "admin-token"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")
DEFAULT_ANSWER = "The answer is forty-two. Ünïcode too."


def config(**changes: object) -> WorkerConfig:
    """A worker's configuration."""
    values = {"model_name": MODEL, "object_name": "chat", "namespace": "ns", "pool": Pool.PREFILL}
    return WorkerConfig(**(values | changes))  # type: ignore[arg-type]


class ByteTokenizer:
    """One token per byte; 256 ends an answer."""

    vocabulary_size = 257
    end_token_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise RequestError("messages: the template wants a user's message first")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def decoder(self, stop: Sequence[str], min_tokens: int) -> Detokenizer:
        return Detokenizer(self, stop, min_tokens=min_tokens)  # type: ignore[arg-type]

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([token_id])


@dataclass
class _Run:
    request: EngineRequest
    on_output: OnOutput
    output: list[int] = field(default_factory=list)
    is_remote: bool = False
    is_held: bool = False
    skips_first: bool = False
    recomputed: str | None = None


class CountingEngine:
    """Answers every prompt with the same text, one token per step."""

    def __init__(self, answer: str = DEFAULT_ANSWER, step_s: float = 0.0, max_requests: int = 64) -> None:
        self.facts = ModelFacts(
            name=MODEL, fingerprint="f", weights_bytes=1000, kv_layout=LAYOUT, max_model_length=200
        )
        self.answer = [*answer.encode(), EOS]
        self.step_s = step_s
        self.max_requests = max_requests
        self.longest_step_s = 0.1
        self.heartbeat_s = time.monotonic()
        self.is_stuck = False
        self.failure: str | None = None
        self.is_paced = False
        self.roles: list[tuple[Role, int | None, float | None]] = []
        self.requests: list[EngineRequest] = []
        self.num_steps = 0
        self.on_step: Callable[[StepRecord], None] = lambda step: None
        self._runs: dict[str, _Run] = {}
        self._lock = threading.RLock()
        self._is_stopped = threading.Event()
        self._is_draining = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _loop(self) -> None:
        while not self._is_stopped.wait(self.step_s or 0.0005):
            if self.is_stuck:
                continue
            self.heartbeat_s = time.monotonic()
            with self._lock:
                for run in list(self._runs.values()):
                    if not (run.is_remote or run.is_held):
                        self._step(run)

    def _step(self, run: _Run) -> None:
        self.num_steps += 1
        request, skipped = run.request, ()
        if run.skips_first and not run.output:
            run.output.append(self.answer[len(request.output_token_ids)])
            skipped = tuple(run.output)
        index = len(request.output_token_ids) + len(run.output)
        token = self.answer[index] if index < len(self.answer) else EOS
        run.output.append(token)
        reason = None
        if token == EOS and not request.sampling.ignore_eos:
            reason = "stop"
        elif index + 1 >= request.sampling.max_tokens:
            reason = "length"
        elif request.kind is RequestKind.PREFILL:
            run.is_held = True
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprob(token, -0.5, ((token, -0.5), (0x78, -1.5))),)
        self._give(run, EngineOutput(
            request_id=request.request_id, token_ids=(token,), skipped_token_ids=skipped,
            finish_reason=reason, logprobs=logprobs,
            timings=self._timings(run) if reason or run.is_held else None,
        ))  # fmt: skip
        self.on_step(StepRecord(prefill_tokens=0, prefill_context=0, decode_sequences=1,
                                decode_context_tokens=1, seconds=0.001))  # fmt: skip
        if reason and not run.is_held:
            del self._runs[request.request_id]

    def _timings(self, run: _Run) -> RequestTimings:
        return RequestTimings(num_cached_tokens=3, recomputed=run.recomputed, queue_s=0.25)

    def _give(self, run: _Run, output: EngineOutput) -> None:
        run.on_output(output)

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        with self._lock:
            self._admit(request)
            self._runs[request.request_id] = _Run(request, on_output)

    def _admit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        if self._is_draining:
            raise EngineStoppedError("The engine is draining.")
        if len(self._runs) >= self.max_requests:
            raise EngineBusyError(f"The queue holds {self.max_requests} requests; try again later.")
        assert request.request_id not in self._runs

    def reserve(self, request: EngineRequest, on_output: OnOutput) -> Future[Reservation]:
        future: Future[Reservation] = Future()
        with self._lock:
            self._admit(request)
            self._runs[request.request_id] = _Run(request, on_output, is_remote=True, skips_first=True)
        future.set_result(Reservation((1, 2), 0))
        return future

    def start_remote(self, request_id: str, first_token: int, num_computed_tokens: int) -> None:
        with self._lock:
            assert first_token == self.answer[len(self._runs[request_id].request.output_token_ids)]
            self._runs[request_id].is_remote = False

    def recompute(self, request_id: str, reason: str, first_token: int | None = None) -> None:
        with self._lock:
            self._runs[request_id].recomputed = reason
            self._runs[request_id].is_remote = False

    def release_held(self, request_id: str) -> None:
        self.abort(request_id)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        with self._lock:
            run = self._runs.pop(request_id, None)
            if run is not None and not run.is_held:
                self._give(
                    run, EngineOutput(request_id=request_id, finish_reason=reason, timings=self._timings(run))
                )

    def fail(self, request_id: str, message: str) -> None:
        """End a request with an error, as after a failed step."""
        with self._lock:
            run = self._runs.pop(request_id)
            self._give(
                run,
                EngineOutput(
                    request_id=request_id, finish_reason="error", error=message, timings=self._timings(run)
                ),
            )

    def stats(self) -> EngineStats:
        with self._lock:
            held = sum(run.is_held for run in self._runs.values())
            return EngineStats(
                kv_total_blocks=100, kv_used_blocks=len(self._runs), num_held=held,
                num_running=len(self._runs) - held, num_preemptions_total=2,
            )  # fmt: skip

    def profile(self) -> StepProfile:
        return StepProfile(base_s=0.01)

    def set_role(
        self, role: Role, max_batched_tokens: int | None = None, max_step_s: float | None = None
    ) -> None:
        self.roles.append((role, max_batched_tokens, max_step_s))

    def drain(self) -> None:
        self._is_draining = True

    def stop(self, timeout_s: float) -> bool:
        self._is_stopped.set()
        for request_id in list(self._runs):
            self.abort(request_id)
        return True

    def is_idle(self) -> bool:
        return not self._runs


class RecordingTransfer:
    """Pulls succeed with the fake answer's first token, or fail or hang as told."""

    def __init__(self, engine: CountingEngine) -> None:
        self._engine = engine
        self.fails_with: PullFailedError | None = None
        self.gate: Callable[[], object] | None = None
        self.manifests: dict[str, KVManifest] = {}
        self.transfers_total = 0
        self.failures_total: dict[str, int] = {}
        self.failures_by_peer: dict[str, dict[str, int]] = {}

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    def offer(self, request_id: str, num_tokens: int) -> KVTransferParams:
        return KVTransferParams(
            do_remote_prefill=True, remote_engine_id="e1", remote_request_id=request_id,
            remote_host="127.0.0.1", remote_port=8100, remote_num_tokens=num_tokens, remote_pod="p0",
        )  # fmt: skip

    async def pull(
        self, request: EngineRequest, params: KVTransferParams, reservation: Reservation
    ) -> Pulled:
        if self.gate is not None:
            await self.gate()  # type: ignore[misc]
        if self.fails_with is not None:
            raise self.fails_with
        self.transfers_total += 1
        return Pulled(
            first_token=self._engine.answer[len(request.output_token_ids)],
            num_tokens=request.num_known_tokens, num_bytes=4096, transport="TCP",
            seconds=0.02, busy_s=0.01, exposed_s=0.005,
        )  # fmt: skip

    def manifest(self, request_id: str) -> KVManifest | None:
        return self.manifests.get(request_id)

    async def probe(self, request: ProbeRequest) -> ProbeResult:
        return ProbeResult(error=f"cannot reach {request.host}")

    def link_samples(self) -> list[LinkSample]:
        return []


def make_parts(engine: CountingEngine | None = None) -> Parts:
    """Engine, tokenizer and transfer."""
    engine = engine or CountingEngine()
    return Parts(engine=engine, tokenizer=ByteTokenizer(), transfer=RecordingTransfer(engine))


def sse_events(text: str) -> list[str]:
    """The data of each event of a stream."""
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


async def wait_until(predicate: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until true, because what is waited for happens on threads."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
