"""What the replay program reads and writes: one JSON object in, one JSON object per line out."""

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasesplit.planner.flips import Flip
from phasesplit.planner.replay import ReplayInput, ReplayOutcome
from phasesplit.planner.traffic import MAX_REQUESTS

MAX_JOB_BYTES = 4 << 20
_MAX_WORKERS = 4096
_MAX_CLASSES = 16
_MAX_TOKENS = 10_000_000


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
        if not (0 < given.workers <= _MAX_WORKERS and 0 < len(given.classes) <= _MAX_CLASSES):
            raise ValueError(f"{given.workers} workers and {len(given.classes)} classes make no replay")
        for arrival in given.trace:
            lengths = (arrival.prompt_tokens, arrival.output_tokens, arrival.cached_tokens + 1)
            if not (math.isfinite(arrival.at_s) and all(0 < length <= _MAX_TOKENS for length in lengths)):
                raise ValueError(f"a request of lengths {lengths} at {arrival.at_s} cannot be replayed")
            if not 0 <= arrival.class_index < len(given.classes):
                raise ValueError(f"a request of class {arrival.class_index} of {len(given.classes)}")
        return self


class ReplayLine(_Message):
    """The outcome first, then each flip as it is found."""

    outcome: ReplayOutcome | None = None
    flip: Flip | None = None
