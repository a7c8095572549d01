"""The fitted law of a step: recovers a known law, shrugs off outliers, reports what is left."""

import random
from pathlib import Path

import pytest

from phasesplit.api.reports import StepProfile
from phasesplit_worker.engine.pace import read_pace, remaining_s
from phasesplit_worker.engine.profiler import StepProfiler, record_of
from phasesplit_worker.errors import ConfigError
from phasesplit_worker.scheduling.cost import StepLoad, step_s

TRUTH = StepProfile(
    base_s=0.004,
    per_prefill_token_s=0.0006,
    per_prefill_context_s=2e-7,
    per_decode_sequence_s=0.003,
    per_decode_context_s=4e-6,
    overlap=0.4,
)
GUESS = StepProfile(base_s=1.0, guessed=True)


def random_load(generator: random.Random, kind: int) -> StepLoad:
    load = StepLoad()
    if kind != 1:
        load = load.with_chunk(generator.randrange(8, 300), generator.randrange(0, 600))
    if kind != 0:
        for _ in range(generator.randrange(1, 16)):
            load = load.with_decode(generator.randrange(20, 900))
    return load


def fitted(*, noise: float, outliers: float, kinds: tuple[int, ...] = (0, 1, 2)) -> StepProfile:
    generator = random.Random(1)
    profiler = StepProfiler(GUESS)
    for number in range(240):
        load = random_load(generator, kinds[number % len(kinds)])
        seconds = step_s(TRUTH, load) * generator.gauss(1.0, noise)
        if generator.random() < outliers:
            seconds *= generator.uniform(2, 10)
        profiler.add(record_of(load, seconds), number * 0.1)
    assert profiler.refit()
    return profiler.profile


@pytest.mark.parametrize(("noise", "outliers"), [(0.0, 0.0), (0.05, 0.0), (0.05, 0.1)])
def test_a_known_law_is_recovered(noise: float, outliers: float) -> None:
    profile = fitted(noise=noise, outliers=outliers)
    generator = random.Random(2)
    for kind in (0, 1, 2):
        for _ in range(50):
            load = random_load(generator, kind)
            assert step_s(profile, load) == pytest.approx(step_s(TRUTH, load), rel=0.15)
    assert profile.num_samples == 240 and not profile.guessed
    assert profile.residual < 0.1


@pytest.mark.parametrize("slowdown", [2.0, 5.0])
@pytest.mark.parametrize("hindered_steps", [100, 2000])
def test_a_shared_processor_does_not_make_a_worker_look_slow(slowdown: float, hindered_steps: int) -> None:
    generator = random.Random(3)
    profiler = StepProfiler(GUESS)
    for number in range(60):
        load = random_load(generator, number % 3)
        seconds = step_s(TRUTH, load)
        profiler.add(record_of(load, seconds), number * 0.1, seconds)
    for number in range(hindered_steps):
        load = random_load(generator, number % 3)
        seconds = step_s(TRUTH, load)
        profiler.add(record_of(load, slowdown * seconds), 6.0 + number * 0.1, seconds)
    assert profiler.refit()
    for number in range(50):
        load = random_load(generator, number % 3)
        assert step_s(profiler.profile, load) == pytest.approx(step_s(TRUTH, load), rel=0.15)


def test_a_processor_shared_for_good_is_the_worker_s_speed() -> None:
    generator = random.Random(4)
    profiler = StepProfiler(GUESS)
    for number in range(800):
        load = random_load(generator, number % 3)
        seconds = step_s(TRUTH, load)
        is_free = number < 60
        profiler.add(record_of(load, seconds if is_free else 3 * seconds), float(number), seconds)
    assert profiler.refit()
    for number in range(50):
        load = random_load(generator, number % 3)
        assert step_s(profiler.profile, load) == pytest.approx(3 * step_s(TRUTH, load), rel=0.2)


def test_a_worker_that_was_always_hindered_has_a_profile() -> None:
    generator = random.Random(5)
    profiler = StepProfiler(GUESS)
    for number in range(60):
        load = random_load(generator, number % 3)
        seconds = step_s(TRUTH, load)
        profiler.add(record_of(load, 2 * seconds), float(number), seconds)
    assert profiler.refit()
    assert not profiler.profile.guessed


def test_coefficients_are_never_negative() -> None:
    profile = fitted(noise=0.3, outliers=0.2)
    values = profile.model_dump(include=set(StepProfile.model_fields) - {"guessed", "num_samples"})
    assert min(values.values()) >= 0


def test_prefill_alone_says_nothing_of_decode() -> None:
    profile = fitted(noise=0.0, outliers=0.0, kinds=(0,))
    assert profile.per_decode_sequence_s == 0
    assert profile.per_prefill_token_s == pytest.approx(TRUTH.per_prefill_token_s, rel=0.05)


def test_a_guess_stands_until_there_are_enough_steps() -> None:
    profiler = StepProfiler(GUESS)
    profiler.add(record_of(StepLoad(decode_sequences=1, decode_context_tokens=9), 0.01), 0.0)
    assert not profiler.refit() and profiler.profile is GUESS


def test_fits_are_rationed() -> None:
    profiler = StepProfiler(GUESS)
    for _ in range(20):
        profiler.add(record_of(StepLoad(decode_sequences=1, decode_context_tokens=9), 0.01), 0.0)
    assert profiler.refit_if_due(10.0)
    assert not profiler.refit_if_due(11.0)
    assert profiler.refit_if_due(12.5)


def test_pace_waits_for_the_rest_and_never_shortens() -> None:
    load = StepLoad(decode_sequences=2)
    assert remaining_s(TRUTH, load, 0.004) == pytest.approx(0.006)
    assert remaining_s(TRUTH, load, 1.0) == 0


def test_a_wrong_pace_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pace(path)
    path.write_text('{"base_s": "slow"}')
    with pytest.raises(ConfigError, match="base_s"):
        read_pace(path)
    path.write_text('{"base_s": 0.5}')
    assert read_pace(path).base_s == 0.5
