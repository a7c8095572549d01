"""Kubernetes quantities as numbers."""

import pytest

from phasesplit.api.quantities import is_same_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("1", 1), ("500m", 0.5), ("1.5", 1.5), (".5", 0.5), ("2Gi", 2 * 2**30), ("1k", 1000),
        ("100M", 1e8), ("1e3", 1000), ("1E3", 1000), ("2E", 2e18), ("1Ei", 2**60), ("-1", -1), (4, 4),
        ("250n", 2.5e-7),
    ],
)  # fmt: skip
def test_parse(text: str | int, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "two", "1GB", "1 Gi", "Gi", "1.2.3", "--1", "0x10"])
def test_refuse(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(("left", "right"), [("1000m", "1"), ("1024Mi", "1Gi"), (2, "2"), ("0.5", "500m")])
def test_same(left: str | int, right: str) -> None:
    assert is_same_quantity(left, right)
