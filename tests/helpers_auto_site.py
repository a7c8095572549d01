"""An object in `mode: Auto` on the testbed, its workers paced like devices; for benchmarks.

Everything is as a user has it: chart, operator, pods, router, Prometheus. Only the workers' steps are
stretched to a declared profile, because two cores cannot play four devices at full speed.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from demo.subject import Subject
from demo.target import DemoError, PortForward, Target, choose_target
from helpers_models import text_model_dir, tiny_model_dir
from helpers_truth import DEVICE
from phasesplit_bench.client import Target as Endpoint
from testbed.paths import models_dir

NAME = "paced"
FOLDER = "llama-text-paced"  # below the testbed's models
EACH = 2  # workers per pool, each pool on a node of its own
DWELL_S = 30
LOOK_EVERY_S = 1.0


class AutoSubject(Subject):
    """The object, with one latency class whose targets a regime sets."""

    def __init__(self, target: Target, nodes: tuple[str, str]) -> None:
        self._nodes = nodes
        super().__init__(target)

    def _manifest(self) -> dict[str, Any]:
        model = f"/models/{FOLDER}"
        pools = {
            pool: {
                "replicas": {"min": EACH, "max": EACH},
                "gpu": {"count": 0},
                "nodeSelector": {"kubernetes.io/hostname": node},
                "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
            }
            for pool, node in zip(("prefill", "decode"), self._nodes, strict=True)
        }
        return {
            "apiVersion": "phasesplit.dev/v1alpha1",
            "kind": "DisaggregatedModel",
            "metadata": {"name": NAME, "namespace": self.namespace},
            "spec": {
                "mode": "Auto",
                "model": {"name": NAME, "source": {"path": model}, "dtype": "Float32"},
                "engine": {"args": ["--pace", f"{model}/pace.json", "--kv-cache-bytes", str(64 << 20)]},
                **pools,
                "scaling": {"policy": "Off", "roleSwitching": "Disabled"},
                "adoption": {"dwellSeconds": DWELL_S},
                "slo": [{"name": "default", "ttftMilliseconds": 15000, "tpotMilliseconds": 1000}],
                "metrics": {"prometheus": {"address": "http://prometheus.phasesplit-system:9090"}},
            },
        }


@dataclass(frozen=True, slots=True)
class Change:
    """What the status said from a moment on."""

    at_s: float
    mode: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.mode:<9} {self.reason}: {self.message}"


class Watcher:
    """Notes each change of mode or reason while it runs."""

    def __init__(self, subject: Subject, say: Callable[[str], None]) -> None:
        self._subject, self._say = subject, say
        self._begun_s = time.monotonic()
        self._stop = threading.Event()
        self.changes: list[Change] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def seconds_since(self, change: Change) -> float:
        """How long ago that was."""
        return time.monotonic() - self._begun_s - change.at_s

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                status = self._subject.status()
            except (DemoError, OSError, RuntimeError):
                continue  # the machine is busy; the next look comes soon
            decision = status.get("decision") or {}
            change = Change(
                time.monotonic() - self._begun_s,
                status.get("mode", ""),
                decision.get("reason", ""),
                decision.get("message", ""),
            )
            last = self.changes[-1] if self.changes else None
            if last is None or (last.mode, last.reason) != (change.mode, change.reason):
                self.changes.append(change)
                self._say(str(change))


class AutoSite:
    """The cluster, the object and a way to its router."""

    def __init__(self, subject: AutoSubject, forward: PortForward, nodes: tuple[str, str]) -> None:
        self.subject = subject
        self._forward = forward
        self._nodes = nodes

    @property
    def endpoint(self) -> Endpoint:
        """Where to send requests."""
        self._forward.ensure()
        return Endpoint(url=self._forward.url, model=NAME, timeout_s=300)

    def set_link(self, rate: str | None) -> None:
        """Shape both nodes; None: as fast as they go."""
        testbed = self.subject.target.testbed
        if testbed is None:
            raise DemoError("links can be shaped on the testbed alone")
        for node in self._nodes:
            testbed.shape(node, rate)

    def serve(self, mode: str, ttft_s: float, tpot_s: float, **changes: Any) -> None:
        """Ask for a mode and targets, and wait until every worker serves under them."""
        slo = {
            "name": "default",
            "ttftMilliseconds": round(ttft_s * 1000),
            "tpotMilliseconds": round(tpot_s * 1000),
            "percentile": 90,
        }
        self.subject.apply(mode=mode, slo=[slo], **changes)
        self.subject.wait_ready(600)
        if mode != "Auto":
            self.subject.wait_mode(mode, 120)


def prepare(say: Callable[[str], None]) -> Target:
    """The testbed with the chart and the model."""
    target = choose_target(say)
    if target.testbed is None:
        raise DemoError("this needs the testbed: leave CONTEXT unset")
    folder = models_dir() / FOLDER
    folder.mkdir(exist_ok=True)
    for source in text_model_dir(tiny_model_dir("llama")).iterdir():
        shutil.copyfile(source, folder / source.name)
    (folder / "pace.json").write_text(DEVICE.model_dump_json())
    for path in (folder, *folder.iterdir()):  # workers run as another user
        path.chmod(0o755 if path.is_dir() else 0o644)
    target.helm_install()
    return target


@contextmanager
def running_auto_site(target: Target) -> Iterator[AutoSite]:
    """A new object, that nothing is known of; it is deleted at the end."""
    assert target.testbed is not None
    first, second = (node.name for node in target.testbed.spec.nodes[:2])
    nodes = (first, second)
    subject = AutoSubject(target, nodes)
    try:
        subject.apply(mode="Colocated")
        subject.wait_ready(600)
        with PortForward(subject.kubectl, subject.namespace, f"{NAME}-router", 80) as forward:
            site = AutoSite(subject, forward, nodes)
            yield site
            site.set_link(None)
    finally:
        subject.delete()
