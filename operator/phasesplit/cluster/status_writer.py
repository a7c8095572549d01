"""When the status of an object is worth a write, and the write itself.

Conditions, modes, counts and names are facts: a change is written at once. Numbers and sentences are
noise unless something goes on: they are written only while requests flow, at most every 30 s. So an
idle object is never written.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from phasesplit.api.v1alpha1 import Manifest

NUMBERS_EVERY_S = 30.0

# Fields whose change alone is no news.
_SOFT_FIELDS = frozenset(
    {
        "message",
        "measuredAt",
        "evidence",
        "measures",
        "medianBytesPerSecond",
        "worstBytesPerSecond",
        "worstPair",
        "attainmentPercent",
        "ttftMilliseconds",
        "tpotMilliseconds",
        "cost",
        "bound",
    }
)


class Change(StrEnum):
    """How two statuses differ."""

    NONE = "none"
    NUMBERS = "numbers"
    FACTS = "facts"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    """The weightiest difference between two statuses."""
    if old == new:
        return Change.NONE
    return Change.NUMBERS if _hard(old) == _hard(new) else Change.FACTS


def changed_facts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Which facts differ, for the log: conditions by their type, the rest by field."""
    before, after = _hard(old), _hard(new)
    fields = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if "conditions" in fields:
        fields.remove("conditions")
        known = [_by_type(status.get("conditions") or ()) for status in (before, after)]
        types = sorted({*known[0], *known[1]})
        fields += [kind for kind in types if known[0].get(kind) != known[1].get(kind)]
    return ", ".join(fields)


def is_worth_writing(change: Change, *, busy: bool, since_last_write_s: float) -> bool:
    """Facts at once; numbers only while requests flow, and not too often."""
    if change is Change.FACTS:
        return True
    return change is Change.NUMBERS and busy and since_last_write_s >= NUMBERS_EVERY_S


def quantise(value: float | None, digits: int = 2) -> float | None:
    """A number with so many significant digits; integers stay integers."""
    if value is None:
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _by_type(conditions: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(item.get("type")): item for item in conditions}


def _hard(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _hard(below) for key, below in value.items() if key not in _SOFT_FIELDS}
        return {key: below for key, below in kept.items() if below not in ({}, None)}
    if isinstance(value, list | tuple):
        return [_hard(item) for item in value]
    return value


def without_empty(status: Manifest) -> Manifest:
    """The status without absent values, as the API server stores it."""
    return {key: value for key, value in status.items() if value not in (None, {}, [])}
