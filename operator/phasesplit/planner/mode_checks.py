"""The ordered lists behind the choice of mode: small checks, each giving a reason and a sentence.

`CAUSES` end a split at once; `ADOPTION` must all be silent before Auto adopts one. Every check is
pure and looks at the same situation, gathered once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.planner.evidence import MIN_REQUESTS, Evidence, has_traffic, is_measured
from phasesplit.planner.mode_types import LinkVerdict, ModeInput, ReplayEvidence
from phasesplit.planner.replay import ReplayOutcome
from phasesplit.planner.text import count_of, format_percent, format_seconds

INTERFERENCE_NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Finding:
    """Why the split does not serve."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What every check looks at."""

    given: ModeInput
    link: LinkVerdict
    evidence: Evidence | None


Check = Callable[[Situation], Finding | None]


def first_finding(checks: Sequence[Check], situation: Situation) -> Finding | None:
    """The first check that objects."""
    for check in checks:
        finding = check(situation)
        if finding is not None:
            return finding
    return None


def check_pools_available(situation: Situation) -> Finding | None:
    """A pool without a ready worker cannot do its phase."""
    for pool in Pool:
        presence = situation.given.pools.get(pool)
        if presence is not None and presence.ready > 0:
            continue
        if presence is None or presence.desired == 0:
            state = "has no workers"
        else:
            state = f"has none of its {count_of(presence.desired, 'worker')} ready"
        detail = f": {presence.detail}" if presence is not None and presence.detail else ""
        return Finding(Reason.POOL_UNAVAILABLE, f"the {pool} pool {state}{detail}")
    return None


def check_fingerprints(situation: Situation) -> Finding | None:
    """KV may only pass between workers whose KV means the same."""
    by_pool = {
        pool: {
            worker.fingerprint
            for worker in situation.given.workers
            if worker.pool is pool and worker.ready and worker.fingerprint
        }
        for pool in Pool
    }
    prefill, decode = by_pool[Pool.PREFILL], by_pool[Pool.DECODE]
    if not prefill or not decode or prefill & decode:
        return None
    return Finding(
        Reason.MISMATCH,
        f"no prefill worker's KV fits a decode worker: fingerprints {_names(prefill)} against "
        f"{_names(decode)}; pods of one pool run another model, data type or block size",
    )


def check_link_carries(situation: Situation) -> Finding | None:
    """A measured link below need, or failing transfers, end the split."""
    if situation.link.status != "False":
        return None
    return Finding(Reason.LINK_DEGRADED, situation.link.message)


CAUSES: tuple[Check, ...] = (check_pools_available, check_fingerprints, check_link_carries)


def check_traffic(situation: Situation) -> Finding | None:
    """Nothing can be said of requests that have not come."""
    if has_traffic(situation.given):
        return None
    seen = sum(load.finished for load in situation.given.loads)
    return Finding(
        Reason.NOT_ENOUGH_TRAFFIC,
        f"{count_of(seen, 'request')} in the window; {MIN_REQUESTS} are needed to compare the modes",
    )


def check_measured(situation: Situation) -> Finding | None:
    """A guess is no measurement."""
    if is_measured(situation.given) and situation.evidence is not None:
        return None
    return Finding(Reason.NOT_YET_MEASURED, "the workers' step times are not measured well enough yet")


def check_pools_fit(situation: Situation) -> Finding | None:
    """Two pools need two sets of devices."""
    for pool in Pool:
        presence = situation.given.pools.get(pool)
        if presence is None or not presence.placeable or presence.desired == 0:
            detail = f": {presence.detail}" if presence is not None and presence.detail else ""
            return Finding(
                Reason.NOT_ENOUGH_GPUS, f"the {pool} pool does not fit on devices of its own{detail}"
            )
    return None


def check_devices_distinct(situation: Situation) -> Finding | None:
    """Time slices of one device do not run at once."""
    for presence in situation.given.pools.values():
        if presence.shares_device:
            return Finding(
                Reason.SHARED_GPU, f"the {presence.pool} pool runs on time slices of the other pool's GPU"
            )
    return None


def check_interference(situation: Situation) -> Finding | None:
    """Without interference there is nothing to separate."""
    evidence = situation.evidence
    if evidence is None or evidence.interference > INTERFERENCE_NOISE or evidence.throttled:
        return None
    if evidence.replay is not None and evidence.gain_percent >= situation.given.minimum_gain_percent:
        return None  # real requests were served better apart: that is interference enough
    return Finding(
        Reason.NO_INTERFERENCE,
        f"prefill makes {format_percent(evidence.interference)} of the decode tokens late, which is noise",
    )


def check_targets_missed(situation: Situation) -> Finding | None:
    """A service that meets its targets is left alone, unless the gain is twice the minimum."""
    given, evidence = situation.given, situation.evidence
    if evidence is None or evidence.gain_percent > 2 * given.minimum_gain_percent:
        return None
    targets = {item.name: item.percentile / 100 for item in given.classes}
    missed = any(
        load.attainment is not None
        and load.finished >= MIN_REQUESTS
        and load.attainment < targets.get(load.class_name, 0.0)
        for load in given.loads
    )
    if missed or not evidence.colocated_meets:
        return None
    return Finding(
        Reason.TARGETS_MET,
        f"colocated meets every target at {evidence.rate_per_s:.2g} requests/s "
        f"({_colocated_share(evidence)})",
    )


def _colocated_share(evidence: Evidence) -> str:
    """From the source whose verdict it stands beside."""
    if evidence.replay is not None:
        return f"{format_percent(evidence.replay.outcome.colocated.attainment)} in target in the replay"
    return f"{format_percent(evidence.colocated.attainment)} in target predicted"


def check_gain(situation: Situation) -> Finding | None:
    """The split must gain the minimum: beyond doubt by the closed form, as a replay lets believe else."""
    evidence = situation.evidence
    minimum = situation.given.minimum_gain_percent
    if evidence is None or evidence.gain_percent >= minimum:
        return None
    if situation.link.status == "False" and evidence.gain_without_transfer_percent >= minimum:
        return Finding(Reason.LINK_TOO_SLOW, situation.link.message)
    return Finding(Reason.GAIN_TOO_SMALL, describe_gain(evidence, situation.given.minimum_gain_percent))


def check_link_suffices(situation: Situation) -> Finding | None:
    """Bandwidth against prefill, and the second token inside the TPOT target."""
    if situation.link.status == "False":
        return Finding(Reason.LINK_TOO_SLOW, situation.link.message)
    if situation.link.status == "Unknown":
        return Finding(Reason.NOT_YET_MEASURED, situation.link.message)
    evidence = situation.evidence
    if evidence is not None and evidence.replay is not None:
        return _check_replayed_transfer(situation, evidence.replay.outcome)
    targets = {item.name: item.tpot_s for item in situation.given.classes}
    for found in evidence.split.classes if evidence else ():
        if found.second_token_gap_s > targets.get(found.name, math.inf):
            return Finding(
                Reason.LINK_TOO_SLOW,
                f"the second token of class {found.name} would come after "
                f"{format_seconds(found.second_token_gap_s)}, its TPOT target is "
                f"{format_seconds(targets[found.name])}",
            )
    return None


def _check_replayed_transfer(situation: Situation, found: ReplayOutcome) -> Finding | None:
    """Of the gap before the second token, the part that the link is answerable for (docs/decisions/0005)."""
    loosest_s = max(item.tpot_s for item in situation.given.classes)
    transfer_s = found.split.transfer_p99_s
    if not transfer_s > loosest_s:
        return None
    return Finding(
        Reason.LINK_TOO_SLOW,
        f"one KV in a hundred would arrive {format_seconds(transfer_s)} or more after the first token, the "
        f"TPOT target is {format_seconds(loosest_s)}",
    )


ADOPTION: tuple[Check, ...] = (
    check_traffic,
    check_measured,
    check_pools_fit,
    check_devices_distinct,
    check_pools_available,
    check_interference,
    check_targets_missed,
    check_gain,
    check_link_suffices,
    check_fingerprints,
)


def describe_gain(evidence: Evidence, minimum_percent: float) -> str:
    """Both predictions in one sentence."""
    if evidence.replay is not None:
        return _describe_replay(evidence.replay, minimum_percent)
    return f"in closed form {_describe_closed_form(evidence, minimum_percent)}"


def _describe_closed_form(evidence: Evidence, minimum_percent: float) -> str:
    if not evidence.feasible:
        return (
            f"no plan meets the targets on {count_of(evidence.workers, 'worker')} at any rate: at "
            f"{evidence.rate_per_s:.2g} requests/s {format_percent(evidence.split.attainment)} in target "
            f"split, {format_percent(evidence.colocated.attainment)} colocated"
        )
    return (
        f"on {count_of(evidence.workers, 'worker')} the split would sustain "
        f"{evidence.split_goodput_per_s:.3g} requests/s in target "
        f"({evidence.prefill_workers} prefill), colocated {evidence.colocated_goodput_per_s:.3g}: "
        f"{_percent(evidence.gain_percent)} against the {minimum_percent:.3g} % asked for"
    )


def _describe_replay(known: ReplayEvidence, minimum_percent: float) -> str:
    found = known.outcome
    return (
        f"of the last {count_of(found.requests, 'request')}, replayed {format_seconds(known.age_s)} ago, the "
        f"split would have kept {found.split.attained_per_s:.3g}/s in target, colocated "
        f"{found.colocated.attained_per_s:.3g}/s: {_percent(found.gain_percent)} "
        f"({_percent(found.gain_low_percent)} to {_percent(found.gain_high_percent)} at 95 %) against the "
        f"{minimum_percent:.3g} % asked for"
    )


def _percent(value: float) -> str:
    return "a gain without bound" if math.isinf(value) else f"{value:+.0f} %"


def _names(fingerprints: set[str]) -> str:
    return ", ".join(sorted(item[:12] for item in fingerprints))
