"""What a router remembers of its last requests for the operator to serve again on paper: no text.

`GET /v1/phasesplit/trace?epoch=<epoch>&after=<next>` answers with the rows that ended since, as columns
of equal length, and with the requests that have come and not ended, which replace those of the answer before.
A reader that was away for too long is told how many rows it has lost.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_ROWS = 1024  # of one answer
MAX_OPEN = 2048  # requests that have not ended, the newest
MAX_TOKENS = 10_000_000
_MAX_S = 1e9


class TraceOutcome(IntEnum):
    """How a request ended."""

    FINISHED = 0
    REJECTED = 1
    FAILED = 2
    ABANDONED = 3  # the client went away: load, but neither attained nor missed


_Rows = Field(default=(), max_length=MAX_ROWS)
_OpenRows = Field(default=(), max_length=MAX_OPEN)
_ClassIndex = Annotated[int, Field(ge=0, lt=MAX_ROWS)]
_Seconds = Annotated[float, Field(ge=0, le=_MAX_S, allow_inf_nan=False)]
_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class TraceBatch(BaseModel):
    """Rows in the order in which the requests ended. Times are seconds since the router's start."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    epoch: Annotated[str, Field(max_length=64)]  # of the router process; another one counts from 0 again
    now_s: _Seconds  # when this answer was made
    next: Annotated[int, Field(ge=0)]  # `after` of the next question
    total: Annotated[int, Field(ge=0)]  # rows so far; more than `next`: ask again at once
    lost: Annotated[int, Field(ge=0)] = 0  # rows between `after` and the first one that have left the ring
    classes: Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(max_length=MAX_ROWS)] = ()

    arrival_s: tuple[_Seconds, ...] = _Rows
    class_index: tuple[_ClassIndex, ...] = _Rows  # in `classes`
    split: tuple[bool, ...] = _Rows  # served by a pair
    attained: tuple[bool, ...] = _Rows
    # In a trial that serves both modes at once: drawn for the split, or not. Empty from an older router.
    drawn: tuple[bool | None, ...] = _Rows
    outcome: tuple[TraceOutcome, ...] = _Rows
    # Of a request that did not finish, lengths are what the router expected.
    prompt_tokens: tuple[_Tokens, ...] = _Rows
    cached_tokens: tuple[_Tokens, ...] = _Rows
    output_tokens: tuple[_Tokens, ...] = _Rows
    ttft_s: tuple[_Seconds | None, ...] = _Rows
    e2e_s: tuple[_Seconds | None, ...] = _Rows

    # Of the requests that wait or are being answered; more of them than rows: the oldest are left out.
    # None from an older router, which does not tell.
    open_total: Annotated[int, Field(ge=0)] | None = None
    open_arrival_s: tuple[_Seconds, ...] = _OpenRows
    open_class_index: tuple[_ClassIndex, ...] = _OpenRows
    open_prompt_tokens: tuple[_Tokens, ...] = _OpenRows  # what the router expects until a worker has counted
    open_cached_tokens: tuple[_Tokens | None, ...] = _OpenRows  # None until a worker has counted
    open_output_tokens: tuple[_Tokens, ...] = _OpenRows  # put out so far

    @model_validator(mode="after")
    def _is_rectangular(self) -> "TraceBatch":
        lengths = {len(column) for column in self._columns()} | ({len(self.drawn)} if self.drawn else set())
        if len(lengths) != 1:
            raise ValueError(f"columns of {sorted(lengths)} rows; all must be as long as arrival_s")
        lengths = {len(column) for column in self._open_columns()}
        if len(lengths) != 1:
            raise ValueError(f"open columns of {sorted(lengths)} rows; all must be as long as open_arrival_s")
        if len(self.open_arrival_s) > (self.open_total or 0):
            raise ValueError(f"{len(self.open_arrival_s)} open rows, but open_total is {self.open_total}")
        if any(index >= len(self.classes) for index in (*self.class_index, *self.open_class_index)):
            raise ValueError(f"class_index beyond the {len(self.classes)} classes")
        return self

    def _columns(self) -> Sequence[Sequence[object]]:
        return (
            self.arrival_s,
            self.class_index,
            self.split,
            self.attained,
            self.outcome,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.ttft_s,
            self.e2e_s,
        )

    def _open_columns(self) -> Sequence[Sequence[object]]:
        return (
            self.open_arrival_s,
            self.open_class_index,
            self.open_prompt_tokens,
            self.open_cached_tokens,
            self.open_output_tokens,
        )
