"""Auto on the testbed: what it does by itself in each regime, and whether the other mode was better.

    make bench-auto
    .venv/bin/python -m bench.auto --only "long prompts, tight TPOT"    # from tests/

A real cluster, four paced workers on two nodes. Each regime sends its requests to a new object in
`mode: Auto` until a split has stood for a while or the time is up, printing each change of the status. Then
the same arrivals and lengths are served once in each mode by the user's order, and the shares of requests in
target are compared: Auto was right if the mode it ended in kept more, or if they differ by under 5 %.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "worker"), str(ROOT / "tests")]

from demo.target import Target  # noqa: E402
from helpers_auto_site import AutoSite, Watcher, prepare, running_auto_site  # noqa: E402
from helpers_regimes import Regime, Served, is_right  # noqa: E402
from helpers_truth import (  # noqa: E402
    Shape,
    count_tokens_per_word,
    describe_machine,
    last_line,
    poisson_trace,
    send_trace,
)
from phasesplit.api.routing import ServedMode  # noqa: E402

LONG, SHORT = ((600, 1400),), ((40, 120),)
FAST, SLOW = 1e9, 0.4e6  # bytes per second; the fast link is not shaped
SPLIT, COLOCATED = ServedMode.SPLIT, ServedMode.COLOCATED
REGIMES = (
    Regime("long prompts, tight TPOT", Shape(0.8, 80, LONG, ((12, 24),)), 15.0, 0.32, SPLIT, FAST),
    Regime("the same on a slow link", Shape(0.8, 80, LONG, ((12, 24),)), 15.0, 0.32, COLOCATED, SLOW),
    Regime("tight TTFT, relaxed TPOT", Shape(0.9, 80, LONG, ((8, 16),)), 3.5, 3.0, COLOCATED, FAST),
    Regime("short prompts, decode-heavy", Shape(2.0, 100, SHORT, ((24, 48),)), 2.0, 0.36, COLOCATED, FAST),
    Regime("low load", Shape(0.3, 30, LONG, ((12, 24),)), 8.0, 0.8, COLOCATED, FAST),
    Regime("both too tight", Shape(0.8, 50, LONG, ((12, 24),)), 1.0, 0.3, COLOCATED, FAST),
)
LOOK_S = 300.0  # how long Auto is watched under load
STANDS_S = 90.0  # a split adopted for so long is the answer


@dataclass(frozen=True, slots=True)
class Row:
    """One regime: what Auto did, and what each mode did."""

    regime: Regime
    chosen: str
    reason: str
    settled_s: float  # from the first request to the last change of the mode
    served: dict[str, Served]

    @property
    def right(self) -> bool:
        split, colocated = self.served["Split"], self.served["Colocated"]
        return is_right(self.chosen == "Split", split.attained, colocated.attained)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def watch_auto(site: AutoSite, regime: Regime, ratio: float, seed: int) -> tuple[str, str, float]:
    """Load until the answer stands: the mode, its reason and when it came."""
    requests = round(LOOK_S * regime.shape.rate_per_s)
    trace = poisson_trace(replace(regime.shape, requests=requests), seed, ratio, f"{regime.name} auto")
    with Watcher(site.subject, _say) as watcher:
        load = asyncio.create_task(send_trace(site.endpoint, trace))
        await _until_it_stands(watcher, load)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        changes = list(watcher.changes)
    last = next(change for change in reversed(changes) if change.mode)
    switch = next((change for change in reversed(changes) if change.mode != last.mode), None)
    settled = next(
        (change.at_s for change in changes if switch is not None and change.at_s > switch.at_s), 0.0
    )
    return last.mode, last.reason, settled


async def _until_it_stands(watcher: Watcher, load: "asyncio.Task[Any]") -> None:
    while not load.done():
        await asyncio.sleep(1.0)
        last = watcher.changes[-1] if watcher.changes else None
        if last is not None and last.mode == "Split" and watcher.seconds_since(last) >= STANDS_S:
            return


async def measure(site: AutoSite, regime: Regime, mode: str, ratio: float, seed: int) -> Served:
    """The regime's requests in one mode, by the user's order."""
    # However slow the link, the split is measured, not refused.
    site.serve(mode, regime.ttft_s, regime.tpot_s, transfer={"minBandwidth": "1"})
    await asyncio.sleep(5.0)
    results = await send_trace(
        site.endpoint, poisson_trace(regime.shape, seed, ratio, f"{regime.name} {mode}")
    )
    return Served.of(results, regime)


async def judge(site: AutoSite, regime: Regime, options: argparse.Namespace) -> Row:
    """Let Auto decide, then measure both modes."""
    _say(f"{regime.name}: targets TTFT {regime.ttft_s} s, TPOT {regime.tpot_s} s")
    site.set_link(None if regime.link_bytes_per_s >= FAST else f"{regime.link_bytes_per_s * 8 / 1e6:g}mbit")
    ratio = await count_tokens_per_word(site.endpoint)
    site.serve("Auto", regime.ttft_s, regime.tpot_s)
    mode, reason, settled_s = await watch_auto(site, regime, ratio, options.seed)
    served = {}
    for wanted in ("Split", "Colocated"):
        served[wanted] = await measure(site, regime, wanted, ratio, options.seed + 1)
        _say(f"{regime.name}: {wanted} kept {served[wanted].attained:.0%} in target")
    return Row(regime, mode, reason, settled_s, served)


def show(row: Row) -> str:
    """One row of the table."""

    def side(served: Served) -> str:
        latencies = f"p90 TTFT {served.ttft_p90_s:.2f} s, TPOT {served.tpot_p90_s * 1000:.0f} ms"
        return f"{served.attained:.0%} ({latencies})"

    came = f" after {row.settled_s:.0f} s" if row.settled_s else ""
    return (
        f"| {row.regime.name} | {row.regime.expected} | {row.chosen}, {row.reason}{came} "
        f"| {side(row.served['Colocated'])} | {side(row.served['Split'])} "
        f"| {'right' if row.right else 'WRONG'} |"
    )


def entry_of(row: Row) -> dict[str, object]:
    """One entry of the last line."""
    return {
        "name": f"{row.regime.name}: {row.chosen}",
        "value": row.served["Split"].attained,
        "unit": "share in target, split against colocated",
        "against": row.served["Colocated"].attained,
        "bar": None,
        "holds": row.right,
    }


def run(target: Target, options: argparse.Namespace) -> list[dict[str, object]]:
    """Regime after regime, each on an object of its own: nothing is remembered of the one before."""
    chosen = [item for item in REGIMES if options.only is None or item.name in options.only]
    print("| regime | expected | Auto | colocated in target | split in target | Auto was |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, object]] = []
    for regime in chosen:
        with running_auto_site(target) as site:
            row = asyncio.run(judge(site, regime, options))
        print(show(row), flush=True)
        rows.append(entry_of(row))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=[item.name for item in REGIMES], metavar="REGIME", help="some of them"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(describe_machine())
    print(last_line("auto", run(prepare(_say), options)))


if __name__ == "__main__":
    main()
