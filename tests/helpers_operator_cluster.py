"""An operator process on this machine, with the rights of the shipped ClusterRole, against a real cluster."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from helpers_cluster import ClusterUnderTest, PaperNode
from helpers_paper_pods import PaperKubelet, paper_kubelet
from phasesplit.api import names
from testbed.audit import AuditEvent, Mark, service_account
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.paths import repository_root
from testbed.processes import wait_for

ACCOUNT = "operator"
PAPER_NODES = [
    PaperNode("paper-a", labels={"topology.kubernetes.io/zone": "z1"}, gpus=2),
    PaperNode("paper-b", labels={"topology.kubernetes.io/zone": "z2"}, gpus=2),
]
_numbers = itertools.count()


class OperatorProcess:
    """`phasesplit-operator`, watching one namespace, as the service account `operator` of it."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str, folder: Path, **settings: object) -> None:
        self._cluster = cluster
        self.namespace = namespace
        self._kubeconfig = folder / "operator.kubeconfig"
        self._log = folder / f"operator-{next(_numbers)}.log"
        self._settings = {
            "NAMESPACE": namespace,
            "WATCH_NAMESPACE": namespace,
            "WORKER_IMAGE": "phasesplit.dev/worker:dev",
            "CONTROL_IMAGE": "phasesplit.dev/control:dev",
            "HEALTH_PORT": 0,
            "METRICS_PORT": 0,
            "TICK_SECONDS": 1,
            "LEASE_SECONDS": 15,
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it holds the Lease."""
        if not self._kubeconfig.exists():
            _write_kubeconfig(self._cluster.kubectl, self.namespace, self._kubeconfig)
        self.spawn()
        wait_for(lambda: "holding the lease" in self.log(), 60, "the operator to hold the lease")

    def spawn(self, *arguments: str) -> None:
        """Start without waiting."""
        if not self._kubeconfig.exists():
            _write_kubeconfig(self._cluster.kubectl, self.namespace, self._kubeconfig)
        environment = {f"PHASESPLIT_{name}": str(value) for name, value in self._settings.items()}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "phasesplit.operator", *arguments],
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig), **environment},
                stdout=log,
                stderr=log,
            )

    def wait(self, timeout_s: float) -> int:
        """Exit status."""
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """End gracefully."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)

    def kill(self) -> None:
        """End without a chance to clean up."""
        self.process.kill()
        self.process.wait(10)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise TestbedError("the operator has not been started")
        return self._process

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def writes(self, since: Mark) -> list[AuditEvent]:
        """Its mutating requests after a mark of the audit log, Lease renewals apart."""
        user = service_account(self.namespace, ACCOUNT)
        events = self._cluster.audit.events(since, user=user)
        return [event for event in events if event.is_mutating and not event.is_lease]


@dataclass
class Stage:
    """A namespace with an operator, paper nodes and a kubelet on paper."""

    cluster: ClusterUnderTest
    namespace: str
    operator: OperatorProcess
    kubelet: PaperKubelet
    nodes: list[str] = field(default_factory=list)

    @property
    def kubectl(self) -> Kubectl:
        return self.cluster.kubectl

    def manifest(self, name: str, **spec: Any) -> dict[str, Any]:
        """An object whose pods fit on the paper nodes."""
        pool = {"gpu": {"count": 0}, "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "model": {"source": {"path": "/models/none"}},
                "prefill": pool,
                "decode": pool,
                "rollout": {"drainSeconds": 0},
                **spec,
            },
        }

    def apply(self, name: str, **spec: Any) -> None:
        """Apply the object as a user would."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.manifest(name, **spec)))

    def get(self, name: str) -> dict[str, Any]:
        return self.kubectl.get("dm", name, "-n", self.namespace)

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.get(name).get("status", {}).get("conditions", [])
        return next((item for item in conditions if item["type"] == kind), {})

    def wait_condition(
        self, name: str, kind: str, status: str, reason: str | None = None, timeout_s: float = 40
    ) -> dict[str, Any]:
        """The condition once it has this status and reason."""

        def reached() -> bool:
            found = self.condition(name, kind)
            return found.get("status") == status and reason in (None, found.get("reason"))

        self.wait(reached, timeout_s, f"{name}: {kind}={status} {reason or ''}")
        return self.condition(name, kind)

    def wait_mode(self, name: str, mode: str, timeout_s: float = 40) -> None:
        def served() -> bool:
            return bool(self.get(name).get("status", {}).get("mode") == mode)

        self.wait(served, timeout_s, f"{name} to be served {mode}")

    def wait(self, predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Bounded, and with the operator's last words when it fails."""
        try:
            wait_for(predicate, timeout_s, what, interval_s=0.3)
        except (TestbedError, TimeoutError) as error:
            tail = "\n".join(self.operator.log().splitlines()[-15:])
            raise AssertionError(f"{error}\n{tail}") from error

    def pods(self, name: str, component: str = "worker") -> list[dict[str, Any]]:
        selector = f"{names.LABEL_MODEL}={name},{names.LABEL_COMPONENT}={component}"
        return list(self.kubectl.get("pods", "-n", self.namespace, "-l", selector)["items"])

    def events(self, reason: str) -> list[str]:
        """Notes of the events of one reason."""
        listed = self.kubectl.get("events.events.k8s.io", "-n", self.namespace)["items"]
        return [item["note"] for item in listed if item["reason"] == reason]

    def table(self, name: str) -> dict[str, Any]:
        """The routing table."""
        body = self.kubectl.get("configmap", names.routing_name(name), "-n", self.namespace)
        table: dict[str, Any] = json.loads(body["data"][names.ROUTING_KEY])
        return table

    def is_quiet(self, seconds: float) -> list[AuditEvent]:
        """What the operator wrote in the next seconds."""
        mark = self.cluster.audit.mark()
        time.sleep(seconds)
        return self.operator.writes(mark)


@contextmanager
def stage(
    cluster: ClusterUnderTest, namespace: str, folder: Path, nodes: list[PaperNode], **settings: object
) -> Iterator[Stage]:
    """Install CRD and rights, cordon the real nodes, start everything; leave nothing behind."""
    install(cluster.kubectl, namespace)
    real = cluster.node_names
    with ExitStack() as stack:
        stack.callback(_uncordon, cluster.kubectl, real)
        for name in real:
            cluster.kubectl("cordon", name)
        stack.enter_context(cluster.paper_nodes(nodes))
        kubelet = stack.enter_context(paper_kubelet(cluster.kubectl, namespace))
        operator = OperatorProcess(cluster, namespace, folder, **settings)
        stack.callback(_delete_objects, cluster.kubectl, namespace)
        stack.callback(operator.stop)
        operator.start()
        yield Stage(cluster, namespace, operator, kubelet, [node.name for node in nodes])


def pool(s: Stage, **changes: object) -> dict[str, object]:
    """A pool of the small object with parts replaced."""
    spec: dict[str, object] = s.manifest("x")["spec"]["prefill"]
    return {**spec, **changes}


def apart(s: Stage) -> dict[str, object]:
    """Prefill on one node, decode on the other."""
    first, second = ({names.HOSTNAME_LABEL: node.name} for node in PAPER_NODES)
    return {"prefill": pool(s, nodeSelector=first), "decode": pool(s, nodeSelector=second)}


def install(kubectl: Kubectl, namespace: str) -> None:
    """The CRD, the shipped ClusterRoles, and the account with its rights."""
    root = repository_root()
    kubectl("apply", "--server-side", "--force-conflicts", "-k", root / "crds")
    for name in ("rbac.yaml", "router-clusterrole.yaml"):
        documents = yaml.safe_load_all((root / "manifests" / "base" / name).read_text())
        roles = [item for item in documents if item and item["kind"] == "ClusterRole"]
        kubectl.apply(*roles)
    kubectl("wait", "--for=condition=Established", f"crd/{names.PLURAL}.{names.GROUP}", "--timeout=30s")
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": ACCOUNT, "namespace": namespace},
    }
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "phasesplit-operator"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"operator-{namespace}"},
        "roleRef": role,
        "subjects": [subject],
    }
    lease_rule = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update", "patch"],
    }
    leases = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "operator-lease", "namespace": namespace},
        "rules": [lease_rule],
    }
    lease_binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "operator-lease", "namespace": namespace},
        "roleRef": {**role, "kind": "Role", "name": "operator-lease"},
        "subjects": [subject],
    }
    kubectl.apply(account, binding, leases, lease_binding)


def _write_kubeconfig(kubectl: Kubectl, namespace: str, path: Path) -> None:
    raw = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    token = kubectl("create", "token", ACCOUNT, "-n", namespace, "--duration=2h").strip()
    raw["users"] = [{"name": raw["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path.write_text(json.dumps(raw))


def _uncordon(kubectl: Kubectl, nodes: list[str]) -> None:
    for name in nodes:
        kubectl("uncordon", name)


def _delete_objects(kubectl: Kubectl, namespace: str) -> None:
    kubectl("delete", "dm", "--all", "-n", namespace, "--timeout=30s", timeout_s=60)
    kubectl("delete", "clusterrolebinding", f"operator-{namespace}", "--ignore-not-found")
