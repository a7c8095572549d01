"""What a testbed should look like, and every address that follows from it. Pure values.

10.213.0.1           the host: API server and DNS, on the bridge that joins the nodes
10.213.0.(10+i)      node i
10.213.(10+i).0/24   pods of node i
10.96.0.0/16         Services, 10.96.0.10 the DNS
"""

import re
from dataclasses import dataclass, field
from typing import Any

from testbed.errors import TestbedError

MAX_NODES = 32
HOST_IP = "10.213.0.1"
POD_SUPERNET = "10.213.0.0/16"
SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
API_PORT = 6443
API_URL = f"https://{HOST_IP}:{API_PORT}"
CLUSTER_DOMAIN = "cluster.local"
GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT = "Testbed-GPU"
GPU_MEMORY_MIB = 24576


@dataclass(frozen=True)
class NodeSpec:
    """One node: its place in the address plan, its pretended GPUs and its labels."""

    index: int
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def netns(self) -> str:
        return f"phasesplit-node{self.index}"

    @property
    def link(self) -> str:
        """The host's end of the node's cable; at most 15 characters."""
        return f"psv{self.index}"

    @property
    def ip(self) -> str:
        return f"10.213.0.{10 + self.index}"

    @property
    def pod_cidr(self) -> str:
        return f"10.213.{10 + self.index}.0/24"


@dataclass(frozen=True)
class ClusterSpec:
    """The whole testbed."""

    nodes: tuple[NodeSpec, ...]

    def node(self, name: str) -> NodeSpec:
        for node in self.nodes:
            if node.name == name:
                return node
        raise TestbedError(
            f"there is no node {name}; the testbed has {', '.join(n.name for n in self.nodes)}"
        )

    def to_plain(self) -> dict[str, Any]:
        return {"nodes": [{"index": n.index, "gpus": n.gpus, "labels": n.labels} for n in self.nodes]}

    @staticmethod
    def from_plain(content: dict[str, Any]) -> "ClusterSpec":
        return ClusterSpec(tuple(NodeSpec(**node) for node in content["nodes"]))


def plan_cluster(nodes: int, gpus: str = "", labels: tuple[str, ...] = ()) -> ClusterSpec:
    """A spec from command-line words: `gpus` is `node0=1,node1=2`, each label `node0:key=value`."""
    if not 1 <= nodes <= MAX_NODES:
        raise TestbedError(f"--nodes {nodes}: the testbed takes 1 to {MAX_NODES} nodes")
    counts = _gpu_counts(gpus, nodes)
    by_node: dict[int, dict[str, str]] = {index: {} for index in range(nodes)}
    for index, count in counts.items():
        if count:
            by_node[index].update(gpu_labels(count))
    for label in labels:
        match = re.fullmatch(r"node(\d+):([^=]+)=(.*)", label)
        if match is None or int(match[1]) >= nodes:
            raise TestbedError(f"--label {label}: write it as node0:key=value, with a node that exists")
        by_node[int(match[1])][match[2]] = match[3]
    return ClusterSpec(tuple(NodeSpec(index, counts.get(index, 0), by_node[index]) for index in range(nodes)))


def gpu_labels(count: int) -> dict[str, str]:
    """The labels that NVIDIA's feature discovery would set."""
    return {
        "nvidia.com/gpu.product": GPU_PRODUCT,
        "nvidia.com/gpu.memory": str(GPU_MEMORY_MIB),
        "nvidia.com/gpu.count": str(count),
    }


def _gpu_counts(text: str, nodes: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"node(\d+)=(\d+)", word)
        if match is None or int(match[1]) >= nodes:
            raise TestbedError(f"--gpus {word}: write it as node0=1,node1=2, with nodes that exist")
        counts[int(match[1])] = int(match[2])
    return counts
