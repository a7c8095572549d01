"""One operator for all tests of a file, each test with an object of its own."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cluster import ClusterUnderTest
from helpers_operator_cluster import PAPER_NODES, Stage, stage


@pytest.fixture(scope="module")
def namespace_of_module(cluster: ClusterUnderTest) -> Iterator[str]:
    name = f"operator-{int(time.time())}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def s(
    cluster: ClusterUnderTest, namespace_of_module: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("operator")
    with stage(cluster, namespace_of_module, folder, PAPER_NODES) as found:
        yield found
