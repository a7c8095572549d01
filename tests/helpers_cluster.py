"""Fixtures for tests that need Kubernetes: the testbed, or the cluster that CONTEXT names.

A test marked `cluster` runs while no other test run uses the testbed. It takes `cluster` for the whole, and
`namespace` for a place of its own. What only the testbed can do (slow links, pretended GPUs, the audit log)
raises a clear error on a cluster of the user's: nothing is skipped.
"""

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed import cluster as testbeds
from testbed.audit import AuditLog
from testbed.binaries import binary
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.locks import exclusive
from testbed.paper_nodes import PaperNode, paper_nodes
from testbed.paths import cache_dir
from testbed.processes import run, wait_for

__all__ = ["ClusterUnderTest", "PaperNode", "wait_for"]

# Below pytest's own limit per test, so that the message names what is being waited for.
_LOCK_TIMEOUT_S = 90.0
_OPERATOR = "app.kubernetes.io/name=phasesplit-operator"
_numbers = itertools.count()
_held = pytest.StashKey[ExitStack]()


@dataclass(frozen=True)
class ClusterUnderTest:
    """How to talk to the cluster, and what can be done to it."""

    kubectl: Kubectl
    helm_program: Path
    testbed: testbeds.Testbed | None

    def helm(self, *arguments: object, timeout_s: float = 180.0) -> str:
        """Standard output of a call of helm against this cluster."""
        words = []
        if self.kubectl.kubeconfig is not None:
            words.append(f"--kubeconfig={self.kubectl.kubeconfig}")
        if self.kubectl.context is not None:
            words.append(f"--kube-context={self.kubectl.context}")
        return run(self.helm_program, *arguments, *words, timeout_s=timeout_s).stdout

    @property
    def audit(self) -> AuditLog:
        return self._own("the audit log").audit

    @property
    def node_names(self) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.kubectl.get("nodes")["items"])

    def shape(self, node: str, rate: str | None) -> None:
        """Limit a node's network to `rate` (`50mbit`); None lifts the limit."""
        self._own("a slow link").shape(node, rate)

    def set_gpus(self, node: str, count: int) -> None:
        """Offer pretended GPUs on a node."""
        self._own("a pretended GPU").set_gpus(node, count)

    def paper_nodes(self, nodes: Sequence[PaperNode]) -> AbstractContextManager[None]:
        """Nodes without a kubelet, for placement."""
        self._own("a node on paper")
        return paper_nodes(self.kubectl, nodes)

    def _own(self, what: str) -> testbeds.Testbed:
        if self.testbed is None:
            raise TestbedError(f"{what} needs the testbed: unset CONTEXT to run this test")
        return self.testbed


def connect() -> ClusterUnderTest:
    """The cluster of CONTEXT when it is set, else the running testbed, started when there is none."""
    context = os.environ.get("CONTEXT")
    if not context:
        testbed = testbeds.ensure_up()
        if testbed.kubectl.get("deployments", "-A", "-l", _OPERATOR)["items"]:
            # What a demo left behind: its operator would act on the objects of these tests too.
            testbeds.down()
            testbed = testbeds.ensure_up()
        return ClusterUnderTest(testbed.kubectl, binary("helm"), testbed)
    programs = {name: shutil.which(name) for name in ("kubectl", "helm")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        raise TestbedError(f"CONTEXT={context} is set, but {' and '.join(missing)} not on PATH: install it")
    return ClusterUnderTest(
        Kubectl(Path(str(programs["kubectl"])), context=context), Path(str(programs["helm"])), None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Two test runs on one testbed would shape each other's links and install over each other."""
    if item.get_closest_marker("cluster") is None or _held in item.config.stash:
        return
    lock = cache_dir() / "testbed" / "tests.lock"
    held = ExitStack()
    held.enter_context(exclusive(lock, _LOCK_TIMEOUT_S, "the testbed, used by another test run,"))
    item.config.stash[_held] = held


def pytest_unconfigure(config: pytest.Config) -> None:
    if _held in config.stash:
        config.stash[_held].close()


@pytest.fixture(scope="session")
def cluster() -> ClusterUnderTest:
    """The cluster, healthy when the first test starts."""
    return connect()


@pytest.fixture
def namespace(cluster: ClusterUnderTest) -> Iterator[str]:
    """A new namespace; its deletion is started and not waited for."""
    name = f"test-{os.getpid()}-{next(_numbers)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
