"""One testbed that has been started: what is written down of it, and what can be done to it.

Knows how to find a testbed again; starting and ending one is the business of `cluster`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from testbed import control_plane, network, nodes
from testbed.audit import AuditLog
from testbed.binaries import binary
from testbed.certificates import Pki
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.paths import state_root, user_kubeconfig
from testbed.processes import Daemons
from testbed.spec import GPU_RESOURCE, ClusterSpec, gpu_labels

NODES_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Testbed:
    """A running cluster: where its state is, what it was made from, and how to talk to it."""

    __test__ = False

    root: Path
    spec: ClusterSpec
    checkout: Path  # whose code the pods run

    @property
    def kubeconfig(self) -> Path:
        return user_kubeconfig()

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(binary("kubectl"), Pki(self.root).kubeconfig("admin"))

    @property
    def daemons(self) -> Daemons:
        return Daemons(self.root)

    @property
    def audit(self) -> AuditLog:
        return AuditLog(control_plane.audit_log(self.root))

    def shape(self, node: str, rate: str | None) -> None:
        """Limit a node's cable to `rate` (`50mbit`); None lifts the limit."""
        network.shape(self.spec.node(node), rate)

    def set_gpus(self, node: str, count: int) -> None:
        """Offer `count` pretended GPUs on a node, with the labels of GPU nodes, and wait until they show."""
        target = self.spec.node(node)
        nodes.set_gpus(self.root, target, self.daemons, count)
        labels = [f"{key}={value}" if count else f"{key}-" for key, value in gpu_labels(count).items()]
        self.kubectl("label", "node", node, "--overwrite", *labels)

        def shows() -> bool:
            offered = self.kubectl.get("node", node)["status"]["allocatable"].get(GPU_RESOURCE, "0")
            return bool(offered == str(count))

        self.daemons.wait_for(shows, 30, f"{count} GPUs on {node}", needs=(f"{node}-kubelet",))

    def connect(self, node: str, connected: bool) -> None:
        """Plug a node's cable in or pull it out; its pods run on."""
        network.connect(self.spec.node(node), connected)

    def power_off(self, node: str) -> None:
        """End a node as a machine that loses power."""
        nodes.power_off(self.root, self.spec.node(node), self.daemons)

    def power_on(self, node: str) -> None:
        """Start a node again and wait until it is Ready."""
        nodes.power_on(self.root, self.spec.node(node), self.daemons, Pki(self.root))
        kubelet = f"{node}-kubelet"
        self.daemons.wait_for(lambda: node in self.ready_nodes(), NODES_TIMEOUT_S, node, needs=(kubelet,))

    def load_image(self, archive: Path, node: str | None = None) -> None:
        """Load an OCI or Docker archive into one node, or into all."""
        if not archive.is_file():
            raise TestbedError(f"there is no image archive {archive}")
        for target in self.spec.nodes:
            if node in {None, target.name}:
                nodes.import_archive(self.root, target, archive)

    def is_healthy(self) -> bool:
        """All daemons alive, the API server serving, every node Ready. Takes about a second."""
        records = self.daemons.records()
        if not records or not all(record.is_alive() for record in records):
            return False
        return self.kubectl.is_serving() and self.ready_nodes() >= {node.name for node in self.spec.nodes}

    def ready_nodes(self) -> set[str]:
        return {
            item["metadata"]["name"]
            for item in self.kubectl.get("nodes")["items"]
            if any(
                c["type"] == "Ready" and c["status"] == "True" for c in item["status"].get("conditions", [])
            )
        }


def current(root: Path | None = None) -> Testbed | None:
    """The testbed written down at the root, healthy or not."""
    root = root or state_root()
    written = root / "cluster.json"
    if not written.is_file():
        return None
    content = json.loads(written.read_text())
    return Testbed(root, ClusterSpec.from_plain(content["spec"]), Path(content["checkout"]))


def write_down(testbed: Testbed) -> None:
    content = {"spec": testbed.spec.to_plain(), "checkout": str(testbed.checkout)}
    (testbed.root / "cluster.json").write_text(json.dumps(content, indent=1))


def running() -> Testbed:
    """The testbed at the root; TestbedError when there is none."""
    testbed = current()
    if testbed is None:
        raise TestbedError("no testbed is running: start one with `up`")
    return testbed
