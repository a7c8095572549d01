"""What the replay program reads and writes: one JSON object in, one JSON object per line out."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasesplit.planner.demand import Hardware
from phasesplit.planner.flips import Flip
from phasesplit.planner.replay import ReplayInput, ReplayOutcome
from phasesplit.planner.traffic import MAX_REQUESTS

MAX_JOB_BYTES = 4 << 20
_MAX_WORKERS = 4096
_MAX_CLASSES = 16
_MAX_TOKENS = 10_000_000
_MAX_S = 1e9
_MAX_BYTES = 1e12  # of one token's KV
_MIN_LINK = 1e-3  # bytes per second


class _Message(BaseModel):
    # Links and room without a bound are infinite.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class ReplayJob(_Message):
    """One window to be served again, both ways."""

    given: ReplayInput
    minimum_gain_percent: Annotated[float, Field(ge=0, le=1000)]

    @model_validator(mode="after")
    def _is_sane(self) -> "ReplayJob":
        given = self.given
        if len(given.trace) > MAX_REQUESTS:
            raise ValueError(f"{len(given.trace)} requests, at most {MAX_REQUESTS} may be replayed")
        _check_hardware(given.hardware)
        _check_terms(given)
        if not (0 < given.workers <= _MAX_WORKERS and 0 < len(given.classes) <= _MAX_CLASSES):
            raise ValueError(f"{given.workers} workers and {len(given.classes)} classes make no replay")
        for arrival in given.trace:
            lengths = (arrival.prompt_tokens, arrival.output_tokens, arrival.cached_tokens + 1)
            if not (0 <= arrival.at_s <= _MAX_S and all(0 < length <= _MAX_TOKENS for length in lengths)):
                raise ValueError(f"a request of lengths {lengths} at {arrival.at_s} cannot be replayed")
            if not 0 <= arrival.class_index < len(given.classes):
                raise ValueError(f"a request of class {arrival.class_index} of {len(given.classes)}")
        return self


def _check_hardware(hardware: Hardware) -> None:
    """Steps that take no time, or no end of it, would never bring the simulated clock on."""
    for phase, profile in (("prefill", hardware.prefill_profile), ("decode", hardware.decode_profile)):
        costs = (
            profile.base_s,
            profile.per_prefill_token_s,
            profile.per_prefill_context_s,
            profile.per_decode_sequence_s,
            profile.per_decode_context_s,
        )
        if not all(0 <= cost <= _MAX_S for cost in costs) or not 0 <= profile.overlap <= 1:
            raise ValueError(f"a {phase} profile of costs {costs} and overlap {profile.overlap}")
    link, room = hardware.link_bytes_per_s, hardware.kv_tokens_per_worker
    if not (0 <= hardware.kv_bytes_per_token <= _MAX_BYTES and link >= _MIN_LINK and room > 0):
        raise ValueError(f"{hardware.kv_bytes_per_token} B per token, links of {link} B/s, room for {room}")


def _check_terms(given: ReplayInput) -> None:
    for item in given.classes:
        if not (0 < item.ttft_s <= _MAX_S and 0 < item.tpot_s <= _MAX_S and 0 <= item.share <= 1):
            raise ValueError(f"class {item.name} with targets {item.ttft_s} s and {item.tpot_s} s")
    if given.max_num_seqs < 1 or (given.chunk_tokens is not None and given.chunk_tokens < 1):
        raise ValueError(f"{given.max_num_seqs} sequences and {given.chunk_tokens} tokens per step")


class ReplayLine(_Message):
    """The outcome first, then each flip as it is found."""

    outcome: ReplayOutcome | None = None
    flip: Flip | None = None
