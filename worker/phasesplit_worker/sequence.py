"""A sequence: the engine's unit of work, its sampling parameters and its token bookkeeping.

Knows tokens and block ids as plain integers. Does not know torch, HTTP or scheduling policy.

    token_ids    [ prompt ........ | replayed | first token | further output ]
                 0                 P          K             K+1
    known at arrival: the first K = num_known_tokens (prompt plus output replayed by the router)
    computed:         KV is present for token_ids[:num_computed_tokens]
    A sequence catches up: it needs KV for token_ids[:num_tokens]; computing the last of these
    yields the next token.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # queued, holds no blocks
    RUNNING = "running"  # holds blocks, takes part in steps
    REMOTE = "remote"  # holds reserved blocks that a KV transfer fills
    HELD = "held"  # prefilled, holds blocks until they are pulled or released
    FINISHED = "finished"


class RequestKind(StrEnum):
    """Which leg of a request the engine runs."""

    LOCAL = "local"  # prefill and decode here
    PREFILL = "prefill"  # leg 1: stop after the first token and hold the KV
    DECODE = "decode"  # leg 2: KV arrives from a peer, streams from the second token on


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. `temperature == 0` is greedy."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None
    stop: tuple[str, ...] = ()  # enforced by whoever detokenises, through Detokenizer
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One request inside the engine. Owned and changed by the engine thread alone."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # resolved: never None
    output_token_ids: list[int] = field(default_factory=list)  # replayed tokens included
    kind: RequestKind = RequestKind.LOCAL
    priority: int = 0  # higher goes first
    slo_class: str = "default"
    status: SequenceStatus = SequenceStatus.WAITING

    num_known_tokens: int = 0  # prompt plus replayed output; set from the lists when left at 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the first admission, from the prefix cache
    num_scheduled_tokens: int = 0  # in the step being run
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # chained, one per full block, grown lazily
    awaits_remote: bool = False  # leg 2 that has not got its KV and has not given up on it
    num_preemptions: int = 0
    recomputed: str | None = None  # why leg 2 prefilled locally

    # Monotonic seconds; None: has not happened.
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        if not self.num_known_tokens:
            self.num_known_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_prefill_only(self) -> bool:
        """Leg 1: stops after the first token and holds its KV blocks until released."""
        return self.kind is RequestKind.PREFILL

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known now: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is missing, and it was generated here or by leg 1."""
        return self.num_pending_tokens == 1 and self.num_tokens > self.num_known_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output in one list (a copy)."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def slice_token_ids(self, start: int, end: int) -> list[int]:
        """`token_ids[start:end]` without copying the rest."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return list(self.prompt_token_ids[start:end])
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: end - num_prompt]]
