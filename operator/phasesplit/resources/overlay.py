"""The user's overlay on a pod template.

Maps merge deep; lists whose items are all maps with a `name` merge by that name, keeping order and
appending what is new; other lists, and scalars, replace; null removes. There is no `$patch`.
"""

from copy import deepcopy
from typing import Any

from phasesplit.api.v1alpha1 import Manifest


def merge_overlay(base: Manifest, overlay: Manifest) -> Manifest:
    """`base` with `overlay` on top. Neither is changed."""
    merged = {key: deepcopy(value) for key, value in base.items() if key not in overlay}
    for key, value in overlay.items():
        if value is None:
            continue
        merged[key] = _merge_value(base.get(key), value)
    # Keys keep the base's order, so that a small overlay makes a small difference to read.
    order = [*base, *(key for key in overlay if key not in base)]
    return {key: merged[key] for key in order if key in merged}


def _merge_value(base: Any, overlay: Any) -> Any:
    if isinstance(base, dict) and isinstance(overlay, dict):
        return merge_overlay(base, overlay)
    if isinstance(overlay, dict):
        return merge_overlay({}, overlay)
    if _is_named_list(base) and _is_named_list(overlay):
        return _merge_named(base, overlay)
    return deepcopy(overlay)


def _is_named_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value)
    )


def _merge_named(base: list[Manifest], overlay: list[Manifest]) -> list[Manifest]:
    changes = {item["name"]: item for item in overlay}
    known = {item["name"] for item in base}
    kept = [
        merge_overlay(item, changes[item["name"]]) if item["name"] in changes else deepcopy(item)
        for item in base
    ]
    return kept + [merge_overlay({}, item) for item in overlay if item["name"] not in known]
