"""Placement: quality over the golden optima and time at 512 pods on 5,000 nodes.

Its last line is one JSON object. `tests/helpers_placement_optima.py` says where the optima come from.
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

from helpers_placement import make_node, make_request  # noqa: E402
from helpers_placement_optima import read_optima  # noqa: E402
from phasesplit.planner.placement import plan_placement  # noqa: E402


def measure_gaps() -> list[float]:
    """Relative excess over the optimum, per golden problem."""
    optima = read_optima()
    gaps = []
    for index, optimum in enumerate(optima):
        gaps.append(optimum.excess())
        if gaps[-1] > 0.01:
            print(f"\rseed {optimum.seed}: {100 * gaps[-1]:.1f} % over the optimum")
        print(f"\r{index + 1} of {len(optima)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return gaps


def measure_large(gpus_per_node: int) -> float:
    """CPU seconds for 512 pods on 5,000 nodes in racks of 18 and zones of 500, the best of five."""
    nodes = tuple(make_node(i, f"c{i // 18}", f"z{i // 500}", gpus_per_node) for i in range(5000))
    request = make_request(nodes, 256, 256)
    taken = []
    for _ in range(5):
        start = time.process_time()
        plan_placement(request)
        taken.append(time.process_time() - start)
    return min(taken)


def result(name: str, value: float, unit: str, bar: float) -> dict[str, object]:
    return {"name": name, "value": round(value, 6), "unit": unit, "bar": bar, "holds": value <= bar}


def main() -> None:
    gaps = measure_gaps()
    results = [
        result(f"mean excess over the optimum, {len(gaps)} instances", 100 * mean(gaps), "%", 1.0),
        result("worst excess over the optimum", 100 * max(gaps), "%", 5.0),
        result("512 pods on 5,000 nodes of 8 GPUs", measure_large(8), "CPU s", 1.0),
        result("512 pods on 5,000 nodes of 1 GPU", measure_large(1), "CPU s", 1.0),
    ]
    for item in results:
        print(f"{item['name']}: {item['value']} {item['unit']} (bar {item['bar']}, holds: {item['holds']})")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    ).stdout.strip()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"bench": "placement", "commit": commit, "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
