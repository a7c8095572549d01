"""The simulator against what is really served: one trace, both modes, on worker and router processes.

    make bench-truth               # four paced workers, then two at real speed
    python -m bench.truth --only paced
    python -m bench.truth --url URL --profile PROFILE.json --plan 2:2   # a router that runs already

The trace is sent open loop; the client's TTFT and TPOT are compared with those that the planner's simulator
gives for the same arrivals, lengths and step profile. Paced workers have a declared profile, the others
report what they have fitted themselves. `--plan P:D` is a split, `--plan N` so many colocated workers.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "worker"), str(ROOT / "tests")]

from helpers_models import benchmark_model_dir, text_model_dir, tiny_model_dir  # noqa: E402
from helpers_truth import (  # noqa: E402
    DEVICE,
    Compared,
    Shape,
    compare_latencies,
    count_tokens_per_word,
    describe_machine,
    last_line,
    poisson_trace,
    run_until_told,
    send_trace,
    simulated_trace,
)
from helpers_truth_site import Effort, EffortMeter, Site, running_site  # noqa: E402
from phasesplit.api.reports import StepProfile  # noqa: E402
from phasesplit.api.routing import LatencyClass  # noqa: E402
from phasesplit.planner.demand import Hardware  # noqa: E402
from phasesplit.planner.simulation import simulate  # noqa: E402
from phasesplit.planner.simulation_types import (  # noqa: E402
    ColocatedPlan,
    Plan,
    SimulatedClass,
    Simulation,
    SplitPlan,
)
from phasesplit_bench.client import Result, Target  # noqa: E402
from phasesplit_bench.load import find_model  # noqa: E402

# No request is refused, and the TPOT target alone sets the chunk of a colocated step.
TARGETS = LatencyClass(name="default", ttft_s=120.0, tpot_s=0.8)
MIXED = ((60, 200), (60, 200), (200, 700), (200, 700), (700, 1400))
PACED = Shape(0.9, 240, MIXED, ((6, 12), (12, 36)))
UNPACED = Shape(0.8, 120, ((60, 200), (200, 600)), ((8, 24), (24, 48)))
BARS = {"paced": 0.15, "unpaced": 0.25}


@dataclass(frozen=True, slots=True)
class Setting:
    """What was served by what."""

    kind: str  # paced or unpaced
    plan: Plan
    hardware: Hardware

    @property
    def name(self) -> str:
        if isinstance(self.plan, SplitPlan):
            return f"{self.kind} split {self.plan.prefill}:{self.plan.decode}"
        return f"{self.kind} colocated {self.plan.workers}"


def simulated(setting: Setting, results: Sequence[Result]) -> list[Compared]:
    """The same requests in the simulator, quantile by quantile."""
    target = SimulatedClass(TARGETS.name, TARGETS.ttft_s, TARGETS.tpot_s)
    found = simulate(Simulation(simulated_trace(results), setting.plan, setting.hardware, (target,)))
    return compare_latencies(results, found)


def report(setting: Setting, results: Sequence[Result], effort: Effort | None) -> list[dict[str, object]]:
    """Print one run; its rows for the last line."""
    finished = sum(result.is_finished for result in results)
    local = sum(result.mode == "Colocated" for result in results if result.is_finished)
    split = f", {local} of them by one worker" if isinstance(setting.plan, SplitPlan) else ""
    print(f"\n{setting.name}: {finished} of {len(results)} requests finished{split}")
    if effort is not None:
        print(effort)
    rows: list[dict[str, object]] = []
    for row in simulated(setting, results):
        bar = BARS[setting.kind]
        ratio = row.simulated_s / row.measured_s if row.measured_s else math.nan
        verdict = "within" if row.deviation <= bar else "BEYOND"
        print(
            f"  {row.name:9} measured {row.measured_s * 1000:7.1f} ms, "
            f"simulated {row.simulated_s * 1000:7.1f} ms, ratio {ratio:5.3f}, {verdict} {bar:.0%}"
        )
        rows.append(
            {
                "name": f"{setting.name}: {row.name}",
                "value": None if math.isnan(ratio) else round(ratio, 4),
                "unit": "simulated / measured",
                "against": row.measured_s,
                "bar": bar,
                "holds": row.deviation <= bar,
                "waited": round(effort.waited_share, 3) if effort else None,
            }
        )
    return rows


async def measure(
    site: Site, shape: Shape, seed: int, tokens_per_word: float, text: str
) -> tuple[list[Result], Effort]:
    """Send the trace, and say how busy these processes and the whole machine were meanwhile."""
    meter = EffortMeter(site)
    results = await send_trace(site.target, poisson_trace(shape, seed, tokens_per_word, text))
    effort = meter.read()
    await site.settle()
    return results, effort


def middle(profiles: Sequence[StepProfile]) -> StepProfile:
    """Coefficient by coefficient: the law of an average worker."""
    names = ("base_s", "per_prefill_token_s", "per_prefill_context_s", "per_decode_sequence_s",
             "per_decode_context_s", "overlap")  # fmt: skip
    values = {name: median(getattr(profile, name) for profile in profiles) for name in names}
    return StepProfile(**values, num_samples=min(profile.num_samples for profile in profiles))


async def hardware_of(site: Site, declared: StepProfile | None) -> Hardware:
    """What the site says of itself, as the operator would read it."""
    profile = declared or middle(await site.profiles())
    return Hardware(
        profile, profile, await site.kv_bytes_per_token(), link_bytes_per_s=await site.link_bytes_per_s()
    )


async def run_site(kind: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Both modes on one set of workers."""
    paced = kind == "paced"
    shape, pace = (PACED, DEVICE) if paced else (UNPACED, None)
    shape = Shape(options.rate or shape.rate_per_s, options.requests or shape.requests, shape.prompt_tokens,
                  shape.output_tokens)  # fmt: skip
    count = 4 if paced else 2
    rows: list[dict[str, object]] = []
    model = text_model_dir(tiny_model_dir("llama") if paced else benchmark_model_dir())
    async with running_site(count, pace=pace, model=model) as site:
        await site.serve(None, (TARGETS,))
        ratio = await count_tokens_per_word(site.target)
        for prefill in {"split": (count // 2,), "colocated": (None,)}.get(options.mode, (count // 2, None)):
            await site.serve(prefill, (TARGETS,))
            plan: Plan = (
                ColocatedPlan(count, step_budget_s=TARGETS.tpot_s)
                if prefill is None
                else SplitPlan(prefill, count - prefill)
            )
            warm_up = Shape(shape.rate_per_s, 8, shape.prompt_tokens, shape.output_tokens)
            await measure(site, warm_up, 1000 + options.seed, ratio, f"{plan} warm-up")
            results, effort = await measure(site, shape, options.seed, ratio, str(plan))
            hardware = await hardware_of(site, pace)
            rows += report(Setting(kind, plan, hardware), results, effort)
            if options.keep:
                keep(options.keep, kind, plan, hardware, results)
    return rows


def keep(folder: Path, kind: str, plan: Plan, hardware: Hardware, results: Sequence[Result]) -> None:
    """Every request as it was measured, with what it was simulated on in the first line."""
    name = f"{kind}-{'split' if isinstance(plan, SplitPlan) else 'colocated'}.jsonl"
    lines = [hardware.prefill_profile.model_dump_json(), *(result.to_json() for result in results)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")


def plan_of(text: str) -> Plan:
    """`2:2` is a split, `4` colocated."""
    parts = [int(part) for part in text.split(":")]
    if len(parts) == 1:
        return ColocatedPlan(parts[0], step_budget_s=TARGETS.tpot_s)
    return SplitPlan(*parts)


async def run_url(options: argparse.Namespace) -> list[dict[str, object]]:
    """A router that runs elsewhere, in the mode that it is in now."""
    profile = StepProfile.model_validate_json(options.profile.read_bytes())
    hardware = Hardware(
        profile, profile, options.kv_bytes_per_token, link_bytes_per_s=options.link_bytes_per_s
    )
    target = Target(url=options.url, model=await find_model(options.url))
    shape = Shape(
        options.rate or PACED.rate_per_s, options.requests or PACED.requests, MIXED, PACED.output_tokens
    )
    trace = poisson_trace(shape, options.seed, await count_tokens_per_word(target))
    results = await send_trace(target, trace)
    return report(Setting("paced", plan_of(options.plan), hardware), results, None)


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    """What was asked for."""
    if options.url:
        return await run_url(options)
    rows: list[dict[str, object]] = []
    for kind in BARS if options.only is None else (options.only,):
        rows += await run_site(kind, options)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(BARS), help="one of the two kinds of run")
    parser.add_argument("--mode", choices=("split", "colocated"), help="one of the two modes")
    parser.add_argument("--requests", type=int, help="requests of each run")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for one JSON line per request")
    parser.add_argument("--url", help="router to measure instead of starting one")
    parser.add_argument("--profile", type=Path, help="with --url: step profile of its workers")
    parser.add_argument("--plan", default="2:2", help="with --url: what serves, as 2:2 or 4")
    parser.add_argument("--kv-bytes-per-token", type=float, default=0.0, help="with --url")
    parser.add_argument("--link-bytes-per-s", type=float, default=math.inf, help="with --url")
    options = parser.parse_args()
    if options.url and options.profile is None:
        parser.error("--url needs --profile: the simulator must know what a step takes")
    print(describe_machine())
    print(last_line("truth", run_until_told(run(options))))


if __name__ == "__main__":
    main()
