"""The overlay on a pod template: maps deep, named lists by name, other lists whole."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.resources.overlay import merge_overlay

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("nothing", {"a": 1}, {}, {"a": 1}),
    ("scalar replaces", {"a": 1}, {"a": 2}, {"a": 2}),
    ("new key is added last", {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ("maps merge deep", {"m": {"a": 1, "b": {"c": 1}}}, {"m": {"b": {"d": 2}}},
     {"m": {"a": 1, "b": {"c": 1, "d": 2}}}),
    ("null removes", {"m": {"a": 1, "b": 2}}, {"m": {"a": None}}, {"m": {"b": 2}}),
    ("null for what is not there", {"a": 1}, {"b": None}, {"a": 1}),
    ("plain list replaces", {"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
    ("empty list replaces", {"l": [{"name": "a"}]}, {"l": []}, {"l": []}),
    (
        "named list merges by name, keeps order, appends",
        {"l": [{"name": "a", "x": 1}, {"name": "b", "x": 1}]},
        {"l": [{"name": "c"}, {"name": "a", "y": 2}]},
        {"l": [{"name": "a", "x": 1, "y": 2}, {"name": "b", "x": 1}, {"name": "c"}]},
    ),
    ("map over scalar", {"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ("scalar over map", {"a": {"b": 1}}, {"a": 1}, {"a": 1}),
    ("nulls inside a new map vanish", {}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "overlay", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_merge(base: dict[str, Any], overlay: dict[str, Any], expected: dict[str, Any]) -> None:
    before = deepcopy(base), deepcopy(overlay)
    merged = merge_overlay(base, overlay)
    assert merged == expected
    assert list(merged) == list(expected)
    assert (base, overlay) == before


_values = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=12,
)
_maps = st.dictionaries(st.sampled_from("abcd"), _values, max_size=4)


@settings(deadline=None)
@given(base=_maps, overlay=_maps)
def test_merging_twice_changes_nothing_more(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    once = merge_overlay(base, overlay)
    assert merge_overlay(once, overlay) == once


@settings(deadline=None)
@given(base=_maps)
def test_an_overlay_of_itself_changes_nothing(base: dict[str, Any]) -> None:
    assert merge_overlay(base, base) == base
