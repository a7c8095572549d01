"""The cluster that the demo runs on: the testbed, or the one that CONTEXT names. Edges only."""

import os
import queue
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from testbed import cluster
from testbed.binaries import binary, ensure_binaries
from testbed.kubectl import Kubectl
from testbed.paths import models_dir, repository_root

OPERATOR_NAMESPACE = "phasesplit-system"


class DemoError(Exception):
    """The demo cannot go on; the message says why in one sentence."""


@dataclass(frozen=True)
class Target:
    """How to talk to the cluster, and what can be done to it."""

    kubectl: Kubectl
    helm: Path
    images: dict[str, str]  # chart values
    model_path: Path | None  # the same weights on this host, for the comparison with transformers
    testbed: cluster.Testbed | None  # None: a cluster of the user's, whose links and nodes stay alone

    def helm_install(self, timeout_s: float = 180) -> None:
        """Install or upgrade the chart with this target's images."""
        chart = repository_root() / "helm" / "phasesplit"
        values = [f"--set={key}={value}" for key, value in self.images.items()]
        if self.testbed is not None:
            # Tests may have applied the CRD and the roles by themselves before.
            values += ["--take-ownership", "--force-conflicts"]
        self._helm(
            "upgrade", "--install", "phasesplit", str(chart), "--namespace", OPERATOR_NAMESPACE,
            "--create-namespace", "--wait", f"--timeout={int(timeout_s)}s", *values, timeout_s=timeout_s + 30,
        )  # fmt: skip

    def helm_uninstall(self) -> None:
        """Remove the chart; its hook lifts scheduling gates first."""
        self._helm("uninstall", "phasesplit", "--namespace", OPERATOR_NAMESPACE, "--wait", timeout_s=180)

    def _helm(self, *arguments: str, timeout_s: float) -> None:
        flags = []
        if self.kubectl.kubeconfig is not None:
            flags.append(f"--kubeconfig={self.kubectl.kubeconfig}")
        if self.kubectl.context is not None:
            flags.append(f"--kube-context={self.kubectl.context}")
        done = subprocess.run(
            [str(self.helm), *arguments, *flags],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise DemoError(f"helm {arguments[0]} failed: {(done.stderr or done.stdout).strip()}")


def choose_target(say: Callable[[str], None]) -> Target:
    """The cluster of CONTEXT when it is set, else a testbed, started if need be."""
    context = os.environ.get("CONTEXT")
    if context:
        return _users_cluster(context)
    from testbed.model import ensure_smollm2  # noqa: PLC0415  (imports torch)

    say("binaries and packages (the first time some 15 minutes of compiling, later seconds)")
    ensure_binaries()
    say("model weights")
    ensure_smollm2()
    say("two nodes")
    testbed = cluster.ensure_up()
    images = {
        "images.control.repository": "phasesplit.dev/control",
        "images.control.tag": "dev",
        "images.worker.repository": "phasesplit.dev/worker",
        "images.worker.tag": "dev",
        "prometheus.enabled": "true",
        "prometheus.image.repository": "phasesplit.dev/prometheus",
        "prometheus.image.tag": "dev",
    }
    return Target(testbed.kubectl, binary("helm"), images, models_dir() / "smollm2-135m-instruct", testbed)


def _users_cluster(context: str) -> Target:
    kubectl, helm = shutil.which("kubectl"), shutil.which("helm")
    if kubectl is None or helm is None:
        raise DemoError("CONTEXT is set: kubectl and helm must be on the PATH")
    images = {"prometheus.enabled": "true"}
    for part in ("control", "worker"):
        name = os.environ.get(f"{part.upper()}_IMAGE")
        if name:
            repository, _, tag = name.rpartition(":")
            images |= {f"images.{part}.repository": repository, f"images.{part}.tag": tag}
    return Target(Kubectl(Path(kubectl), context=context), Path(helm), images, None, None)


class PortForward:
    """`kubectl port-forward` to a Service, started again whenever it ends."""

    def __init__(self, kubectl: Kubectl, namespace: str, service: str, port: int) -> None:
        self._argv = [*kubectl.argv, "port-forward", f"--namespace={namespace}", f"service/{service}"]
        self._port = port
        self.local_port = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.ensure()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Base URL on this host."""
        return f"http://127.0.0.1:{self.local_port}"

    def ensure(self, timeout_s: float = 30) -> None:
        """Start it if it does not run, on the same local port as before."""
        if self._process is not None and self._process.poll() is None:
            return
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._process = subprocess.Popen(
                [*self._argv, f"{self.local_port or ''}:{self._port}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            assert self._process.stdout is not None
            line = _first_line(self._process.stdout, 10)
            match = re.search(r"127\.0\.0\.1:(\d+)", line)
            if match:
                self.local_port = int(match[1])
                return
            self.close()
            time.sleep(0.5)
        raise DemoError(f"kubectl port-forward did not start: {line.strip()}")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process = None


def _first_line(stream: IO[str], timeout_s: float) -> str:
    """The first line, or nothing when none comes in time; later lines are read and dropped."""
    lines: queue.Queue[str] = queue.Queue(maxsize=1)

    def read() -> None:
        for index, line in enumerate(stream):
            if index == 0:
                lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        return lines.get(timeout=timeout_s)
    except queue.Empty:
        return ""


def wait_for(what: str, look: Callable[[], Any], timeout_s: float, interval_s: float = 0.5) -> Any:
    """Poll until `look` returns something true. Raises `DemoError` naming what did not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise DemoError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(interval_s)
