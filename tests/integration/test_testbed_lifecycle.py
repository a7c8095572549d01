"""A testbed of its own, beside the one that other tests use: up, up again, crash, up, down, nothing left.

It lives in a network and mount namespace of the test, so its bridge, addresses and ports are nobody else's.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import cgroups
from testbed.binaries import ensure_binaries, ensure_packages
from testbed.paths import cache_dir, repository_root

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

# What a testbed shares with a host by name gets a private copy.
PRIVATE = ("/run/netns", "/var/lib/kubelet", "/var/lib/cni", "/run/containerd")
ENTER = "; ".join(
    [
        "set -e",
        "mount --make-rprivate /",
        *(f"mkdir -p {path}; mount -t tmpfs none {path}" for path in PRIVATE),
        "ip link set lo up",
        "echo ready",
        "exec sleep 600",
    ]
)


class OwnHost:
    """Runs commands in one private network and mount namespace, with a state root and cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "state"
        cache = folder / "cache"
        (cache / "testbed").mkdir(parents=True)
        for shared in ("testbed/bin", "models"):
            (cache_dir() / shared).mkdir(parents=True, exist_ok=True)
            (cache / shared).symlink_to(cache_dir() / shared)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(repository_root() / "tests"),
            "PHASESPLIT_TESTBED_ROOT": str(self.root),
            "PHASESPLIT_CACHE": str(cache),
        }
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "/bin/sh", "-c", ENTER], stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "ready\n"

    def testbed(self, *words: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        return self._enter(sys.executable, "-m", "testbed", *words, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.testbed("status", "--output", "json").stdout)
        return content

    def left(self) -> str:
        code = (
            "from testbed import paths, teardown; print(*teardown.leftovers(paths.state_root()), sep='\\n')"
        )
        return self._enter(sys.executable, "-c", code, timeout_s=60).stdout.strip()

    def pids(self) -> dict[str, int]:
        return {process["name"]: process["pid"] for process in self.status()["processes"]}

    def close(self) -> None:
        self.testbed("down")
        self.holder.kill()
        self.holder.wait(timeout=10)
        assert self.holder.stdout is not None
        self.holder.stdout.close()

    def _enter(self, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        enter = ("nsenter", f"--target={self.holder.pid}", "--net", "--mount", f"--wdns={repository_root()}")
        return subprocess.run(
            [*enter, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture
def host() -> Iterator[OwnHost]:
    ensure_packages()
    ensure_binaries()
    # Not pytest's folder for temporary files: its path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        host = OwnHost(Path(folder))
        yield host
        host.close()


def start_a_pod(host: OwnHost) -> None:
    kubectl = host.root.parent / "cache" / "testbed" / "path" / "kubectl"
    kubeconfig = host.root.parent / "cache" / "testbed" / "kubeconfig"
    base = (str(kubectl), f"--kubeconfig={kubeconfig}")
    sleep = ("--image=phasesplit.dev/worker:dev", "--restart=Never", "--command", "--", "sleep", "600")
    done = host._enter(*base, "run", "sleeper", *sleep, timeout_s=30)
    assert done.returncode == 0, done.stderr
    done = host._enter(*base, "wait", "--for=condition=Ready", "pod/sleeper", "--timeout=60s", timeout_s=70)
    assert done.returncode == 0, done.stderr


def test_up_twice_crash_up_and_down_leave_nothing(host: OwnHost) -> None:
    first = host.testbed("up", "--nodes", "2", "--label", "node1:rack=b")
    assert first.returncode == 0, first.stderr
    assert f"export KUBECONFIG={host.root.parent / 'cache/testbed/kubeconfig'}" in first.stdout
    pids = host.pids()

    again = host.testbed("up", timeout_s=30)
    assert again.returncode == 0, again.stderr
    assert host.pids() == pids

    other = host.testbed("up", "--nodes", "3", timeout_s=30)
    assert other.returncode == 1
    assert "another shape" in other.stderr

    start_a_pod(host)
    for name in ("apiserver", "node0-kubelet", "node1-containerd"):
        os.kill(pids[name], signal.SIGKILL)
    assert host.status()["healthy"] is False
    repaired = host.testbed("up")
    assert repaired.returncode == 0, repaired.stderr
    assert host.status()["healthy"] is True
    assert set(host.pids().values()).isdisjoint(pids.values())

    start_a_pod(host)
    assert cgroups.cgroup_pids(cgroups.cgroup_prefix(host.root))
    ended = host.testbed("down", timeout_s=60)
    assert ended.returncode == 0, ended.stderr
    assert host.left() == ""
    assert host.status() == {"running": False, "healthy": False, "root": str(host.root)}
    assert host.testbed("down", timeout_s=60).returncode == 0


def test_a_node_without_power_is_lost_and_comes_back(host: OwnHost) -> None:
    assert host.testbed("up", "--nodes", "1").returncode == 0
    start_a_pod(host)
    off = host.testbed("power", "node0", "off", timeout_s=60)
    assert off.returncode == 0, off.stderr
    assert not cgroups.cgroup_pids(cgroups.cgroup_prefix(host.root))
    assert not any(name.startswith("node0-") for name in host.pids())
    on = host.testbed("power", "node0", "on", timeout_s=120)
    assert on.returncode == 0, on.stderr
    assert host.status()["healthy"] is True


def test_a_shape_that_cannot_be_is_refused_in_one_sentence(host: OwnHost) -> None:
    done = host.testbed("up", "--gpus", "node7=1", timeout_s=30)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "node7=1" in done.stderr
    done = host.testbed("shape", "node0", "fast", timeout_s=30)
    assert (done.returncode, done.stderr) == (1, "testbed: no testbed is running: start one with `up`\n")
    assert host.left() == ""
