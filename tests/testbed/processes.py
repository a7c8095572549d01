"""Commands that end and daemons that stay: every one with a bound, a log and a record of its pid.

Knows Linux processes; knows nothing of Kubernetes. A recorded process is recognised by its pid and its start
time together, so a pid that the kernel gave to something else is never signalled.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.errors import TestbedError

COMMAND_TIMEOUT_S = 30.0
# Before a cluster's own daemons: two busy model workers on two cores must not make it look dead.
URGENCY = 10
URGENT = ("nice", "-n", f"-{URGENCY}")
_TERM_GRACE_S = 2.0
_KILL_GRACE_S = 10.0
_LOG_TAIL_LINES = 8


@dataclass(frozen=True)
class ProcessRecord:
    """One daemon of the testbed, as written down when it was started."""

    name: str
    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def run(
    *argv: object,
    timeout_s: float = COMMAND_TIMEOUT_S,
    check: bool = True,
    stdin: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; a failure or a timeout becomes a TestbedError with its last output."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            check=False,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            input=stdin,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise TestbedError(f"`{' '.join(words)}` did not end within {timeout_s:.0f} s") from None
    except FileNotFoundError:
        raise TestbedError(f"{words[0]} is not installed") from None
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise TestbedError(f"`{' '.join(words)}` failed with exit status {done.returncode}: {said}")
    return done


def in_netns(netns: str, *argv: object) -> tuple[object, ...]:
    """The command that runs `argv` in a network namespace.

    Not `ip netns exec`: it remounts /sys and thereby hides the cgroups from containerd and the kubelet.
    """
    return ("nsenter", f"--net=/run/netns/{netns}", *argv)


class Daemons:
    """Starts daemons under one state root and finds them again."""

    def __init__(self, root: Path) -> None:
        self._logs = root / "logs"
        self._records = root / "processes"

    def spawn(self, name: str, *argv: object, env: Mapping[str, str] | None = None) -> ProcessRecord:
        """Start a daemon in its own session with its output in `logs/<name>.log`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._records.mkdir(parents=True, exist_ok=True)
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in argv],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        record = ProcessRecord(name, process.pid, _start_ticks(process.pid) or 0)
        (self._records / f"{name}.json").write_text(json.dumps(asdict(record)))
        return record

    def records(self) -> list[ProcessRecord]:
        """Every daemon started here and not forgotten, alive or not."""
        if not self._records.is_dir():
            return []
        return [
            ProcessRecord(**json.loads(path.read_text())) for path in sorted(self._records.glob("*.json"))
        ]

    def record(self, name: str) -> ProcessRecord | None:
        return next((record for record in self.records() if record.name == name), None)

    def forget(self, name: str) -> None:
        (self._records / f"{name}.json").unlink(missing_ok=True)

    def wait_for(
        self, predicate: Callable[[], bool], timeout_s: float, what: str, needs: Sequence[str] = ()
    ) -> None:
        """Wait with a bound; when a daemon named in `needs` dies, say so at once with its last words."""

        def check() -> bool:
            for name in needs:
                record = self.record(name)
                if record is not None and not record.is_alive():
                    raise TestbedError(
                        f"{name} ended while waiting for {what}; its last words:\n{self.tail(name)}"
                    )
            return predicate()

        try:
            wait_for(check, timeout_s, what)
        except TimeoutError as error:
            tails = "".join(f"\n--- {name}:\n{self.tail(name)}" for name in needs)
            raise TestbedError(f"{error}{tails}") from None

    def tail(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        if not path.exists():
            return "(no log)"
        lines = path.read_text(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines[-_LOG_TAIL_LINES:])


def wait_for(predicate: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.1) -> None:
    """Poll until `predicate` is true; TimeoutError after `timeout_s`. Its errors are not hidden."""
    deadline_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"timed out after {timeout_s:.0f} s waiting for {what}")
        time.sleep(interval_s)


def pids_naming(text: str, programs: Container[str]) -> set[int]:
    """Processes of these programs with `text` in one of their arguments."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program, *words = path.read_text(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if Path(program).name in programs and any(text in word for word in words):
            pids.add(int(path.parent.name))
    return pids


def with_descendants(pids: Iterable[int]) -> set[int]:
    """The processes, their children, and so on; a container's first process is the child of its shim."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def stop(pids: Iterable[int]) -> list[int]:
    """Ask processes to end, then make them; returns those that are still there, which should be none."""
    left = {pid: ticks for pid in pids if (ticks := _start_ticks(pid)) is not None}
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        for pid in left:
            _send(pid, number)
        deadline_s = time.monotonic() + grace_s
        while left and time.monotonic() < deadline_s:
            _reap()
            left = {pid: ticks for pid, ticks in left.items() if _start_ticks(pid) == ticks}
            time.sleep(0.02)
    return sorted(left)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> None:
    """Collect our own children that have ended, so that they do not linger as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
