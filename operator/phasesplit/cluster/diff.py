"""What "differs" means: desired against live, over the fields that our field manager owns.

A field differs when it is wanted and absent, wanted and another value, wanted and not ours (somebody
else changed it since), or ours and no longer wanted. Quantities are compared as numbers. What other
managers own, and what the API server fills in, is no difference. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phasesplit.api.quantities import is_same_quantity

Fields = Mapping[str, Any]  # FieldsV1: f:name, k:{...}, v:value, i:index, "."

# Below these names numbers are quantities.
_QUANTITY_PARENTS = frozenset({"requests", "limits", "storage", "sizeLimit", "hard", "capacity"})
# What the API server adds inside values that are owned as a whole. None: whatever the value.
_SERVER_DEFAULTS: Mapping[str, tuple[Any, ...] | None] = {
    "apiVersion": ("v1",),
    "kind": ("PersistentVolumeClaim",),
    "protocol": ("TCP",),
    "volumeMode": ("Filesystem",),
    "status": None,
    "creationTimestamp": None,
    "defaultMode": None,
    "expirationSeconds": None,
}


class Why(StrEnum):
    """How a field differs."""

    ABSENT = "is absent"
    VALUE = "has another value"
    NOT_OURS = "is owned by another manager"
    UNWANTED = "is no longer wanted"


@dataclass(frozen=True)
class Difference:
    """The first difference found."""

    path: str
    why: Why
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path} {self.why}" + (f" ({self.detail})" if self.detail else "")


def owned_fields(managed: Sequence[Mapping[str, Any]], manager: str) -> Fields:
    """Fields that a manager owns by apply, from `metadata.managedFields`."""
    for entry in managed:
        applied = entry.get("operation") == "Apply" and not entry.get("subresource")
        if applied and entry.get("manager") == manager:
            fields: Fields = entry.get("fieldsV1", {})
            return fields
    return {}


def first_difference(
    desired: Mapping[str, Any], live: Mapping[str, Any] | None, fields: Fields
) -> Difference | None:
    """First difference between a desired manifest and the live object, None if it need not be applied."""
    if live is None:
        return Difference(str(desired.get("kind", "object")), Why.ABSENT)
    wanted = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind")}
    metadata = wanted.pop("metadata", {})
    wanted["metadata"] = {key: value for key, value in metadata.items() if key not in ("name", "namespace")}
    return _map_difference(wanted, live, fields, "")


def owned_part(live: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The values of a live object that these fields cover, in the shape of the manifest that set them."""
    part = {key: live[key] for key in ("apiVersion", "kind") if key in live}
    part.update(_extract_map(live, fields))
    metadata = live.get("metadata", {})
    identity = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    part["metadata"] = {**identity, **part.get("metadata", {})}
    return part


def _map_difference(
    wanted: Mapping[str, Any], live: Mapping[str, Any], fields: Fields, at: str
) -> Difference | None:
    owned = {key[2:]: value for key, value in fields.items() if key.startswith("f:")}
    for key, value in wanted.items():
        path = f"{at}.{key}" if at else key
        have = live.get(key)
        if _is_empty(value):
            found = _leftover(have, owned[key], path) if key in owned else None
        elif key not in live:
            return Difference(path, Why.ABSENT)
        elif key not in owned and isinstance(value, Mapping) and isinstance(have, Mapping):
            found = _map_difference(value, have, {}, path)  # to name the field, not its parent
        elif key not in owned:
            return Difference(path, Why.NOT_OURS, _both(value, have))
        else:
            found = _value_difference(value, have, owned[key], path)
        if found:
            return found
    for key in owned:
        if key not in wanted and not _is_empty(live.get(key)):
            return Difference(f"{at}.{key}" if at else key, Why.UNWANTED)
    return None


def _leftover(live: Any, fields: Fields, at: str) -> Difference | None:
    """What we still own of a value that is wanted empty."""
    if _is_empty(live):
        return None
    if isinstance(live, Mapping) and _holds(fields, "f:"):
        return _map_difference({}, live, fields, at)
    return Difference(at, Why.UNWANTED)


def _value_difference(wanted: Any, live: Any, fields: Fields, at: str) -> Difference | None:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping) and _holds(fields, "f:"):
        return _map_difference(wanted, live, fields, at)
    if _is_list(wanted) and _is_list(live) and _holds(fields, "k:"):
        return _keyed_list_difference(wanted, live, fields, at)
    if _is_list(wanted) and _holds(fields, "v:"):
        return _set_difference(wanted, fields, at)
    return _whole_difference(wanted, live, at)


def _keyed_list_difference(
    wanted: Sequence[Any], live: Sequence[Any], fields: Fields, at: str
) -> Difference | None:
    """Lists of named things. A key that the manifest leaves out takes the API server's default."""
    entries = list(_keyed_entries(fields))
    matched: set[int] = set()
    for item in wanted:
        free = ((n, key) for n, (key, _) in enumerate(entries) if n not in matched)
        number = next((n for n, key in free if _has_key(item, key)), None)
        if number is None:
            return Difference(f"{at}[{_label(item)}]", Why.ABSENT)
        matched.add(number)
        key, owned = entries[number]
        have = next((other for other in live if _has_key(other, key, strict=True)), None)
        path = f"{at}[{_label(item)}]"
        if have is None:
            return Difference(path, Why.ABSENT)
        if not _holds(owned, "f:"):
            found = _whole_difference(item, have, path)
            if found:
                return found
            continue
        # Key fields are owned through the entry itself, whether the manifest names them or not.
        below = {name: value for name, value in owned.items() if name.removeprefix("f:") not in key}
        below |= {f"f:{name}": {} for name in key if name in item}
        found = _map_difference(item, have, below, path)
        if found:
            return found
    for number, (key, _) in enumerate(entries):
        if number not in matched and any(_has_key(other, key, strict=True) for other in live):
            return Difference(f"{at}[{_label(key)}]", Why.UNWANTED)
    return None


def _set_difference(wanted: Sequence[Any], fields: Fields, at: str) -> Difference | None:
    owned = {json.dumps(json.loads(key[2:])) for key in fields if key.startswith("v:")}
    ours = {json.dumps(value) for value in wanted}
    if ours - owned:
        return Difference(f"{at}[{min(ours - owned)}]", Why.ABSENT)
    if owned - ours:
        return Difference(f"{at}[{min(owned - ours)}]", Why.UNWANTED)
    return None


def _whole_difference(wanted: Any, live: Any, at: str) -> Difference | None:
    """Values that are owned as a whole: everything in them must be equal but for the server's defaults."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return _whole_map_difference(wanted, live, at)
    if _is_list(wanted) and _is_list(live):
        return _whole_list_difference(wanted, live, at)
    return None if _is_equal(wanted, live, at) else Difference(at, Why.VALUE, _both(wanted, live))


def _whole_map_difference(wanted: Mapping[str, Any], live: Mapping[str, Any], at: str) -> Difference | None:
    for key, value in wanted.items():
        if _is_empty(value) and _is_empty(live.get(key)):
            continue
        if key not in live:
            return Difference(f"{at}.{key}", Why.ABSENT)
        found = _whole_difference(value, live[key], f"{at}.{key}")
        if found:
            return found
    for key, value in live.items():
        if key not in wanted and not _is_empty(value) and not _is_server_default(key, value):
            return Difference(f"{at}.{key}", Why.UNWANTED)
    return None


def _whole_list_difference(wanted: Sequence[Any], live: Sequence[Any], at: str) -> Difference | None:
    if len(wanted) != len(live):
        return Difference(at, Why.VALUE, f"{len(live)} items instead of {len(wanted)}")
    for number, (want, have) in enumerate(zip(wanted, live, strict=True)):
        found = _whole_difference(want, have, f"{at}[{number}]")
        if found:
            return found
    return None


def _is_equal(wanted: Any, live: Any, at: str) -> bool:
    if isinstance(wanted, bool) or isinstance(live, bool):
        return wanted is live
    if wanted == live or not _is_quantity_path(at):
        return bool(wanted == live)
    try:
        return is_same_quantity(wanted, live)
    except ValueError:
        return False


def _is_quantity_path(at: str) -> bool:
    return not _QUANTITY_PARENTS.isdisjoint(at.replace("[", ".").split("."))


def _is_server_default(key: str, value: Any) -> bool:
    if key not in _SERVER_DEFAULTS:
        return False
    allowed = _SERVER_DEFAULTS[key]
    return allowed is None or value in allowed


def _extract_map(live: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for key, below in fields.items():
        name = key[2:]
        if key.startswith("f:") and name in live:
            part[name] = _extract(live[name], below)
    return part


def _extract(live: Any, fields: Fields) -> Any:
    if isinstance(live, Mapping) and _holds(fields, "f:"):
        return _extract_map(live, fields)
    if _is_list(live) and _holds(fields, "k:"):
        found = []
        for item in live:
            for key, owned in _keyed_entries(fields):
                if _has_key(item, key, strict=True):
                    found.append({**key, **_extract_map(item, owned)} if _holds(owned, "f:") else item)
                    break
        return found
    if _is_list(live) and _holds(fields, "v:"):
        owned_values = [json.loads(key[2:]) for key in fields if key.startswith("v:")]
        return [value for value in live if value in owned_values]
    return live


def _keyed_entries(fields: Fields) -> Iterator[tuple[dict[str, Any], Fields]]:
    for key, owned in fields.items():
        if key.startswith("k:"):
            yield json.loads(key[2:]), owned


def _has_key(item: Any, key: Mapping[str, Any], *, strict: bool = False) -> bool:
    if not isinstance(item, Mapping):
        return False
    return all(item.get(name) == value if strict or name in item else True for name, value in key.items())


def _holds(fields: Fields, prefix: str) -> bool:
    return any(key.startswith(prefix) for key in fields)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_empty(value: Any) -> bool:
    return value is None or value in ({}, [])


def _label(item: Any) -> str:
    if isinstance(item, Mapping):
        for name in ("name", "uid", "containerPort", "port", "topologyKey", "mountPath", "ip", "key"):
            if name in item:
                return f"{name}={item[name]}"
    return str(item)


def _both(wanted: Any, live: Any) -> str:
    return f"{_short(live)} instead of {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
