"""Builds engines over tiny models for tests, and runs them without a thread."""

import functools
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from helpers_models import tiny_model_dir
from phasesplit.api.names import Pool
from phasesplit.api.reports import StepProfile
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.engine.core import EngineCore
from phasesplit_worker.model.loader import LoadedModel, load_model
from phasesplit_worker.requests import EngineOutput, EngineRequest, Reservation
from phasesplit_worker.scheduling.block_manager import BlockManager
from phasesplit_worker.scheduling.scheduler import Scheduler, StepLimits
from phasesplit_worker.sequence import RequestKind, SamplingParams, Sequence
from phasesplit_worker.token_hash import salt_of

BLOCK_SIZE = 16
FLAT_PROFILE = StepProfile(base_s=0.001, per_prefill_token_s=0.0001, per_decode_sequence_s=0.0001)


def worker_config(variant: str = "llama", **changes: object) -> WorkerConfig:
    """Configuration of a worker for a tiny model."""
    values: dict[str, object] = {
        "model_path": tiny_model_dir(variant),
        "model_name": "tiny",
        "object_name": "tiny",
        "namespace": "default",
        "pool": Pool.PREFILL,
        "kv_cache_bytes": 8 << 20,
    }
    return WorkerConfig(**(values | changes))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4)
def loaded_model(variant: str = "llama", *, reference: bool = False) -> LoadedModel:
    """A tiny model; shared, so a test leaves nothing in its KV cache that others rely on."""
    torch.set_num_threads(1)
    return load_model(worker_config(variant), reference=reference)


@functools.lru_cache(maxsize=4)
def plain_model(variant: str = "llama") -> torch.nn.Module:
    """The same model as transformers runs it."""
    # Imported here: transformers' model code takes seconds to import, and few tests need it.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(variant), dtype=torch.float32
    )
    return model


def plain_logits(variant: str, token_ids: Iterable[int]) -> torch.Tensor:
    """Logits of every position by plain transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = plain_model(variant)(torch.tensor([list(token_ids)])).logits[0]
    return logits


def plain_greedy(variant: str, prompt: Iterable[int], max_tokens: int) -> list[int]:
    """Greedy continuation by plain transformers."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = plain_model(variant).generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def plain_greedy_along(
    variant: str, prompt: Iterable[int], answer: Iterable[int], max_tokens: int
) -> list[int]:
    """Plain transformers' greedy token after each beginning of an answer, up to the end of a sequence.

    An answer that equals this is the greedy continuation, by induction over its tokens; one pass finds
    it, where `plain_greedy` takes a pass for each token.
    """
    known, given = tuple(prompt), tuple(answer)
    best: list[int] = plain_logits(variant, (*known, *given))[len(known) - 1 :].argmax(-1).tolist()
    end = plain_model(variant).config.eos_token_id  # type: ignore[union-attr]
    return best[: min(max_tokens, best.index(end) + 1 if end in best else max_tokens)]


def random_prompt(generator: random.Random, length: int) -> tuple[int, ...]:
    """Token ids that are no special tokens."""
    return tuple(generator.randrange(5, 512) for _ in range(length))


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    """Greedy sampling parameters."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


@dataclass
class Collector:
    """Receives outputs of one request."""

    outputs: list[EngineOutput] = field(default_factory=list)

    def __call__(self, output: EngineOutput) -> None:
        self.outputs.append(output)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def skipped(self) -> list[int]:
        return [token for output in self.outputs for token in output.skipped_token_ids]

    @property
    def last(self) -> EngineOutput | None:
        finished = [output for output in self.outputs if output.is_last]
        if len(finished) > 1:
            raise AssertionError("more than one last output")
        return finished[0] if finished else None


class RecordingHooks:
    """A transfer side that only remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_prefill_accepted(self, sequence: Sequence) -> None:
        self.events.append(("accepted", sequence.request_id, sequence.num_known_tokens))

    def on_blocks_ready(self, request_id: str, num_ready_tokens: int, block_table: tuple[int, ...]) -> None:
        self.events.append(("ready", request_id, num_ready_tokens, block_table))

    def on_prefill_finished(self, request_id: str, first_token: int, sampling_state: dict[str, int]) -> None:
        self.events.append(("finished", request_id, first_token, dict(sampling_state)))

    def on_prefill_aborted(self, request_id: str, reason: str) -> None:
        self.events.append(("aborted", request_id, reason))


@dataclass
class Bench:
    """An engine core with its parts, run by hand."""

    core: EngineCore
    scheduler: Scheduler
    blocks: BlockManager
    loaded: LoadedModel
    hooks: RecordingHooks
    now: list[float]

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams,
        *,
        kind: RequestKind = RequestKind.LOCAL,
        priority: int = 0,
        output_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Collector:
        collector = Collector()
        self.now[0] += 0.001
        self.core.add(
            self._request(request_id, prompt, sampling, kind, priority, output_token_ids, seed),
            collector,
            self.now[0],
        )
        return collector

    def reserve(
        self,
        request_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        output_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> tuple[Collector, Future[Reservation]]:
        collector, reservation = Collector(), Future()
        self.now[0] += 0.001
        request = self._request(
            request_id, prompt, sampling, RequestKind.DECODE, priority, output_token_ids, seed
        )
        self.core.add(request, collector, self.now[0], reservation)
        return collector, reservation

    @staticmethod
    def _request(
        request_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams,
        kind: RequestKind,
        priority: int,
        output_token_ids: tuple[int, ...],
        seed: int | None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            kind=kind,
            priority=priority,
            output_token_ids=output_token_ids,
            seed=seed,
        )

    def step(self) -> bool:
        self.now[0] += 0.001
        worked = self.core.step() is not None
        self.core.check_integrity()
        return worked

    def run(self, until: Callable[[], bool] | None = None, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if until() if until is not None else not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the engine did not finish in time")


def build_bench(
    variant: str = "llama",
    *,
    reference: bool = False,
    num_blocks: int | None = None,
    max_prefill_tokens: int = 8192,
    max_num_seqs: int = 64,
) -> Bench:
    """An engine core over a tiny model; `num_blocks` makes KV short."""
    loaded = loaded_model(variant, reference=reference)
    total = loaded.kv_cache.num_blocks
    blocks = BlockManager(min(num_blocks or total, total), BLOCK_SIZE, salt_of(loaded.facts.fingerprint))
    limits = StepLimits(max_num_seqs, None, max_prefill_tokens)
    scheduler = Scheduler(blocks, limits, FLAT_PROFILE)
    now = [0.0]
    core = EngineCore(loaded, scheduler, lambda: now[0], quarantine_s=30.0)
    hooks = RecordingHooks()
    core.set_hooks(hooks)
    return Bench(core, scheduler, blocks, loaded, hooks, now)
