"""What the soak run breaks, one function per fault. Each acts on the real cluster and returns what it did."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from demo.subject import Subject
from demo.target import OPERATOR_NAMESPACE


def kill_worker(subject: Subject, chance: random.Random) -> str:
    """Force-delete any worker pod."""
    pod = chance.choice(subject.pods("worker"))["metadata"]["name"]
    _kill(subject, pod, subject.namespace)
    return f"killed {pod}"


def kill_process(subject: Subject, chance: random.Random) -> str:
    """End the worker's process inside its pod: the container restarts, the pod and its address stay."""
    pod = chance.choice(subject.pods("worker"))["metadata"]["name"]
    for pid in _worker_processes(pod):
        os.kill(pid, signal.SIGKILL)
    return f"ended the process of {pod}"


def kill_router(subject: Subject, chance: random.Random) -> str:
    """Delete the router gracefully: it drains."""
    pod = chance.choice(subject.pods("router"))["metadata"]["name"]
    subject.kubectl("delete", "pod", pod, "-n", subject.namespace, "--wait=false")
    return f"deleted {pod}"


def kill_operator(subject: Subject, _chance: random.Random) -> str:
    """Force-delete the operator: serving must not notice."""
    pods = subject.kubectl.get(
        "pods", "-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/component=operator"
    )["items"]
    for pod in pods:
        _kill(subject, pod["metadata"]["name"], OPERATOR_NAMESPACE)
    return "killed the operator"


def slow_link(subject: Subject, chance: random.Random) -> str:
    """Shape one node's link to a tenth of what the split needs, or lift the limit."""
    testbed = subject.target.testbed
    assert testbed is not None, "the soak run needs the testbed"
    node = chance.choice(testbed.spec.nodes).name
    rate = chance.choice([None, "20mbit", "50mbit", "200mbit"])
    testbed.shape(node, rate)
    return f"{node} at {rate or 'full speed'}"


def change_object(subject: Subject, chance: random.Random) -> str:
    """Edit the object as a person would: another mode."""
    mode = chance.choice(["Split", "Colocated", "Auto"])
    subject.apply(mode=mode)
    return f"mode {mode}"


def _worker_processes(pod: str) -> list[int]:
    """Process ids on this host; the first process of a container cannot be killed from inside it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # ended meanwhile
        if f"POD_NAME={pod}".encode() in environment and b"phasesplit-worker" in command:
            found.append(int(folder.name))
    return found


def _kill(subject: Subject, pod: str, namespace: str) -> None:
    subject.kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=0", "--force", "--wait=false")


# The router is a single replica here: its restart breaks connections, so it is not among the faults during
# which no request may fail.
FAULTS: dict[str, Callable[[Subject, random.Random], str]] = {
    "kill-worker": kill_worker,
    "kill-process": kill_process,
    "kill-operator": kill_operator,
    "slow-link": slow_link,
    "change-object": change_object,
}
