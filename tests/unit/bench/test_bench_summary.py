"""Arrivals and summaries of the load generator."""

import itertools
import random

import pytest

from phasesplit_bench.arrivals import Length, make_prompt, poisson
from phasesplit_bench.client import Result
from phasesplit_bench.summary import quantile, summarise


def _result(index: int, **fields: object) -> Result:
    times = {
        "status": 200,
        "ttft_s": 0.5,
        "tpot_s": 0.05,
        "e2e_s": 1.0,
        "output_tokens": 11,
        "prompt_tokens": 10,
    }
    return Result(index=index, slo_class="", start_s=float(index), **(times | fields))  # type: ignore[arg-type]


def test_arrivals_are_reproducible_and_poisson() -> None:
    lengths = Length(10, 20), Length(5, 5)
    first = list(poisson(50, 100, *lengths, random.Random(1)))
    again = list(poisson(50, 100, *lengths, random.Random(1)))
    assert first == again
    assert len(first) == pytest.approx(5000, rel=0.05)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(first)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(1, abs=0.06)
    assert [arrival.index for arrival in first] == list(range(len(first)))


def test_prompts_share_no_prefix() -> None:
    source = random.Random(3)
    prompts = [make_prompt(100, source) for _ in range(50)]
    assert len({prompt.split(" ")[0] for prompt in prompts}) == 50


@pytest.mark.parametrize("text", ["", "x", "0", "5:3", "-1", "1:2:3"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512 or 100:1000"):
        Length.parse(text)


def test_failures_and_refusals_are_misses() -> None:
    results = [
        _result(0),
        _result(1, ttft_s=3.0),
        _result(2, tpot_s=0.5),
        _result(3, status=429, error="busy", ttft_s=None),
        _result(4, error="the stream ended without [DONE]"),
        _result(5, tpot_s=None, output_tokens=1),
    ]
    summary = summarise(results, ttft_target_s=1.0, tpot_target_s=0.1)
    assert (summary.requests, summary.finished, summary.rejected, summary.failed) == (6, 4, 1, 1)
    assert summary.attained == 2
    assert summary.attainment == pytest.approx(2 / 6)
    assert summarise(results).attained is None
    assert summarise(results, warmup_s=3).requests == 3
    assert summarise([]).ttft_s.p50 is None


def test_quantiles_interpolate() -> None:
    assert quantile([], 50) is None
    assert quantile([1.0], 99) == 1.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert quantile([1.0, 2.0], 100) == 2.0
