"""Placement: quality over exact optima and time at 512 pods on 5,000 nodes.

`python tests/bench/placement.py` prints one JSON object as its last line.
`... --write-optima N` solves N random instances exactly and rewrites the golden file.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests")]

from helpers_placement import exact_cost, make_node, make_request, planned_cost, random_request  # noqa: E402
from phasesplit.planner.placement import plan_placement  # noqa: E402

GOLDEN = ROOT / "tests/unit/planner/golden/placement_optima.json"


def write_optima(count: int, limit_s: float) -> None:
    """Solve seeds until `count` of them are proven; every fourth has up to 40 nodes."""
    solved: list[dict[str, float]] = []
    seed = 0
    while len(solved) < count:
        max_nodes = 40 if seed % 4 == 0 else 14
        optimum = exact_cost(random_request(seed, max_nodes), limit_s)
        if optimum is not None:
            solved.append({"seed": seed, "max_nodes": max_nodes, "optimum": optimum})
            print(f"\r{len(solved)} of {count}", end="", file=sys.stderr, flush=True)
        seed += 1
    lines = ",\n".join(json.dumps(item) for item in solved)
    GOLDEN.write_text(f"[\n{lines}\n]\n")


def measure_gaps() -> list[float]:
    """Relative excess over the optimum, per golden instance."""
    return [
        planned_cost(random_request(item["seed"], item["max_nodes"])) / item["optimum"] - 1
        for item in json.loads(GOLDEN.read_text())
    ]


def measure_large(gpus_per_node: int) -> float:
    """CPU seconds for 512 pods on 5,000 nodes in racks of 18 and zones of 500, the best of three."""
    nodes = tuple(make_node(i, f"c{i // 18}", f"z{i // 500}", gpus_per_node) for i in range(5000))
    request = make_request(nodes, 256, 256)
    taken = []
    for _ in range(3):
        start = time.process_time()
        plan_placement(request)
        taken.append(time.process_time() - start)
    return min(taken)


def result(name: str, value: float, unit: str, bar: float) -> dict[str, object]:
    return {"name": name, "value": round(value, 6), "unit": unit, "bar": bar, "holds": value <= bar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-optima", type=int, metavar="N")
    parser.add_argument("--limit-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.write_optima:
        write_optima(options.write_optima, options.limit_s)
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
