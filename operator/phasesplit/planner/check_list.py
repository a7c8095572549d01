"""Every check of both ordered lists with its verdict, in words: what a person asks for after the reason."""

from phasesplit.planner.mode_checks import (
    ADOPTION,
    CAUSES,
    Check,
    Situation,
    check_devices_distinct,
    check_fingerprints,
    check_gain,
    check_interference,
    check_link_carries,
    check_link_suffices,
    check_measured,
    check_pools_available,
    check_pools_fit,
    check_targets_missed,
    check_traffic,
)
from phasesplit.planner.mode_types import CheckResult

_LABELS: dict[Check, str] = {
    check_traffic: "enough traffic",
    check_measured: "step times measured",
    check_pools_fit: "both pools fit on devices of their own",
    check_devices_distinct: "no device is shared",
    check_pools_available: "both pools have a ready worker",
    check_interference: "prefill disturbs decode",
    check_targets_missed: "a target is missed colocated",
    check_gain: "the gain is large enough",
    check_link_suffices: "the link is fast enough",
    check_link_carries: "the link carries the KV and transfers succeed",
    check_fingerprints: "KV of the pools is interchangeable",
}


def run_checks(situation: Situation) -> tuple[CheckResult, ...]:
    """The list of adoption in its order, then what else ends a split."""
    checks = (*ADOPTION, *(check for check in CAUSES if check not in ADOPTION))
    return tuple(_run(check, situation) for check in checks)


def _run(check: Check, situation: Situation) -> CheckResult:
    finding = check(situation)
    return CheckResult(_LABELS[check], finding is None, finding.message if finding else "")
