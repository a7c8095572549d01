"""Why this mode and not the other, why these nodes, why this many; and what would turn the answer.

Says again, in full, what the decisions were made of. Takes no decision and changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phasesplit.api.names import Pool
from phasesplit.api.routing import LatencyClass, ServedMode
from phasesplit.planner.check_list import run_checks
from phasesplit.planner.evidence import Evidence, gather_evidence
from phasesplit.planner.flips import Flip
from phasesplit.planner.links import judge_links
from phasesplit.planner.mode_checks import ADOPTION, Situation, describe_gain, first_finding
from phasesplit.planner.mode_types import CheckResult, ModeDecision, ModeInput
from phasesplit.planner.placement_types import PlacementPlan
from phasesplit.planner.scaling_types import ScalingDecision
from phasesplit.planner.text import count_of, format_percent, format_rate, format_seconds

_FLIP_RANGE = 16.0  # how far a change is looked for, as a factor
_FLIP_PRECISION = 1.02


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer."""

    question: str
    answer: str
    because: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    flips: tuple[Flip, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything `phasesplit explain` shows."""

    mode: Section
    nodes: Section
    workers: Section


def explain(
    given: ModeInput, mode: ModeDecision, placement: PlacementPlan, scaling: ScalingDecision
) -> Explanation:
    """Put the three decisions into words, with the numbers behind them."""
    return Explanation(
        mode=explain_mode(given, mode), nodes=explain_nodes(placement), workers=explain_workers(scaling)
    )


def explain_mode(given: ModeInput, decision: ModeDecision) -> Section:
    """Every check with its verdict, both predictions, and the flip boundaries."""
    link = judge_links(given)
    situation = Situation(given, link, gather_evidence(given, link))
    because = [f"{decision.reason}: {decision.message}"]
    if situation.evidence is not None:
        because.append(describe_gain(situation.evidence, given.minimum_gain_percent))
        because += _describe_predictions(situation.evidence)
    return Section(
        question="Why this mode and not the other?",
        answer=f"{decision.mode} is served" if decision.serving else "nothing is served: requests get 503",
        because=tuple(because),
        checks=run_checks(situation),
        flips=find_flips(given) if situation.evidence is not None else (),
    )


def explain_nodes(plan: PlacementPlan) -> Section:
    """Where the pods are, how far that is from the best possible, and what is missing."""
    because = [plan.message]
    if plan.wire_s > 0 and plan.bound_wire_s > 0:
        because.append(
            f"KV spends {format_seconds(plan.wire_s)} per request on the wire; "
            f"no placement could be below {format_seconds(plan.bound_wire_s)}"
        )
    because.append(
        "the exact node changes the cost" if plan.node_matters else "all eligible nodes cost the same"
    )
    because += [
        f"{count_of(len(nodes), 'node')} may take the {pool} pool" for pool, nodes in plan.eligible.items()
    ]
    because += [
        f"{move.pool} {move.ordinal} would be nearer on {move.to_node} than on {move.from_node}"
        for move in plan.moves
    ]
    answer = "; ".join(
        f"{pool}: {', '.join(node or 'nowhere' for node in nodes)}"
        for pool, nodes in plan.nodes.items()
        if nodes
    )
    return Section("Why these nodes?", answer or "no pods", tuple(because))


def explain_workers(decision: ScalingDecision) -> Section:
    """How many workers, and how many the load needs by role."""
    answer = ", ".join(f"{decision.advice[pool]} {pool}" for pool in Pool if pool in decision.advice)
    needed = ", ".join(f"{count} {role}" for role, count in decision.needed.items())
    because = [f"{decision.reason}: {decision.message}", f"the load needs {needed}"]
    if not decision.feasible:
        because.append("no number of workers meets every target at this load")
    if not decision.replicas:
        because.append("spec.scaling.policy leaves the replicas to somebody else: this is advice")
    return Section("Why this many?", answer, tuple(because))


def find_flips(given: ModeInput) -> tuple[Flip, ...]:
    """Smallest change of link, load and targets that turns whether the split pays; nearest first."""
    pays = _split_pays(given)
    flips = []
    for what, change in _KNOBS:
        factor = _nearest_flip(given, change, pays)
        if factor is not None:
            flips.append(Flip(what, factor, _flip_sentence(given, what, factor, pays)))
    return tuple(sorted(flips, key=lambda flip: max(flip.factor, 1 / flip.factor)))


def _describe_predictions(evidence: Evidence) -> list[str]:
    return [
        f"{name}, class {item.name}: TTFT {format_seconds(item.ttft_s)}, "
        f"TPOT {format_seconds(item.tpot_s)}, {format_percent(item.attainment)} in target predicted"
        for name, prediction in (("split", evidence.split), ("colocated", evidence.colocated))
        for item in prediction.classes
    ]


def _split_pays(given: ModeInput) -> bool:
    link = judge_links(given)
    return first_finding(ADOPTION, Situation(given, link, gather_evidence(given, link))) is None


def _scaled_links(given: ModeInput, factor: float) -> ModeInput:
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in given.links)
    return replace(given, links=links)


def _scaled_load(given: ModeInput, factor: float) -> ModeInput:
    """Attainment was measured at the present load, so it says nothing of another."""
    loads = tuple(
        replace(load, arrival_rate_per_s=load.arrival_rate_per_s * factor, attainment=None)
        for load in given.loads
    )
    return replace(given, loads=loads)


def _scaled_targets(given: ModeInput, ttft: float, tpot: float) -> ModeInput:
    classes = tuple(_with_targets(item, item.ttft_s * ttft, item.tpot_s * tpot) for item in given.classes)
    loads = tuple(replace(load, attainment=None) for load in given.loads)
    return replace(given, classes=classes, loads=loads)


def _with_targets(item: LatencyClass, ttft_s: float, tpot_s: float) -> LatencyClass:
    return item.model_copy(update={"ttft_s": ttft_s, "tpot_s": tpot_s})


_KNOBS: Sequence[tuple[str, Callable[[ModeInput, float], ModeInput]]] = (
    ("link", _scaled_links),
    ("load", _scaled_load),
    ("TTFT target", lambda given, factor: _scaled_targets(given, factor, 1.0)),
    ("TPOT target", lambda given, factor: _scaled_targets(given, 1.0, factor)),
)


def _nearest_flip(
    given: ModeInput, change: Callable[[ModeInput, float], ModeInput], pays: bool
) -> float | None:
    """The factor nearest to 1, either way, at which the answer turns; None within the range."""
    found = []
    for direction in (1, -1):
        near, far = 1.0, 2.0**0.5
        while far <= _FLIP_RANGE and _split_pays(change(given, far**direction)) == pays:
            near, far = far, far * 2.0**0.5
        if far > _FLIP_RANGE:
            continue
        while far / near > _FLIP_PRECISION:
            middle = (near * far) ** 0.5
            if _split_pays(change(given, middle**direction)) == pays:
                near = middle
            else:
                far = middle
        found.append(far**direction)
    return min(found, key=lambda factor: max(factor, 1 / factor), default=None)


def _flip_sentence(given: ModeInput, what: str, factor: float, pays: bool) -> str:
    turned = ServedMode.COLOCATED if pays else ServedMode.SPLIT
    first = given.classes[0]
    if what == "link":
        slowest = min((link.bytes_per_s for link in given.links), default=0.0)
        to = f"the slowest link at {format_rate(slowest * factor)} instead of {format_rate(slowest)}"
    elif what == "load":
        rate = sum(load.arrival_rate_per_s for load in given.loads)
        to = f"{rate * factor:.3g} requests/s instead of {rate:.3g}"
    else:
        target_s = first.ttft_s if what == "TTFT target" else first.tpot_s
        to = f"a {what} of {format_seconds(target_s * factor)} instead of {format_seconds(target_s)}"
    return f"{turned} with {to}"
