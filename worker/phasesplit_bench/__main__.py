"""`python -m phasesplit_bench run`: load against an OpenAI endpoint, one JSON line per request."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from phasesplit_bench.arrivals import Length
from phasesplit_bench.client import Result, Target
from phasesplit_bench.display import RunProgress, print_summary
from phasesplit_bench.load import BenchError, Plan, find_model, run_load
from phasesplit_bench.summary import summarise

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def _root() -> None:
    """Load and measurement against OpenAI endpoints."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Where results go besides the table."""

    lines: Path | None
    as_json: bool
    ttft_s: float | None
    tpot_s: float | None
    warmup_s: float


@app.command()
def run(
    *,
    url: Annotated[str, typer.Option(help="Base address of the endpoint, without /v1.")],
    rate: Annotated[float | None, typer.Option(help="Requests per second, Poisson (open loop).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once (closed loop).")] = None,
    duration_s: Annotated[float, typer.Option(min=0.1, help="Seconds in which requests start.")] = 30.0,
    prompt_tokens: Annotated[str, typer.Option(help="About so many, as 512 or 100:1000.")] = "256",
    output_tokens: Annotated[str, typer.Option(help="max_tokens, as 64 or 16:128.")] = "64",
    slo_class: Annotated[str | None, typer.Option("--class", help="Value of x-slo-class.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer key.")] = None,
    ttft_s: Annotated[float | None, typer.Option(help="TTFT target for attainment.")] = None,
    tpot_s: Annotated[float | None, typer.Option(help="TPOT target for attainment.")] = None,
    warmup_s: Annotated[float, typer.Option(min=0, help="Requests starting earlier are left out.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest time of one request.")] = 600.0,
    ignore_eos: Annotated[bool, typer.Option(help="Make every answer as long as asked for.")] = True,
    seed: Annotated[int, typer.Option(help="Same seed: same arrivals and prompts.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for one JSON line per request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Send load and print TTFT, TPOT, second-token gap and attainment."""
    try:
        _check_load(rate, concurrency)
        plan = Plan(
            duration_s=duration_s,
            rate_per_s=rate,
            concurrency=concurrency,
            prompt_tokens=Length.parse(prompt_tokens),
            output_tokens=Length.parse(output_tokens),
            seed=seed,
        )
        base = url.rstrip("/").removesuffix("/v1")
        target = Target(
            url=base,
            model=model or asyncio.run(find_model(base, api_key)),
            slo_class=slo_class,
            api_key=api_key,
            ignore_eos=ignore_eos,
            timeout_s=timeout_s,
        )
        _run(target, plan, _Report(output, as_json, ttft_s, tpot_s, warmup_s))
    except (BenchError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _check_load(rate: float | None, concurrency: int | None) -> None:
    if (rate is None) == (concurrency is None):
        raise BenchError("--rate or --concurrency: give exactly one of them.")
    if rate is not None and rate <= 0:
        raise BenchError(f"--rate {rate}: it must be greater than 0.")


def _run(target: Target, plan: Plan, report: _Report) -> None:
    console = Console(stderr=report.as_json)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(report.lines.open("w", encoding="utf-8")) if report.lines else None
        progress = stack.enter_context(RunProgress(console, plan.duration_s))
        take = _taker(results, progress, lines)
        with contextlib.suppress(KeyboardInterrupt):  # what was measured so far is still shown
            asyncio.run(_with_ticks(target, plan, take, progress))
    summary = summarise(
        results, ttft_target_s=report.ttft_s, tpot_target_s=report.tpot_s, warmup_s=report.warmup_s
    )
    load = f"{plan.rate_per_s:g} requests/s" if plan.rate_per_s else f"{plan.concurrency} at once"
    print_summary(console, summary, title=f"{target.model} at {target.url}, {load}, {plan.duration_s:g} s")
    if report.as_json:
        typer.echo(json.dumps(summary.to_json()))


def _taker(results: list[Result], progress: RunProgress, lines: TextIO | None) -> Callable[[Result], None]:
    def take(result: Result) -> None:
        results.append(result)
        progress.take(result)
        if lines is not None:
            lines.write(result.to_json() + "\n")
            lines.flush()

    return take


async def _with_ticks(
    target: Target, plan: Plan, take: Callable[[Result], None], progress: RunProgress
) -> None:
    async def tick() -> None:
        while True:
            await asyncio.sleep(0.25)
            progress.tick()

    ticking = asyncio.create_task(tick())
    try:
        await run_load(target, plan, on_result=take)
    finally:
        ticking.cancel()


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
