"""Numbers as a person reads them, for messages. Knows no decisions."""

import math


def format_rate(bytes_per_s: float) -> str:
    """Bandwidth in bits, as links are sold: `129 Mbit/s`."""
    if math.isinf(bytes_per_s):
        return "unlimited"
    bits = bytes_per_s * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{_short(bits / size)} {unit}"
    return f"{_short(bits)} bit/s"


def format_seconds(seconds: float) -> str:
    """`350 ms`, `2.4 s`, `12 min`."""
    if math.isinf(seconds):
        return "without end"
    if seconds < 1:
        return f"{_short(seconds * 1000)} ms"
    return f"{_short(seconds)} s" if seconds < 120 else f"{_short(seconds / 60)} min"


def format_bytes(size_bytes: float) -> str:
    """`1.5 GiB`, `46 KiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{_short(size_bytes / size)} {unit}"
    return f"{_short(size_bytes)} B"


def format_percent(share: float) -> str:
    """`97 %`, from a share of 0 to 1."""
    return f"{_short(share * 100)} %"


def count_of(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}".removesuffix(".0")
