"""A simulated day: steady noisy load must not make the decisions swing."""

import itertools
import random
from dataclasses import replace

import pytest

from helpers_planner import LONG, auto_object, scaling_input, scaling_load, scaling_workers
from helpers_traces import random_trace
from helpers_traffic import served_trace
from phasesplit.api.names import Pool
from phasesplit.api.routing import ServedMode
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.mode_types import ReplayEvidence
from phasesplit.planner.replay import replay
from phasesplit.planner.replay_schedule import build_replay
from phasesplit.planner.scaling import plan_scaling

DAY_S = 86_400.0


def count_flips(gain_scale: float, seed: int) -> int:
    """Changes of mode over a day in which load, lengths and link measurements are noisy."""
    rng = random.Random(seed)
    given = auto_object(dwell_s=600.0)
    flips, now_s = 0, 0.0
    while now_s < DAY_S:
        noisy = replace(
            LONG,
            arrival_rate_per_s=gain_scale * rng.gauss(1.0, 0.15),
            mean_prompt_tokens=LONG.mean_prompt_tokens * rng.gauss(1.0, 0.1),
            mean_output_tokens=LONG.mean_output_tokens * rng.gauss(1.0, 0.1),
            attainment=None,
        )
        links = tuple(replace(link, bytes_per_s=25e9 * rng.uniform(0.8, 1.2)) for link in given.links)
        decision = decide_mode(replace(given, now_s=now_s, loads=(noisy,), links=links))
        flips += decision.changed
        given = replace(given, served=decision.mode, memory=decision.memory)
        now_s += 1200.0
    return flips


def test_mode_flips_at_most_once_in_a_steady_day() -> None:
    flips = [count_flips(scale, seed) for seed, scale in enumerate((1.3, 2.2))]
    assert max(flips) <= 1, flips


def replayed_day(load_scale: float, seed: int, requests: int = 120) -> list[ServedMode]:
    """The mode after every pass of a day, each decided on a replay of another window of the same load."""
    rng = random.Random(seed)
    given = auto_object(dwell_s=600.0)
    modes, now_s = [], 0.0
    while now_s < DAY_S:
        rate = load_scale * rng.gauss(1.0, 0.1)
        trace = random_trace(rng.randrange(1 << 30), rate, requests, 4000, 200)
        start_s = now_s - trace[-1].at_s - 10.0
        noisy = replace(LONG, arrival_rate_per_s=rate, attainment=None)
        links = tuple(replace(link, bytes_per_s=25e9 * rng.uniform(0.8, 1.2)) for link in given.links)
        given = replace(given, now_s=now_s, loads=(noisy,), links=links)
        job = build_replay(given, served_trace(trace, start_s))
        assert job is not None
        outcome = replay(job)
        assert outcome is not None
        for age_s in (0.0, 650.0):  # long enough for a dwell to pass
            given = replace(given, now_s=now_s + age_s, replay=ReplayEvidence(outcome, age_s))
            decision = decide_mode(given)
            assert decision.replay is not None
            given = replace(given, served=decision.mode, memory=decision.memory)
            modes.append(decision.mode)
        now_s += 2400.0
    return modes


@pytest.mark.parametrize(
    ("load_scale", "settles"), [(1.0, ServedMode.COLOCATED), (2.7, None), (3.5, ServedMode.SPLIT)]
)
def test_replays_of_noisy_windows_flip_the_mode_at_most_once_a_day(
    load_scale: float, settles: ServedMode | None
) -> None:
    modes = replayed_day(load_scale, seed=5)
    flips = sum(a is not b for a, b in itertools.pairwise(modes))
    assert flips <= 1, modes
    assert settles in (None, modes[-1])


def test_mode_settles_on_what_the_load_asks_for() -> None:
    quiet = auto_object(loads=(replace(LONG, arrival_rate_per_s=0.2, attainment=1.0),))
    assert decide_mode(quiet).mode is ServedMode.COLOCATED


def test_replicas_rest_under_a_steady_noisy_load() -> None:
    rng = random.Random(7)
    for rate in (1.0, 9.0):
        given, sizes, now_s = scaling_input(rate), [], 0.0
        while now_s < DAY_S / 4:
            loads = (scaling_load(rate * rng.gauss(1.0, 0.05)),)
            decision = plan_scaling(replace(given, now_s=now_s, loads=loads))
            pools = {
                pool: replace(item, desired=decision.advice[pool], ready=decision.advice[pool])
                for pool, item in given.pools.items()
            }
            made = scaling_workers(decision.advice[Pool.PREFILL], decision.advice[Pool.DECODE])
            given = replace(given, pools=pools, workers=made, memory=decision.memory)
            sizes.append(sum(decision.advice.values()))
            now_s += 60.0
        settled = sizes[20:]
        changes = sum(a != b for a, b in itertools.pairwise(settled))
        assert changes <= 2, (rate, changes)
