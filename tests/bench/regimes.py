"""Regimes by link, prompt length, targets and load: what Auto decides, and whether it was right.

    make bench-regimes
    .venv/bin/python -m bench.regimes --only "slow link"    # from tests/

Each regime is served colocated first, on paced workers. What was served there is replayed, and the planner
decides, as the operator does. Then the same trace is served split, in the replay's best ratio, and the
shares of requests in target are compared. A decision is right when the chosen mode kept more requests in
target; below a difference of 5 % either one counts as right. "Waited" is the share of the time for which
workers and router waited for a processor: above 10 % the machine was too busy to play devices.
"""

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "worker"), str(ROOT / "tests")]

from helpers_truth import (  # noqa: E402
    DEVICE,
    Shape,
    count_tokens_per_word,
    describe_machine,
    last_line,
    poisson_trace,
    run_until_told,
    send_trace,
    simulated_trace,
)
from helpers_truth_regimes import Regime, Served, Verdict, decide, situation, split_plan  # noqa: E402
from helpers_truth_site import EffortMeter, Site, running_site, text_model_dir  # noqa: E402
from phasesplit.api.routing import ServedMode  # noqa: E402

WORKERS = 4
LONG = ((600, 1400),)
SHORT = ((40, 120),)
SPLIT, COLOCATED = ServedMode.SPLIT, ServedMode.COLOCATED
FAST, SLOW = 100e6, 0.3e6  # bytes per second
REGIMES = (
    Regime("long prompts, tight TPOT", Shape(1.0, 90, LONG, ((12, 24),)), 15.0, 0.4, SPLIT, FAST),
    Regime("tight TTFT, relaxed TPOT", Shape(0.9, 80, LONG, ((8, 16),)), 3.5, 3.0, COLOCATED, FAST),
    Regime("short prompts, decode-heavy", Shape(2.0, 100, SHORT, ((24, 48),)), 2.0, 0.36, COLOCATED, FAST),
    Regime("low load", Shape(0.3, 30, LONG, ((12, 24),)), 8.0, 0.8, COLOCATED, FAST),
    Regime("both too tight", Shape(0.8, 50, LONG, ((12, 24),)), 1.0, 0.3, COLOCATED, FAST),
    Regime("slow link", Shape(0.9, 70, LONG, ((12, 24),)), 15.0, 0.4, COLOCATED, SLOW),
)


async def judge(site: Site, regime: Regime, options: argparse.Namespace) -> Verdict:
    """Serve colocated, decide, serve split."""
    site.set_link(regime.link_bytes_per_s)
    await site.serve(None, (regime.target,))
    ratio = await count_tokens_per_word(site.target)
    shape = replace(regime.shape, requests=round(options.scale * regime.shape.requests))
    trace = poisson_trace(shape, options.seed, ratio, f"{regime.name} colocated")
    meter = EffortMeter(site)
    colocated = await send_trace(site.target, trace)
    efforts = [meter.read()]
    await site.settle()
    given = situation(colocated, regime, await site.worker_facts(), await site.probe_links())
    decision, outcome = decide(given, simulated_trace(colocated, trace, ratio), regime)
    await site.serve(split_plan(outcome).prefill, (regime.target,))
    await asyncio.sleep(2.0)  # roles reach the workers with the router's next polls
    meter = EffortMeter(site)
    split = await send_trace(site.target, poisson_trace(shape, options.seed, ratio, f"{regime.name} split"))
    efforts.append(meter.read())
    await site.settle()
    lines = (f"{regime.name}: {decision.message}", *map(str, efforts))
    print("\n".join(lines), file=sys.stderr, flush=True)
    waited = max(effort.waited_share for effort in efforts)
    return Verdict(regime, decision, outcome, Served.of(colocated, regime), Served.of(split, regime), waited)


def show(verdict: Verdict) -> str:
    """One row of the table."""
    found, decision = verdict.outcome, verdict.decision

    def side(served: Served, predicted: float) -> str:
        return (
            f"{served.attained:.0%} (predicted {predicted:.0%}; p90 TTFT {served.ttft_p90_s:.2f} s, "
            f"TPOT {served.tpot_p90_s * 1000:.0f} ms)"
        )

    return (
        f"| {verdict.regime.name} | {verdict.regime.expected} | {decision.mode}, {decision.reason} "
        f"| {side(verdict.colocated, found.colocated.attainment)} "
        f"| {verdict.plan.prefill}:{verdict.plan.decode}: {side(verdict.split, found.split.attainment)} "
        f"| {'right' if verdict.right else 'WRONG'} | {verdict.waited_share:.0%} |"
    )


def row_of(verdict: Verdict) -> dict[str, object]:
    """One entry of the last line."""
    return {
        "name": f"{verdict.regime.name}: {verdict.decision.mode}",
        "value": verdict.split.attained,
        "unit": "share in target, split against colocated",
        "against": verdict.colocated.attained,
        "bar": None,
        "holds": verdict.right,
        "waited": round(verdict.waited_share, 3),
    }


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """Regime after regime on the same workers."""
    chosen = [item for item in REGIMES if options.only is None or item.name in options.only]
    rows: list[dict[str, object]] = []
    print(
        "| regime | expected | decision | colocated in target | split in target | decision was | waited |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    async with running_site(WORKERS, pace=DEVICE, model=text_model_dir(), relays=True) as site:
        for regime in chosen:
            verdict = await judge(site, regime, options)
            print(show(verdict), flush=True)
            rows.append(row_of(verdict))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[item.name for item in REGIMES], help="some regimes")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(describe_machine())
    print(last_line("regimes", run_until_told(run(options))))


if __name__ == "__main__":
    main()
