"""The evidence behind the mode, as `status.evidence` shows it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api.routing import ServedMode
from phasesplit.api.status import (
    CheckStatus,
    EvidenceSource,
    EvidenceStatus,
    FlipStatus,
    ModeEvidence,
    TrialArmStatus,
    TrialStatus,
)
from phasesplit.cluster.status_writer import quantise
from phasesplit.operator.times import to_rfc3339
from phasesplit.planner.flips import Flip
from phasesplit.planner.mode_types import LinkVerdict, ModeDecision, ModeMemory
from phasesplit.planner.text import format_rate
from phasesplit.planner.trial_types import Part

_MAX_TEXT = 512


@dataclass(frozen=True)
class ReplayNews:
    """What the last replays said beyond the evidence that the decision rests on."""

    flips: tuple[Flip, ...] = ()
    problem: str = ""


def build_evidence(decision: ModeDecision, news: ReplayNews, now_s: float) -> EvidenceStatus | None:
    """The numbers, the list, and what would turn the answer; None while nothing is known."""
    numbers, replay = decision.evidence, decision.replay
    trial = _trial(decision.memory)
    if not numbers and not decision.checks and trial is None:
        return None
    requests = numbers.get("requests")
    source = EvidenceSource.REPLAY if replay is not None else EvidenceSource.CLOSED_FORM
    return EvidenceStatus(
        source=source if "splitGoodputPerSecond" in numbers else None,
        replayed_at=to_rfc3339(now_s - replay.age_s) if replay is not None else None,
        requests=round(requests) if requests is not None else None,
        split=_mode("split", numbers),
        colocated=_mode("colocated", numbers),
        gain_percent=quantise(numbers.get("gainPercent")),
        gain_low_percent=quantise(numbers.get("gainLowPercent")),
        gain_high_percent=quantise(numbers.get("gainHighPercent")),
        interference_percent=quantise(numbers.get("interferencePercent")),
        link_need_bytes_per_second=quantise(numbers.get("linkNeedBytesPerSecond")),
        link_have_bytes_per_second=quantise(numbers.get("linkHaveBytesPerSecond")),
        checks=[
            CheckStatus(name=item.label, passed=item.passed, message=item.message[:_MAX_TEXT])
            for item in decision.checks
        ],
        flips=_flips(decision, news.flips if replay is not None else ()),
        trial=trial,
        problem=news.problem[:_MAX_TEXT],
    )


def _mode(prefix: str, numbers: Mapping[str, float]) -> ModeEvidence | None:
    if f"{prefix}GoodputPerSecond" not in numbers:
        return None
    return ModeEvidence(
        goodput_per_second=quantise(numbers[f"{prefix}GoodputPerSecond"]),
        attainment_percent=quantise(numbers.get(f"{prefix}AttainmentPercent")),
    )


def _trial(memory: ModeMemory) -> TrialStatus | None:
    reading = memory.trial_reading
    if reading is None and not memory.trial_failures and memory.trial is None:
        return None
    both = reading is not None and reading.split.counted and reading.colocated.counted
    return TrialStatus(
        running=memory.trial is not None,
        split=_arm(reading.split) if reading else None,
        colocated=_arm(reading.colocated) if reading else None,
        difference_percent_points=quantise(100 * reading.difference) if reading and both else None,
        failures=memory.trial_failures,
        not_before=to_rfc3339(memory.trial_not_before_s) if memory.trial_not_before_s is not None else None,
        message=memory.trial_message[:_MAX_TEXT],
    )


def _arm(part: Part) -> TrialArmStatus:
    return TrialArmStatus(requests=part.counted, attained=part.attained)


def _flips(decision: ModeDecision, replayed: Sequence[Flip]) -> list[FlipStatus]:
    """A link below need is in the way whatever a replay says, so its need is the change of the link."""
    found = list(replayed)
    needed = _link_flip(decision.link)
    if needed is not None:
        found = [needed, *(flip for flip in found if flip.what != needed.what)]
    found.sort(key=lambda flip: max(flip.factor, 1 / flip.factor))
    return [
        FlipStatus(what=flip.what, factor=quantise(flip.factor, 3) or 0.0, message=flip.message[:_MAX_TEXT])
        for flip in found
    ]


def _link_flip(link: LinkVerdict) -> Flip | None:
    need, have = link.need_bytes_per_s, link.have_bytes_per_s
    if link.status != "False" or not need or not have or need <= have:
        return None
    text = f"{ServedMode.SPLIT} with a link of {format_rate(need)} instead of {format_rate(have)}"
    return Flip("link", need / have, text)
