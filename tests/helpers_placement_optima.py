"""Exact optima of random placement problems, kept as golden rows; solving them takes minutes to hours.

`python tests/helpers_placement_optima.py --count 2000` solves the seeds that the golden file lacks, in
order, and appends each row as soon as it is proven, so that it may be stopped and started again at any
time. A problem that is not proven within the limit is written with an empty optimum and counts for
nothing. Rows are `seed,max_nodes,max_pods,optimum`: the first three rebuild the problem with
`helpers_placement.random_request`, the last is in mean seconds per byte. Needs scipy (HiGHS).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent / "operator"), str(TESTS)]

from helpers_placement import exact_cost, planned_cost, random_request  # noqa: E402

GOLDEN = TESTS / "unit/planner/golden/placement_optima.csv"
HEADER = "seed,max_nodes,max_pods,optimum\n"


@dataclass(frozen=True, slots=True)
class Optimum:
    """One solved problem."""

    seed: int
    max_nodes: int
    max_pods: int
    cost: float  # mean seconds per byte over all pairs

    def excess(self) -> float:
        """How far the planner's answer lies above the optimum, relative."""
        return planned_cost(random_request(self.seed, self.max_nodes, self.max_pods)) / self.cost - 1


def sizes(seed: int) -> tuple[int, int]:
    """Most nodes and pods of a seed's problem: half of them small, half up to 40 nodes, some crowded."""
    return (40 if seed % 2 == 0 else 16), (20 if seed % 5 == 0 else 12)


def read_optima(golden: Path = GOLDEN) -> list[Optimum]:
    """The proven rows."""
    found = []
    for line in golden.read_text().splitlines()[1:]:
        seed, max_nodes, max_pods, cost = line.split(",")
        if cost:
            found.append(Optimum(int(seed), int(max_nodes), int(max_pods), float(cost)))
    return found


def solve_further(count: int, limit_s: float, golden: Path = GOLDEN) -> None:
    """Solve from the first seed without a row until `count` are proven."""
    if not golden.exists():
        golden.write_text(HEADER)
    seed = max((int(line.split(",")[0]) + 1 for line in golden.read_text().splitlines()[1:]), default=0)
    proven = len(read_optima(golden))
    while proven < count:
        max_nodes, max_pods = sizes(seed)
        request = random_request(seed, max_nodes, max_pods)
        cost = exact_cost(request, limit_s)
        proven += cost is not None
        with golden.open("a") as out:
            out.write(f"{seed},{max_nodes},{max_pods},{'' if cost is None else f'{cost:.12g}'}\n")
        print(f"\r{proven} of {count} proven, seed {seed}", end="", file=sys.stderr, flush=True)
        seed += 1
    print(file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--limit-s", type=float, default=30.0, help="for one problem")
    options = parser.parse_args()
    solve_further(options.count, options.limit_s)


if __name__ == "__main__":
    main()
