"""Commands, daemons, locks: bounds hold and failures speak."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.errors import TestbedError
from testbed.locks import exclusive
from testbed.processes import Daemons, run, stop, wait_for, with_descendants


def test_a_failing_command_says_what_it_said() -> None:
    with pytest.raises(TestbedError, match=r"exit status 3: no luck"):
        run("/bin/sh", "-c", "echo no luck >&2; exit 3")


def test_a_command_that_hangs_is_ended() -> None:
    start_s = time.monotonic()
    with pytest.raises(TestbedError, match="did not end within 0 s"):
        run("sleep", "30", timeout_s=0.2)
    assert time.monotonic() - start_s < 10


def test_a_daemon_is_found_again_and_stopped_even_if_it_ignores_term(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    record = daemons.spawn("stubborn", sys.executable, "-c", program)
    daemons.wait_for(lambda: daemons.tail("stubborn") == "up", 20, "the daemon", needs=("stubborn",))
    assert Daemons(tmp_path).record("stubborn") == record
    assert record.is_alive()
    assert stop([record.pid]) == []
    assert not record.is_alive()


def test_waiting_for_a_daemon_that_died_ends_at_once_with_its_last_words(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path)
    daemons.spawn("brief", "/bin/sh", "-c", "echo port taken; exit 1")
    with pytest.raises(TestbedError, match=r"(?s)brief ended while waiting for the moon.*port taken"):
        daemons.wait_for(lambda: False, 30, "the moon", needs=("brief",))


def test_children_of_children_are_found(tmp_path: Path) -> None:
    record = Daemons(tmp_path).spawn("family", "/bin/sh", "-c", "sh -c 'sleep 60 & wait' & wait")
    try:
        wait_for(lambda: len(with_descendants([record.pid])) == 3, 20, "three processes")
    finally:
        assert stop(with_descendants([record.pid])) == []


def test_waiting_has_a_bound() -> None:
    with pytest.raises(TimeoutError, match="waiting for the moon"):
        wait_for(lambda: False, 0.1, "the moon")


def test_a_lock_names_its_holder_and_goes_away_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = (
        "import fcntl, os, time\n"
        f"file = open({str(lock)!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print(os.getpid(), end='', file=file, flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: lock.exists() and lock.read_text() == str(holder.pid), 20, "the holder")
        with (
            pytest.raises(TimeoutError, match=f"the thing is held by process {holder.pid}"),
            exclusive(lock, 0.2, "the thing"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait(timeout=10)
    with exclusive(lock, 5, "the thing"):
        assert lock.exists()
