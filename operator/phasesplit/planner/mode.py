"""Split or colocated? One pure decision per tick, from one snapshot and the last decision's memory.

Causes end a split at once; a return waits until its cause has been gone for a dwell, and each
repetition doubles the dwell. Knows nothing of pods or metrics beyond `ModeInput`.
"""

from dataclasses import replace

from phasesplit.api.conditions import ConditionStatus, Reason
from phasesplit.api.routing import ServedMode
from phasesplit.api.v1alpha1 import Fallback, Mode, TrialPolicy
from phasesplit.planner.check_list import run_checks
from phasesplit.planner.evidence import Evidence, gather_evidence
from phasesplit.planner.links import judge_links
from phasesplit.planner.mode_checks import (
    ADOPTION,
    CAUSES,
    Finding,
    Situation,
    check_measured,
    check_traffic,
    describe_gain,
    first_finding,
)
from phasesplit.planner.mode_choice import Choice
from phasesplit.planner.mode_trial import begin_trial, go_on_with_trial, wait_for_trial
from phasesplit.planner.mode_types import ModeDecision, ModeInput, ModeMemory
from phasesplit.planner.text import format_seconds
from phasesplit.planner.trial_types import Trial

MAX_DWELL_S = 86_400.0
# A fallback within this many dwells of the one before counts as oscillation.
_OSCILLATION_DWELLS = 10.0


def decide_mode(given: ModeInput) -> ModeDecision:
    """What to serve from now on, and why."""
    link = judge_links(given)
    situation = Situation(given, link, gather_evidence(given, link))
    if given.wanted is not Mode.AUTO and given.memory.trial is not None:
        situation = replace(situation, given=replace(given, memory=replace(given.memory, trial=None)))
    choice = {Mode.COLOCATED: _colocated, Mode.SPLIT: _split, Mode.AUTO: _auto}[given.wanted](situation)
    return _finish(situation, choice)


def effective_dwell_s(memory: ModeMemory, dwell_s: float) -> float:
    """The dwell, doubled for each fallback that followed soon on the one before."""
    current, previous = dwell_s, None
    for at_s in memory.fallbacks_at_s:
        if previous is not None:
            soon = at_s - previous <= _OSCILLATION_DWELLS * current
            current = min(MAX_DWELL_S, current * 2) if soon else dwell_s
        previous = at_s
    return max(dwell_s, current)


def _colocated(situation: Situation) -> Choice:
    memory = replace(situation.given.memory, cause=None, cause_gone_since_s=None)
    return Choice(ServedMode.COLOCATED, Reason.AS_REQUESTED, "spec.mode is Colocated", memory)


def _split(situation: Situation) -> Choice:
    given = situation.given
    cause = first_finding(CAUSES, situation)
    if cause is not None:
        return _leave_split(given, cause)
    # Without a fallback nothing else serves meanwhile, so there is nothing to wait for.
    waiting = _waiting_to_return(given) if given.fallback is Fallback.ALWAYS else None
    if waiting is not None:
        return waiting
    memory = replace(given.memory, cause=None, cause_gone_since_s=None)
    return Choice(ServedMode.SPLIT, Reason.AS_REQUESTED, "spec.mode is Split and the split can serve", memory)


def _leave_split(given: ModeInput, cause: Finding) -> Choice:
    memory = replace(given.memory, cause_gone_since_s=None)
    if given.fallback is Fallback.NEVER:
        message = f"{cause.message}; spec.fallback is Never, so requests are answered 503"
        return Choice(ServedMode.SPLIT, cause.reason, message, memory, serving=False, cause=cause.reason)
    return Choice(ServedMode.COLOCATED, cause.reason, cause.message, memory, cause=cause.reason)


def _waiting_to_return(given: ModeInput) -> Choice | None:
    """Still colocated because the cause of the last fallback has not been gone for a dwell."""
    memory = given.memory
    if given.served is ServedMode.SPLIT or memory.cause is None:
        return None
    gone_since_s = memory.cause_gone_since_s if memory.cause_gone_since_s is not None else given.now_s
    dwell_s = effective_dwell_s(memory, given.dwell_s)
    left_s = gone_since_s + dwell_s - given.now_s
    if left_s <= 0:
        return None
    message = f"{memory.cause} is over; back to the split in {format_seconds(left_s)} if it stays so"
    return Choice(
        ServedMode.COLOCATED, Reason.DWELL, message, replace(memory, cause_gone_since_s=gone_since_s)
    )


def _auto(situation: Situation) -> Choice:
    if situation.given.memory.trial is not None:
        return _auto_trial(situation, situation.given.memory.trial)
    if situation.given.served is ServedMode.SPLIT:
        return _auto_split(situation)
    return _auto_colocated(situation)


def _auto_trial(situation: Situation, trial: Trial) -> Choice:
    """What ends a split at once ends a trial, too; nothing else does but its own verdict."""
    cause = first_finding(CAUSES, situation)
    if cause is None:
        return go_on_with_trial(situation.given, trial)
    memory = replace(situation.given.memory, trial=None, cause_gone_since_s=None)
    message = f"the trial was broken off: {cause.message}"
    return Choice(ServedMode.COLOCATED, cause.reason, message, memory, cause=cause.reason)


def _auto_split(situation: Situation) -> Choice:
    given, evidence = situation.given, situation.evidence
    cause = first_finding(CAUSES, situation)
    if cause is not None:
        memory = replace(given.memory, cause_gone_since_s=None)
        return Choice(ServedMode.COLOCATED, cause.reason, cause.message, memory, cause=cause.reason)
    if given.memory.trial_interrupted:
        memory = replace(given.memory, trial_interrupted=False)
        message = "a trial was interrupted by a restart of the operator; another one follows"
        return Choice(ServedMode.COLOCATED, Reason.TRIAL_FAILED, message, memory)
    informed = check_traffic(situation) is None and check_measured(situation) is None
    if not informed or evidence is None or evidence.loss_percent <= 0:
        memory = replace(given.memory, colocated_better_since_s=None)
        message = describe_gain(evidence, given.minimum_gain_percent) if evidence else "the split serves"
        return Choice(ServedMode.SPLIT, Reason.SPLIT_PAYS, message, memory)
    since_s = given.memory.colocated_better_since_s
    since_s = given.now_s if since_s is None else since_s
    message = describe_gain(evidence, given.minimum_gain_percent)
    memory = replace(given.memory, colocated_better_since_s=since_s)
    if given.now_s - since_s < given.dwell_s:
        left = format_seconds(since_s + given.dwell_s - given.now_s)
        return Choice(
            ServedMode.SPLIT, Reason.DWELL, f"{message}; colocated in {left} if it stays so", memory
        )
    memory = replace(memory, colocated_better_since_s=None)
    return Choice(
        ServedMode.COLOCATED, Reason.COLOCATED_BETTER, message, memory, cause=Reason.COLOCATED_BETTER
    )


def _auto_colocated(situation: Situation) -> Choice:
    given = situation.given
    memory = replace(given.memory, colocated_better_since_s=None)
    finding = first_finding(ADOPTION, situation)
    if finding is not None:
        memory = replace(memory, cause_gone_since_s=None)
        return Choice(ServedMode.COLOCATED, finding.reason, finding.message, memory)
    # The list must hold for a dwell, and a dwell lies between two changes.
    held_since_s = memory.cause_gone_since_s if memory.cause_gone_since_s is not None else given.now_s
    memory = replace(memory, cause_gone_since_s=held_since_s)
    served_since_s = memory.since_s if memory.since_s is not None else given.now_s
    dwell_s = effective_dwell_s(memory, given.dwell_s)
    needed_s = dwell_s if memory.cause is not None else 0.0
    left_s = max(held_since_s + needed_s, served_since_s + dwell_s) - given.now_s
    gain = describe_gain(situation.evidence, given.minimum_gain_percent) if situation.evidence else ""
    if left_s > 0:
        return Choice(
            ServedMode.COLOCATED,
            Reason.DWELL,
            f"{gain}; split in {format_seconds(left_s)} if it stays so",
            memory,
        )
    if given.trial is TrialPolicy.ALWAYS:
        return wait_for_trial(given, memory) or begin_trial(situation, memory, gain)
    memory = replace(memory, cause=None, cause_gone_since_s=None)
    return Choice(ServedMode.SPLIT, Reason.SPLIT_PAYS, gain, memory)


def _finish(situation: Situation, choice: Choice) -> ModeDecision:
    """Times, memory and the conditions that go with a choice."""
    given = situation.given
    changed = choice.mode is not given.served
    since_s = given.now_s if changed or given.memory.since_s is None else given.memory.since_s
    memory = replace(choice.memory, since_s=since_s)
    if changed and choice.mode is ServedMode.COLOCATED and choice.cause is not None:
        recent = [at for at in memory.fallbacks_at_s if given.now_s - at < 2 * MAX_DWELL_S]
        memory = replace(memory, fallbacks_at_s=(*recent[-15:], given.now_s), cause=choice.cause)
    beneficial, reason, message = _beneficial(situation, memory)
    numbers = dict(situation.evidence.numbers()) if situation.evidence else {}
    if situation.link.need_bytes_per_s is not None:
        numbers["linkNeedBytesPerSecond"] = situation.link.need_bytes_per_s
    if situation.link.have_bytes_per_s is not None:
        numbers["linkHaveBytesPerSecond"] = situation.link.have_bytes_per_s
    return ModeDecision(
        mode=choice.mode,
        reason=choice.reason,
        message=choice.message,
        since_s=since_s,
        changed=changed,
        serving=choice.serving,
        halves=choice.halves,
        colocated_allowed=not (given.wanted is Mode.SPLIT and given.fallback is Fallback.NEVER),
        link=situation.link,
        beneficial=beneficial,
        beneficial_reason=reason,
        beneficial_message=message,
        evidence=numbers,
        replay=situation.evidence.replay if situation.evidence else None,
        checks=run_checks(situation),
        memory=memory,
    )


def _beneficial(situation: Situation, memory: ModeMemory) -> tuple[ConditionStatus, Reason, str]:
    """The condition `SplitBeneficial`: advice, whatever is served."""
    for check in (check_traffic, check_measured):
        finding = check(situation)
        if finding is not None:
            return "Unknown", finding.reason, finding.message
    evidence: Evidence | None = situation.evidence
    if evidence is None:
        return "Unknown", Reason.NOT_YET_MEASURED, "the modes cannot be compared yet"
    finding = first_finding(ADOPTION, situation)
    if finding is None:
        tried = _tried(memory) if situation.given.wanted is Mode.AUTO else None
        gain = describe_gain(evidence, situation.given.minimum_gain_percent)
        return tried or ("True", Reason.SPLIT_PAYS, gain)
    if evidence.loss_percent > 0 and finding.reason is Reason.GAIN_TOO_SMALL:
        return "False", Reason.COLOCATED_BETTER, finding.message
    return "False", finding.reason, finding.message


def _tried(memory: ModeMemory) -> tuple[ConditionStatus, Reason, str] | None:
    """What was measured weighs more than what is predicted."""
    if memory.trial is not None:
        return "Unknown", Reason.TRIAL, "the split is being tried on real requests"
    if memory.trial_not_before_s is not None and memory.trial_failures:
        return "False", Reason.TRIAL_FAILED, memory.trial_message
    return None
