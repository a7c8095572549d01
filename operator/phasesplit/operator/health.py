"""What is wrong with a pod, in the pod's own words. Pure: pods and reports in, problems out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phasesplit.api import names
from phasesplit.api.conditions import Reason
from phasesplit.api.reports import WorkerReport, WorkerState
from phasesplit.api.v1alpha1 import Manifest

_IMAGE_REASONS = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONTAINER_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MAX_MESSAGE = 600
_MANY_RESTARTS = 2

# The most telling problem first: what a person has to act on.
_ORDER = (
    Reason.MODEL_LOAD_FAILED,
    Reason.IMAGE_PULL,
    Reason.CONTAINER_ERROR,
    Reason.CRASH_LOOP,
    Reason.UNSCHEDULABLE,
)


@dataclass(frozen=True)
class PodProblem:
    """One pod that will not become ready by waiting."""

    pod: str
    reason: Reason
    message: str


def find_problems(pods: Iterable[Manifest], reports: Mapping[str, WorkerReport]) -> tuple[PodProblem, ...]:
    """All problems, the most telling first. `reports` by pod name."""
    found = [problem for pod in pods if (problem := find_problem(pod, reports.get(_name(pod))))]
    return tuple(sorted(found, key=lambda problem: (_ORDER.index(problem.reason), problem.pod)))


def find_problem(pod: Manifest, report: WorkerReport | None) -> PodProblem | None:
    """The problem of one pod, None if it serves, goes away, or is on its way."""
    if "deletionTimestamp" in pod["metadata"] or is_ready(pod):
        return None
    name = _name(pod)
    if report is not None and report.state is WorkerState.FAILED:
        return PodProblem(name, Reason.MODEL_LOAD_FAILED, _sentence(name, report.message))
    for status in pod["status"].get("containerStatuses", ()):
        problem = _container_problem(name, status)
        if problem is not None:
            return problem
    scheduled = condition(pod, "PodScheduled")
    if scheduled and scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return PodProblem(name, Reason.UNSCHEDULABLE, _sentence(name, scheduled.get("message", "")))
    return None


def is_ready(pod: Manifest) -> bool:
    """Does the pod serve?"""
    ready = condition(pod, "Ready")
    return ready is not None and ready.get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def is_gated(pod: Manifest) -> bool:
    """Does the pod wait for its placement?"""
    return any(gate["name"] == names.PLACEMENT_GATE for gate in pod["spec"].get("schedulingGates") or ())


def condition(pod: Manifest, kind: str) -> Mapping[str, Any] | None:
    """One condition of a pod."""
    return next((item for item in pod["status"].get("conditions") or () if item["type"] == kind), None)


def _container_problem(pod: str, status: Mapping[str, Any]) -> PodProblem | None:
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in _IMAGE_REASONS:
        return PodProblem(pod, Reason.IMAGE_PULL, _sentence(pod, waiting.get("message") or reason))
    if reason in _CONTAINER_REASONS:
        return PodProblem(pod, Reason.CONTAINER_ERROR, _sentence(pod, waiting.get("message") or reason))
    restarts = int(status.get("restartCount", 0))
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    again = "running" not in state or restarts >= _MANY_RESTARTS  # a single restart may simply be loading
    if ended.get("exitCode", 0) != 0 and not status.get("ready") and again:
        return _crash(pod, ended, restarts)
    if reason == "CrashLoopBackOff":
        return PodProblem(pod, Reason.CRASH_LOOP, _sentence(pod, waiting.get("message") or reason))
    return None


def _crash(pod: str, ended: Mapping[str, Any], restarts: int) -> PodProblem:
    """The program's last words: the whole termination message when it is one line, else its last line."""
    code, reason = ended.get("exitCode"), ended.get("reason", "Error")
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    words = f": {lines[-1]}" if lines else ""
    text = f"ended with exit code {code} ({reason}) after {restarts} restarts{words}"
    return PodProblem(pod, Reason.CRASH_LOOP, _sentence(pod, text))


def _sentence(pod: str, text: str) -> str:
    return f"{pod}: {' '.join(text.split())}"[:_MAX_MESSAGE]


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])
