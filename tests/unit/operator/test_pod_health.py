"""What is wrong with a pod, in its own words."""

from typing import Any

import pytest

from helpers_operator import make_pod
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import WorkerReport, WorkerState
from phasesplit.operator.health import find_problem, find_problems, is_gated, is_ready


def container(**status: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "worker", "ready": False, "restartCount": 0, **status}]}


ENDED = {
    "exitCode": 1,
    "reason": "Error",
    "message": "Traceback\n  File x\nValueError: no config.json in /m\n",
}

PROBLEMS = {
    "image cannot be pulled": (
        container(state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling w:9"}}),
        Reason.IMAGE_PULL,
        "chat-decode-0: Back-off pulling w:9",
    ),
    "a Secret is missing": (
        container(
            state={"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}}
        ),
        Reason.CONTAINER_ERROR,
        'chat-decode-0: secret "hf" not found',
    ),
    "crash loop, with the last words": (
        container(
            state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
            lastState={"terminated": ENDED},
            restartCount=3,
        ),
        Reason.CRASH_LOOP,
        "chat-decode-0: ended with exit code 1 (Error) after 3 restarts: ValueError: no config.json in /m",
    ),
    "crash loop without words": (
        container(state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}),
        Reason.CRASH_LOOP,
        "chat-decode-0: back-off 10s",
    ),
    "just ended": (
        container(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
        Reason.CRASH_LOOP,
        "chat-decode-0: ended with exit code 137 (OOMKilled) after 0 restarts",
    ),
    "running again after many restarts": (
        container(state={"running": {}}, lastState={"terminated": ENDED}, restartCount=2),
        Reason.CRASH_LOOP,
        "chat-decode-0: ended with exit code 1 (Error) after 2 restarts: ValueError: no config.json in /m",
    ),
    "unschedulable": (
        {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/2 nodes: insufficient nvidia.com/gpu",
                }
            ]
        },
        Reason.UNSCHEDULABLE,
        "chat-decode-0: 0/2 nodes: insufficient nvidia.com/gpu",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(name: str) -> None:
    status, reason, message = PROBLEMS[name]
    found = find_problem(make_pod("chat-decode-0", pool=Pool.DECODE, **status), None)
    assert found is not None
    assert (found.reason, found.message) == (reason, message)


NO_PROBLEMS = {
    "starting": container(state={"waiting": {"reason": "ContainerCreating"}}),
    "loading": container(state={"running": {}}),
    "restarted once, loading": container(
        state={"running": {}}, lastState={"terminated": ENDED}, restartCount=1
    ),
    "ended well": container(state={"terminated": {"exitCode": 0, "reason": "Completed"}}),
    "gated": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
}


@pytest.mark.parametrize("name", NO_PROBLEMS)
def test_on_its_way_is_no_problem(name: str) -> None:
    assert find_problem(make_pod("chat-decode-0", pool=Pool.DECODE, **NO_PROBLEMS[name]), None) is None


def failed_report() -> WorkerReport:
    return WorkerReport(
        pod="chat-decode-0",
        node="n",
        pool=Pool.DECODE,
        role=Role.COLOCATED,
        role_version=0,
        state=WorkerState.FAILED,
        message="GPU asked for but CUDA is absent.",
        engine_id="e",
    )


def test_a_failed_load_is_told_in_the_workers_words_before_anything_else() -> None:
    pod = make_pod("chat-decode-0", pool=Pool.DECODE, **container(state={"running": {}}))
    broken = make_pod(
        "chat-prefill-0", pool=Pool.PREFILL, **container(state={"waiting": {"reason": "ErrImagePull"}})
    )
    problems = find_problems([broken, pod], {"chat-decode-0": failed_report()})
    assert [problem.reason for problem in problems] == [Reason.MODEL_LOAD_FAILED, Reason.IMAGE_PULL]
    assert problems[0].message == "chat-decode-0: GPU asked for but CUDA is absent."


def test_a_pod_that_serves_or_goes_away_has_no_problem() -> None:
    serving = make_pod("chat-decode-0", pool=Pool.DECODE, ready=True)
    leaving = make_pod(
        "chat-decode-0", pool=Pool.DECODE, **container(state={"waiting": {"reason": "ErrImagePull"}})
    )
    leaving["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    assert is_ready(serving)
    assert find_problem(serving, failed_report()) is None
    assert find_problem(leaving, None) is None


def test_only_our_gate_counts() -> None:
    pod = make_pod("chat-decode-0", pool=Pool.DECODE)
    pod["spec"]["schedulingGates"] = [{"name": "somebody.else/gate"}]
    assert not is_gated(pod)
    pod["spec"]["schedulingGates"].append({"name": "phasesplit.dev/placement"})
    assert is_gated(pod)
