"""Traffic as the operator knows it, for tests of replays and trials."""

from collections.abc import Iterable, Sequence

from phasesplit.api.traces import TraceBatch, TraceOutcome
from phasesplit.planner.simulation_types import Arrival
from phasesplit.planner.traffic import ServedRequest


def served(at_s: float, **changes: object) -> ServedRequest:
    """A request of 100 prompt and 10 answer tokens that met its targets."""
    known: dict[str, object] = {
        "class_name": "default",
        "split": False,
        "attained": True,
        "counted": True,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 10,
        "e2e_s": 2.0,
    }
    return ServedRequest(at_s=at_s, **{**known, **changes})  # type: ignore[arg-type]


def served_trace(trace: Iterable[Arrival], start_s: float, *, e2e_s: float = 5.0) -> list[ServedRequest]:
    """A random trace as if it had been served."""
    return [
        served(
            start_s + arrival.at_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            cached_tokens=arrival.cached_tokens,
            e2e_s=e2e_s,
        )
        for arrival in trace
    ]


def batch(epoch: str, first: int, arrivals_s: list[float], now_s: float, **changes: object) -> TraceBatch:
    """An answer of a router: rows from `first` on."""
    count = len(arrivals_s)
    known: dict[str, object] = {
        "epoch": epoch,
        "now_s": now_s,
        "next": first + count,
        "total": first + count,
        "classes": ("default",),
        "arrival_s": arrivals_s,
        "class_index": (0,) * count,
        "split": (False,) * count,
        "attained": (True,) * count,
        "outcome": (TraceOutcome.FINISHED,) * count,
        "prompt_tokens": (100,) * count,
        "cached_tokens": (0,) * count,
        "output_tokens": (10,) * count,
        "ttft_s": (0.1,) * count,
        "e2e_s": (1.0,) * count,
        "open_total": 0,
    }
    return TraceBatch.model_validate({**known, **changes})


def in_flight(arrivals_s: Sequence[float], **changes: object) -> dict[str, object]:
    """Columns of an answer for requests of 100 prompt tokens that have come and not ended."""
    count = len(arrivals_s)
    known: dict[str, object] = {
        "open_total": count,
        "open_arrival_s": tuple(arrivals_s),
        "open_class_index": (0,) * count,
        "open_prompt_tokens": (100,) * count,
        "open_cached_tokens": (None,) * count,
        "open_output_tokens": (0,) * count,
    }
    return {**known, **changes}
