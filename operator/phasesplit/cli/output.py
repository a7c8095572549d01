"""How the command line speaks: tables for people, JSON for programs, errors in one sentence."""

import json
from enum import StrEnum
from typing import Any

from rich.console import Console

console = Console()
errors = Console(stderr=True)


class OutputFormat(StrEnum):
    """Values of `--output`."""

    TABLE = "table"
    JSON = "json"


def print_json(value: Any) -> None:
    """Plain JSON on standard output, for jq and scripts."""
    print(json.dumps(value, indent=2, default=str))


def milliseconds(seconds: float | None) -> str:
    """`1.234` s as `1,234 ms`; a dash when it did not happen."""
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"


def bytes_text(count: float | None) -> str:
    """Bytes with a binary unit."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def rate_text(bytes_per_s: float | None) -> str:
    """Bandwidth in bytes per second with a binary unit."""
    return "-" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"
