"""The object that the demo serves: its YAML, its status, its pods. Reads and writes by kubectl."""

import copy
import json
import os
import subprocess
import sys
import time
from typing import Any

import yaml

from demo.target import DemoError, Target, wait_for
from testbed.paths import repository_root

SAMPLE = "manifests/samples/smollm2-cpu.yaml"


class Subject:
    """One `DisaggregatedModel` in the target cluster."""

    def __init__(self, target: Target, namespace: str = "default") -> None:
        self.target = target
        self.kubectl = target.kubectl
        self.namespace = namespace
        self.manifest = self._manifest()
        self.name: str = self.manifest["metadata"]["name"]
        self.model: str = self.manifest["spec"]["model"].get("name", self.name)

    def _manifest(self) -> dict[str, Any]:
        """The sample, with waits shortened so that one sees them, and two workers to grow by."""
        manifest: dict[str, Any] = yaml.safe_load((repository_root() / SAMPLE).read_text())
        spec = manifest["spec"]
        spec["adoption"] = {**spec.get("adoption", {}), "dwellSeconds": 15}
        spec["scaling"] = {**spec.get("scaling", {}), "downStabilizationSeconds": 60}
        spec["decode"]["replicas"] = {"min": 1, "max": 2}
        manifest["metadata"]["namespace"] = self.namespace
        return manifest

    def apply(self, **changes: Any) -> None:
        """Apply the object, with some fields of the spec replaced."""
        manifest = copy.deepcopy(self.manifest)
        manifest["spec"] |= changes
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def delete(self) -> None:
        """Delete the object and wait until its pods are gone."""
        self.kubectl(
            "delete",
            "dm",
            self.name,
            "-n",
            self.namespace,
            "--ignore-not-found",
            "--timeout=60s",
            timeout_s=90,
        )
        wait_for("the end of all pods", lambda: not self.pods(), 180)

    def get(self) -> dict[str, Any]:
        """The live object."""
        return self.kubectl.get("dm", self.name, "-n", self.namespace, timeout_s=90)  # under load, too

    def status(self) -> dict[str, Any]:
        """Its status, empty before the operator has seen it."""
        found: dict[str, Any] = self.get().get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition, or an empty dict."""
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def pods(self, component: str | None = None) -> list[dict[str, Any]]:
        """Its pods, of one component or all."""
        selector = f"phasesplit.dev/model={self.name}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        items: list[dict[str, Any]] = self.kubectl.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return items

    def node_of(self, pod: str) -> str:
        """The node a pod runs on."""
        found: str = self.kubectl.get("pod", pod, "-n", self.namespace)["spec"].get("nodeName", "")
        return found

    def wait_ready(self, timeout_s: float) -> float:
        """Wait for Ready of the current generation; seconds it took."""
        started = time.monotonic()

        def ready() -> bool:
            live = self.get()
            generation = live["metadata"]["generation"]
            conditions = live.get("status", {}).get("conditions", [])
            return any(
                c["type"] == "Ready" and c["status"] == "True" and c.get("observedGeneration") == generation
                for c in conditions
            )

        try:
            wait_for(f"Ready of {self.name}", ready, timeout_s)
        except DemoError as error:
            raise DemoError(f"{error}: {self.condition('Ready').get('message', 'no status yet')}") from error
        return time.monotonic() - started

    def wait_mode(self, mode: str, timeout_s: float) -> tuple[float, dict[str, Any]]:
        """Wait until that mode is served; seconds it took, and the decision."""
        started = time.monotonic()
        decided = wait_for(
            f"mode {mode}", lambda: (s := self.status()).get("mode") == mode and s.get("decision"), timeout_s
        )
        return time.monotonic() - started, decided

    def events(self) -> list[dict[str, Any]]:
        """Kubernetes events about the object, oldest first."""
        items = self.kubectl.get("events", "-n", self.namespace)["items"]
        mine = [event for event in items if event["involvedObject"].get("name") == self.name]
        return sorted(mine, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")

    def inspect(self, request_id: str) -> dict[str, Any]:
        """What `phasesplit kv inspect` says of one request."""
        text = self.phasesplit(
            "kv", "inspect", self.name, request_id, "-n", self.namespace, "--output", "json"
        )
        found: dict[str, Any] = json.loads(text)
        return found

    def phasesplit(self, *arguments: str, timeout_s: float = 180) -> str:
        """Output of the command line; `DemoError` with its sentence when it fails."""
        environment = dict(os.environ)
        if self.kubectl.kubeconfig is not None:
            environment["KUBECONFIG"] = str(self.kubectl.kubeconfig)
        context = ["--context", self.kubectl.context] if self.kubectl.context else []
        done = subprocess.run(
            [sys.executable, "-m", "phasesplit.cli.main", *arguments, *context],
            capture_output=True, text=True, timeout=timeout_s, env=environment, check=False,
        )  # fmt: skip
        if done.returncode:
            raise DemoError(f"phasesplit {' '.join(arguments[:2])}: {done.stderr.strip()}")
        return done.stdout
