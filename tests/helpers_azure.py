"""The Azure 2023 traces kept beside the benchmarks; see tests/bench/data/README.md."""

import csv
import gzip
from pathlib import Path

from phasesplit.planner.simulation_types import Arrival

DATA = Path(__file__).parent / "bench" / "data"


def read_azure(name: str) -> tuple[Arrival, ...]:
    """`code` or `conv`: times and lengths."""
    with gzip.open(DATA / f"azure_2023_{name}.csv.gz", "rt", newline="") as lines:
        return tuple(
            Arrival(int(row["arrival_ms"]) / 1000, int(row["prompt_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(lines)
        )
