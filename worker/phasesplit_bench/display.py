"""What a person sees of a run: a progress line while it runs, a table at its end."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from phasesplit_bench.client import Result
from phasesplit_bench.summary import LATE_S, Quantiles, Summary


class RunProgress:
    """A bar over the planned time, with counts. Use as a context manager."""

    def __init__(self, console: Console, duration_s: float) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=console,
            transient=not console.is_terminal,
        )
        self._duration_s = duration_s
        self._begin_s = time.monotonic()
        self._task: TaskID | None = None
        self._finished = self._rejected = self._failed = 0

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        self._task = self._progress.add_task("load", total=self._duration_s, counts="")
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()
        self._progress.stop()

    def take(self, result: Result) -> None:
        """Count one result."""
        self._finished += result.is_finished
        self._rejected += result.is_rejected
        self._failed += not result.is_finished and not result.is_rejected
        self.tick()

    def tick(self) -> None:
        """Move the bar to now."""
        if self._task is None:
            return
        elapsed_s = min(time.monotonic() - self._begin_s, self._duration_s)
        counts = f"{self._finished} ok, {self._rejected} refused, {self._failed} failed"
        self._progress.update(self._task, completed=elapsed_s, counts=counts)


def print_summary(console: Console, summary: Summary, *, title: str) -> None:
    """The table of a run."""
    table = Table(title=title)
    table.add_column("")
    for column in ("p50", "p95", "p99", "mean"):
        table.add_column(column, justify="right")
    for name, values in (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("second-token gap", summary.second_token_gap_s),
        ("end to end", summary.e2e_s),
    ):
        table.add_row(name, *_row(values))
    console.print(table)
    console.print(
        f"{summary.requests} requests in {summary.duration_s:.1f} s: {summary.finished} finished, "
        f"{summary.rejected} refused, {summary.failed} failed; "
        f"{summary.prompt_tokens_per_s:.1f} prompt tok/s, {summary.output_tokens_per_s:.1f} output tok/s"
    )
    if summary.attainment is not None and summary.goodput_per_s is not None:
        console.print(
            f"attained both targets: {summary.attained} of {summary.requests} ({summary.attainment:.1%}), "
            f"goodput {summary.goodput_per_s:.2f} requests/s"
        )
    if summary.late_p99_s is not None and summary.late_p99_s > LATE_S:
        console.print(
            f"warning: the client started requests up to {summary.late_p99_s * 1000:.0f} ms late (p99): "
            "it measures itself; lower --rate or use another machine",
            style="yellow",
        )


def _row(values: Quantiles) -> list[str]:
    return [_duration(value) for value in (values.p50, values.p95, values.p99, values.mean)]


def _duration(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
