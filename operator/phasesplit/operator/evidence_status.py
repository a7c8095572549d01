"""The evidence behind the mode, as `status.evidence` shows it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasesplit.api.routing import ServedMode
from phasesplit.api.status import CheckStatus, EvidenceSource, EvidenceStatus, FlipStatus, ModeEvidence
from phasesplit.cluster.status_writer import quantise
from phasesplit.operator.times import to_rfc3339
from phasesplit.planner.flips import Flip
from phasesplit.planner.mode_types import LinkVerdict, ModeDecision
from phasesplit.planner.text import format_rate

_MAX_TEXT = 512


@dataclass(frozen=True)
class ReplayNews:
    """What the last replays said beyond the evidence that the decision rests on."""

    flips: tuple[Flip, ...] = ()
    problem: str = ""


def build_evidence(decision: ModeDecision, news: ReplayNews, now_s: float) -> EvidenceStatus | None:
    """The numbers, the list, and what would turn the answer; None while nothing is known."""
    numbers, replay = decision.evidence, decision.replay
    if not numbers:
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
        problem=news.problem[:_MAX_TEXT],
    )


def _mode(prefix: str, numbers: Mapping[str, float]) -> ModeEvidence | None:
    if f"{prefix}GoodputPerSecond" not in numbers:
        return None
    return ModeEvidence(
        goodput_per_second=quantise(numbers[f"{prefix}GoodputPerSecond"]),
        attainment_percent=quantise(numbers.get(f"{prefix}AttainmentPercent")),
    )


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
