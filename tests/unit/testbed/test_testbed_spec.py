"""The address plan and the words of the command line."""

import ipaddress
import json

import pytest

from testbed.errors import TestbedError
from testbed.spec import HOST_IP, MAX_NODES, POD_SUPERNET, ClusterSpec, plan_cluster


def test_gpus_bring_the_labels_of_gpu_nodes_and_own_labels_win() -> None:
    spec = plan_cluster(2, "node1=2", ("node1:nvidia.com/gpu.product=NVIDIA-L4", "node0:rack=a"))
    assert spec.node("node0").gpus == 0
    assert spec.node("node0").labels == {"rack": "a"}
    assert spec.node("node1").gpus == 2
    assert spec.node("node1").labels["nvidia.com/gpu.product"] == "NVIDIA-L4"
    assert spec.node("node1").labels["nvidia.com/gpu.count"] == "2"


def test_a_spec_survives_being_written_down() -> None:
    spec = plan_cluster(3, "node0=1", ("node2:a.b/c=d=e",))
    assert ClusterSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


def test_no_two_addresses_overlap() -> None:
    spec = plan_cluster(MAX_NODES)
    pods = [ipaddress.ip_network(node.pod_cidr) for node in spec.nodes]
    assert len(set(pods)) == MAX_NODES
    hosts = {node.ip for node in spec.nodes} | {HOST_IP}
    assert len(hosts) == MAX_NODES + 1
    assert not any(ipaddress.ip_address(host) in network for host in hosts for network in pods)
    assert all(network.subnet_of(ipaddress.ip_network(POD_SUPERNET)) for network in pods)
    assert all(len(node.link) <= 15 for node in spec.nodes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0,), "--nodes 0"),
        ((MAX_NODES + 1,), "--nodes 33"),
        ((2, "node2=1"), "--gpus node2=1"),
        ((2, "node0=x"), "--gpus node0=x"),
        ((2, "", ("node5:a=b",)), "--label node5:a=b"),
        ((2, "", ("rack=a",)), "--label rack=a"),
    ],
)
def test_a_wrong_word_is_named(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(TestbedError, match=said):
        plan_cluster(*arguments)  # type: ignore[arg-type]


def test_an_unknown_node_is_named_with_those_there_are() -> None:
    with pytest.raises(TestbedError, match=r"no node nodeX; the testbed has node0, node1"):
        plan_cluster(2).node("nodeX")
