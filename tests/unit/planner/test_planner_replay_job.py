"""What the replay program reads and writes, and the flips that it finds."""

import math
from dataclasses import fields, replace

import pytest

from helpers_planner import GPU
from helpers_traces import random_trace
from phasesplit.planner.demand import Hardware
from phasesplit.planner.flips import replay_pays
from phasesplit.planner.replay import ReplayInput, replay
from phasesplit.planner.replay_job import ReplayJob, ReplayLine
from phasesplit.planner.replay_program import run_job
from phasesplit.planner.simulation_types import Arrival, SimulatedClass

CLASSES = (SimulatedClass("default", 16.0, 0.034, 0.9),)
WINDOW = ReplayInput(
    tuple(random_trace(11, 2.6, 300, 4000, 200)), Hardware(GPU, GPU, 131_072, 300_000), CLASSES, workers=4
)


def pays(given: ReplayInput) -> bool:
    found = replay(given)
    assert found is not None
    return replay_pays(found, 5.0, CLASSES[0].tpot_s)


def test_jobs_and_answers_survive_the_pipe() -> None:
    job = ReplayJob(given=replace(WINDOW, trace=WINDOW.trace[:5]), minimum_gain_percent=5)
    again = ReplayJob.model_validate_json(job.model_dump_json())
    assert again == job
    assert math.isinf(again.given.hardware.link_bytes_per_s)
    for line in run_job(job):
        assert ReplayLine.model_validate_json(line.model_dump_json(exclude_none=True)) == line


BAD = {
    "negative length": {"trace": (Arrival(0.0, -5, 10),)},
    "no such class": {"trace": (Arrival(0.0, 5, 10, class_index=3),)},
    "no time": {"trace": (Arrival(math.nan, 5, 10),)},
    "time before the start": {"trace": (Arrival(-1e9, 5, 10),)},
    "no link": {"hardware": replace(WINDOW.hardware, link_bytes_per_s=0.0)},
    "no room": {"hardware": replace(WINDOW.hardware, kv_tokens_per_worker=0.0)},
    "endless steps": {
        "hardware": replace(WINDOW.hardware, decode_profile=GPU.model_copy(update={"base_s": math.inf}))
    },
    "no workers": {"workers": 0},
    "a step of no tokens": {"chunk_tokens": -1},
    "no sequences": {"max_num_seqs": 0},
    "no classes": {"classes": ()},
    "too many requests": {"trace": WINDOW.trace * 10},
}

HARDWARE = [field.name for field in fields(Hardware) if not field.name.endswith("profile")]
COSTS = ["base_s", *(name for name in type(GPU).model_fields if name.startswith("per_")), "overlap"]
TARGETS = ["ttft_s", "tpot_s", "share"]


def with_number(where: str, name: str, value: float) -> ReplayInput:
    """The window with one of its numbers changed."""
    if where == "classes":
        return replace(WINDOW, classes=(replace(CLASSES[0], **{name: value}),))
    if where == "hardware":
        return replace(WINDOW, hardware=replace(WINDOW.hardware, **{name: value}))
    profile = GPU.model_copy(update={name: value})
    return replace(WINDOW, hardware=replace(WINDOW.hardware, **{where: profile}))


NUMBERS = (
    [("hardware", name) for name in HARDWARE]
    + [(phase, name) for phase in ("prefill_profile", "decode_profile") for name in COSTS]
    + [("classes", name) for name in TARGETS]
)


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1])
@pytest.mark.parametrize(("where", "name"), NUMBERS)
def test_no_number_may_be_negative_or_none_at_all(where: str, name: str, value: float) -> None:
    with pytest.raises(ValueError, match="ReplayJob"):
        ReplayJob(given=with_number(where, name, value), minimum_gain_percent=5)


@pytest.mark.parametrize("name", BAD)
def test_a_job_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="ReplayJob"):
        ReplayJob(given=replace(WINDOW, **BAD[name]), minimum_gain_percent=5)


def test_the_outcome_comes_first_and_each_flip_turns_the_answer() -> None:
    lines = list(run_job(ReplayJob(given=WINDOW, minimum_gain_percent=5)))
    assert lines[0].outcome == replay(WINDOW)
    assert pays(WINDOW)
    flips = {line.flip.what: line.flip for line in lines[1:] if line.flip is not None}
    assert "load" in flips
    factor = flips["load"].factor
    assert factor < 1
    slower = replace(WINDOW, trace=tuple(replace(a, at_s=a.at_s / (factor * 0.95)) for a in WINDOW.trace))
    assert not pays(slower)
    assert flips["load"].message.startswith("Colocated with ")
