"""Scaling on the Azure 2023 traces: worker-hours for 99 % in target, start-up charged.

The planner's own `plan_scaling`, tick by tick, against the horizontal pod autoscaler's algorithm, fixed
sizes chosen with hindsight, and a policy that knows the future. All serve the same requests in the
planner's event-driven simulator, split, and begin with the same workers. An 8B model on small GPUs by the
roofline guess; 60 s from asking for a worker to its serving; a worker costs until it has drained.

Of each baseline the cheapest setting that reaches 99 % counts. `--trace NAME` runs one trace alone.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

from helpers_azure import read_azure  # noqa: E402
from helpers_fleet import Fleet, FleetResult, FleetSetting, Policy  # noqa: E402
from helpers_fleet_policies import Clairvoyant, HorizontalAutoscaler, Planned, Static  # noqa: E402
from phasesplit.api.names import Pool  # noqa: E402
from phasesplit.planner.demand import Hardware  # noqa: E402
from phasesplit.planner.performance import guess_profile  # noqa: E402
from phasesplit.planner.simulation_types import SimulatedClass  # noqa: E402

KV_BYTES_PER_TOKEN = 131_072
PROFILE = guess_profile(8_000_000_000, "NVIDIA-L4", kv_bytes_per_token=KV_BYTES_PER_TOKEN)
HARDWARE = Hardware(PROFILE, PROFILE, KV_BYTES_PER_TOKEN, 40_000, 3.125e9)
TARGET = SimulatedClass("default", ttft_s=5.0, tpot_s=0.15, share=0.99)
BAR = 0.85


@dataclass(frozen=True)
class Case:
    """One trace: what all begin with and the settings that are tried."""

    initial: tuple[int, int]  # prefill and decode workers
    fixed: tuple[tuple[int, int], ...]
    window_s: float  # scaling.downStabilizationSeconds, the same for the planner and the autoscaler
    in_flight: tuple[tuple[float, float], ...]  # targets of the autoscaler per worker of the pools
    busy: tuple[tuple[float, float], ...]


CASES = {
    "conv": Case(
        initial=(8, 7),
        fixed=((7, 7), (8, 6), (8, 7), (7, 8), (8, 8)),
        window_s=120.0,
        in_flight=((1.0, 20.0), (1.5, 22.0), (1.0, 24.0), (0.7, 20.0)),
        busy=((0.8, 0.99), (0.7, 0.99), (0.5, 0.95)),
    ),
    "code": Case(
        initial=(38, 6),
        fixed=((38, 5), (36, 6), (38, 6), (40, 5)),
        window_s=900.0,
        in_flight=((0.5, 12.0), (0.3, 8.0)),
        busy=((0.5, 0.7), (0.3, 0.5)),
    ),
}


def policies(case: Case) -> Iterator[tuple[str, Policy, tuple[int, int]]]:
    """Name, policy and the workers it begins with."""
    yield "planned", Planned(case.window_s), case.initial
    for prefill, decode in case.fixed:
        yield f"fixed {prefill}+{decode}", Static(), (prefill, decode)
    for metric, targets in (("in flight", case.in_flight), ("busy", case.busy)):
        for prefill_target, decode_target in targets:
            target: Mapping[Pool, float] = {Pool.PREFILL: prefill_target, Pool.DECODE: decode_target}
            name = f"autoscaler on {metric} {prefill_target:g}/{decode_target:g}"
            yield name, HorizontalAutoscaler(target, metric, case.window_s), case.initial
    for margin in (1.0, 1.08, 1.16):
        yield f"clairvoyant, margin {margin:g}", Clairvoyant(margin), case.initial


def run_case(name: str) -> dict[str, FleetResult]:
    """All policies on one trace, printed as they are found."""
    case, trace = CASES[name], read_azure(name)
    print(f"\n{name}: {len(trace)} requests in {trace[-1].at_s:.0f} s")
    print("| policy | in target | worker-hours | most workers | late by TTFT | by TPOT | CPU s |")
    print("|---|---|---|---|---|---|---|")
    found = {}
    for label, policy, (prefill, decode) in policies(case):
        start = time.process_time()
        setting = FleetSetting(trace, HARDWARE, TARGET, split=True)
        item = Fleet(setting, policy, {Pool.PREFILL: prefill, Pool.DECODE: decode}).serve()
        found[label] = item
        late = [
            sum(value > limit for value in values)
            for values, limit in ((item.result.ttft_s, TARGET.ttft_s), (item.result.tpot_s, TARGET.tpot_s))
        ]
        print(
            f"| {label} | {100 * item.attainment:.2f} % | {item.worker_hours:.2f} | {item.most_workers} "
            f"| {late[0]} | {late[1]} | {time.process_time() - start:.1f} |",
            flush=True,
        )
    return found


def results_of(name: str, found: Mapping[str, FleetResult]) -> list[dict[str, object]]:
    """Attainment, and worker-hours over the cheapest of each kind that reaches the share."""
    ours = found["planned"]

    def cheapest(kind: str) -> float | None:
        enough = [
            item.worker_hours
            for label, item in found.items()
            if label.startswith(kind) and item.attainment >= TARGET.share
        ]
        return min(enough, default=None)

    share = 100 * ours.attainment
    results: list[dict[str, object]] = [
        {"name": f"{name}: in target", "value": round(share, 2), "unit": "%", "bar": 99, "holds": share >= 99}
    ]
    baselines = [hours for kind in ("fixed", "autoscaler") if (hours := cheapest(kind)) is not None]
    if baselines:
        ratio = ours.worker_hours / min(baselines)
        results.append(
            {
                "name": f"{name}: worker-hours over the better of autoscaler and fixed",
                "value": round(ratio, 3),
                "unit": "",
                "bar": BAR,
                "holds": ratio <= BAR and share >= 99,
            }
        )
    best = cheapest("clairvoyant")
    if best is not None:
        results.append({"name": f"{name}: over clairvoyant", "value": round(ours.worker_hours / best, 3)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=sorted(CASES))
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    for name in [options.trace] if options.trace else CASES:
        results += results_of(name, run_case(name))
    for item in results:
        print(f"{item['name']}: {item['value']} (bar {item.get('bar')}, holds: {item.get('holds')})")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
    ).stdout.strip()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"bench": "scaling", "commit": commit, "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
