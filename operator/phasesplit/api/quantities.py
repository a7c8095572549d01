"""Kubernetes quantities as numbers. Stdlib only."""

import re
from decimal import Decimal

_PATTERN = re.compile(r"^([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[+-]?[0-9]+\.)([a-zA-Z]*)$")
_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def parse_quantity(text: str | int | float) -> float:
    """`500m` -> 0.5, `2Gi` -> 2147483648.0. Raises ValueError naming the text when it is no quantity."""
    match = _PATTERN.match(str(text).strip())
    if match is None or match.group(2) not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 500m, 2 or 8Gi")
    return float(Decimal(match.group(1)) * _SUFFIXES[match.group(2)])


def is_same_quantity(left: str | int | float, right: str | int | float) -> bool:
    """Equal as numbers: `1000m` and `1`, `1024Mi` and `1Gi`."""
    return parse_quantity(left) == parse_quantity(right)
