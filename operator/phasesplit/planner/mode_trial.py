"""A trial as part of the choice of mode: begun when the list holds, kept or left by what it measures."""

from dataclasses import replace

from phasesplit.api.conditions import Reason
from phasesplit.api.routing import ServedMode
from phasesplit.planner.mode_checks import Situation
from phasesplit.planner.mode_choice import Choice
from phasesplit.planner.mode_types import ModeInput, ModeMemory
from phasesplit.planner.text import format_percent, format_seconds
from phasesplit.planner.trial import BLOCK, MAX_BLOCKS, advance_trial, backoff_s, start_trial
from phasesplit.planner.trial_halves import LOOK_EVERY, MIN_WORKERS, advance_halves, plan_halves
from phasesplit.planner.trial_types import Part, Trial, TrialReading, TrialStep, TrialVerdict

_ENDINGS = {
    TrialVerdict.REFUTED: "a trial did not confirm the split",
    TrialVerdict.STOPPED: "a trial of the split was stopped because fewer requests met their targets",
    TrialVerdict.STARVED: "a trial of the split ended because too few requests came",
}


def wait_for_trial(given: ModeInput, memory: ModeMemory) -> Choice | None:
    """Still colocated because the last trial failed not long ago."""
    if memory.trial_not_before_s is None or given.now_s >= memory.trial_not_before_s:
        return None
    left = format_seconds(memory.trial_not_before_s - given.now_s)
    message = f"{memory.trial_message}; the next one in {left} at the earliest"
    return Choice(ServedMode.COLOCATED, Reason.TRIAL_FAILED, message, memory)


def begin_trial(situation: Situation, memory: ModeMemory, gain: str) -> Choice:
    """Both modes at once where there are workers enough, else in turn, colocated first."""
    given = situation.given
    rate_per_s = sum(load.arrival_rate_per_s for load in given.loads)
    trial = start_trial(given.now_s, rate_per_s, given.requests)
    evidence = situation.evidence
    share = evidence.prefill_workers / evidence.workers if evidence is not None else 0.5
    halves = plan_halves(_trial_id(trial), given.workers, share)
    trial = replace(trial, prefill_share=share if halves is not None else None)
    memory = replace(memory, trial=trial, trial_reading=None, cause=None, cause_gone_since_s=None)
    how = "both modes at once" if halves else f"windows of {format_seconds(trial.window_s)}"
    message = f"{gain}; now tried on real requests, in {how}"
    return Choice(ServedMode.COLOCATED, Reason.TRIAL, message, memory, halves=halves)


def go_on_with_trial(given: ModeInput, trial: Trial) -> Choice:
    """The window's mode, or what the trial has come to."""
    at_once = trial.prefill_share is not None
    halves = plan_halves(_trial_id(trial), given.workers, trial.prefill_share or 0.5) if at_once else None
    if at_once and halves is None:
        return _too_few_workers(given)
    step = (advance_halves if at_once else advance_trial)(trial, given.requests, given.now_s)
    memory = replace(given.memory, trial_reading=step.reading)
    if step.verdict is TrialVerdict.RUNNING:
        mode = ServedMode.SPLIT if step.split else ServedMode.COLOCATED
        most = (LOOK_EVERY if at_once else BLOCK) * MAX_BLOCKS + 1
        kind = "both modes at once, period" if at_once else "window"
        message = f"trial, {kind} {step.trial.index + 1} of at most {most}: {describe_reading(step.reading)}"
        return Choice(mode, Reason.TRIAL, message, replace(memory, trial=step.trial), halves=halves)
    memory = replace(memory, trial=None)
    if step.verdict is TrialVerdict.CONFIRMED:
        memory = replace(memory, trial_failures=0, trial_not_before_s=None, trial_message="")
        message = f"a trial confirmed the split: {describe_reading(step.reading)}"
        return Choice(ServedMode.SPLIT, Reason.SPLIT_PAYS, message, memory)
    return _back(given, memory, step)


def describe_reading(reading: TrialReading) -> str:
    """Both modes in one phrase."""
    text = f"split {_part(reading.split)}, colocated {_part(reading.colocated)}"
    if reading.split.counted and reading.colocated.counted:
        points = [100 * value for value in (reading.difference, reading.low, reading.high)]
        text += f", {points[0]:+.0f} points ({points[1]:+.0f} to {points[2]:+.0f} at 95 %)"
    return text


def _trial_id(trial: Trial) -> str:
    return f"{trial.started_s:.0f}"


def _too_few_workers(given: ModeInput) -> Choice:
    """A worker went away; nothing is wrong with the split."""
    message = f"a trial of both modes at once ended because fewer than {MIN_WORKERS} workers are left"
    memory = replace(
        given.memory, trial=None, trial_message=message, trial_not_before_s=given.now_s + given.dwell_s
    )
    return Choice(ServedMode.COLOCATED, Reason.TRIAL_FAILED, message, memory)


def _back(given: ModeInput, memory: ModeMemory, step: TrialStep) -> Choice:
    """Colocated again; the wait doubles with every failure, but too few requests are nobody's fault."""
    starved = step.verdict is TrialVerdict.STARVED
    failures = memory.trial_failures + (0 if starved else 1)
    wait_s = given.dwell_s if starved else backoff_s(failures, given.dwell_s)
    ending = f"{_ENDINGS[step.verdict]}: {describe_reading(step.reading)}"
    memory = replace(
        memory,
        trial_failures=failures,
        trial_not_before_s=given.now_s + wait_s,
        trial_message=ending,
    )
    message = f"{ending}; the next one in {format_seconds(wait_s)} at the earliest"
    return Choice(ServedMode.COLOCATED, Reason.TRIAL_FAILED, message, memory)


def _part(part: Part) -> str:
    if not part.counted:
        return "not measured yet"
    return f"{part.attained} of {part.counted} in target ({format_percent(part.attained / part.counted)})"
