"""Every child of every sample equals its golden file; `make golden` writes them anew."""

import pytest

from helpers_resources import GOLDEN, render_golden, sample_names


@pytest.mark.parametrize("sample", sample_names())
def test_children_equal_golden_file(sample: str) -> None:
    assert render_golden(sample) == (GOLDEN / f"{sample}.yaml").read_text()


def test_every_golden_file_has_a_sample() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sample_names()
