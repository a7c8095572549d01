"""Writes the files that are made from the models and from the chart's values.

    python -m phasesplit.api.generate            write them
    python -m phasesplit.api.generate --check    say which are not up to date, and fail if any

Run from the root of the repository.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from phasesplit.api.chart_readme import render_readme
from phasesplit.api.crd import dump_chart_template, dump_crd

CHART = Path("helm/phasesplit")


def generated_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every generated file below `root`, and what it must hold."""
    chart = root / CHART
    yield root / "crds" / "phasesplit.dev_disaggregatedmodels.yaml", dump_crd()
    yield chart / "templates" / "crds" / "disaggregatedmodels.yaml", dump_chart_template()
    texts = [(chart / name).read_text() for name in ("Chart.yaml", "values.yaml")]
    yield chart / "README.md", render_readme(*texts)


def find_stale(root: Path) -> list[Path]:
    """Generated files that do not hold what they must."""
    return [path for path, text in generated_files(root) if not path.exists() or path.read_text() != text]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 when a check finds stale files."""
    parser = argparse.ArgumentParser(prog="python -m phasesplit.api.generate")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is stale")
    root = Path.cwd()
    if not (root / CHART / "values.yaml").exists():
        sys.stderr.write(f"{root / CHART} is missing: run this from the root of the repository\n")
        return 2
    if parser.parse_args(arguments).check:
        stale = find_stale(root)
        for path in stale:
            sys.stderr.write(f"{path.relative_to(root)} is not up to date: run `make generate`\n")
        return 1 if stale else 0
    for path, text in generated_files(root):
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
