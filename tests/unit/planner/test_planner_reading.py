"""Manifests as facts: what the scheduler would count is what we count."""

from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import WorkerReport, WorkerState
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.planner.facts import NodeFacts, Resources, WorkerFacts
from phasesplit.planner.placement_types import LabelRequirement, NodeTerm
from phasesplit.planner.reading import (
    matches_term,
    sum_requests,
    to_node_facts,
    to_pod_requests,
    to_pool_request,
    to_volume_nodes,
)

NODE = {
    "metadata": {
        "name": "a",
        "labels": {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"},
    },
    "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}], "unschedulable": True},
    "status": {
        "allocatable": {
            "cpu": "3920m",
            "memory": "16Gi",
            "pods": "110",
            "nvidia.com/gpu": "2",
            "hugepages-2Mi": "0",
        },
        "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
    },
}


def test_node_is_read_whole() -> None:
    node = to_node_facts(NODE, Resources(920, 1 << 30, 3, {"nvidia.com/gpu": 1}))
    assert node.free == Resources(3000, 15 << 30, 107, {"nvidia.com/gpu": 1})
    assert (node.gpu_product, node.gpu_memory_bytes) == ("NVIDIA-L4", 23034 << 20)
    assert node.ready
    assert node.unschedulable
    assert node.taints[0].key == "gpu"


def test_node_that_never_reported_is_not_ready() -> None:
    assert not to_node_facts({"metadata": {"name": "a"}}).ready


def test_requests_are_what_the_scheduler_reserves() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}}},
            {"resources": {"limits": {"cpu": "1"}}},
            {},
        ],
        "initContainers": [
            {"resources": {"requests": {"memory": "4Gi"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
        ],
        "overhead": {"cpu": "50m"},
    }
    assert to_pod_requests(spec) == Resources(1650, 4 << 30, 1, {"nvidia.com/gpu": 1})


def test_finished_and_unbound_pods_hold_nothing() -> None:
    def pod(node: str | None, phase: str) -> dict[str, object]:
        containers = [{"resources": {"requests": {"cpu": "1"}}}]
        return {"spec": {"nodeName": node, "containers": containers}, "status": {"phase": phase}}

    pods = [pod("a", "Running"), pod("a", "Succeeded"), pod("b", "Pending"), pod(None, "Pending")]
    assert {node: found.cpu_millis for node, found in sum_requests(pods).items()} == {"a": 1000, "b": 1000}


def test_pool_request_takes_the_finished_template() -> None:
    spec = DisaggregatedModelSpec.model_validate(
        {
            "model": {"source": {"path": "/m"}},
            "decode": {"gpu": {"products": ["NVIDIA-L4"], "minMemory": "20Gi"}},
        }
    )
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}]
    pod_spec = {
        "containers": [{"resources": {"limits": {"nvidia.com/gpu": 1}}}],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        },
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    }
    request = to_pool_request(Pool.DECODE, spec.decode, pod_spec, 3, existing={0: "a"})
    assert request.count == 3
    assert request.products == ("NVIDIA-L4",)
    assert request.min_gpu_memory_bytes == 20 << 30
    assert request.required_terms == (NodeTerm((LabelRequirement("zone", "In", ("z",)),)),)
    assert not request.spread[0].hard
    assert request.tolerations[0].operator == "Exists"
    assert request.existing == {0: "a"}


def test_local_volume_names_its_nodes() -> None:
    nodes = [NodeFacts(name, {"kubernetes.io/hostname": name}) for name in ("a", "b")]
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["b"]}]}]
    local = {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}}
    assert to_volume_nodes(local, nodes) == {"b"}
    assert to_volume_nodes({"spec": {}}, nodes) is None


def test_terms_follow_kubernetes() -> None:
    node = NodeFacts("a", {"age": "7", "kind": "x"})

    def holds(operator: str, *values: str, key: str = "age") -> bool:
        return matches_term(node, NodeTerm((LabelRequirement(key, operator, values),)))

    assert holds("Gt", "6")
    assert not holds("Gt", "7")
    assert holds("Lt", "8")
    assert not holds("Lt", "8", key="kind")
    assert holds("NotIn", "y", key="absent")
    assert holds("DoesNotExist", key="absent")
    assert not matches_term(node, NodeTerm())
    assert matches_term(node, NodeTerm(fields=(LabelRequirement("metadata.name", "In", ("a",)),)))


def test_worker_facts_without_a_model_are_empty_not_wrong() -> None:
    report = WorkerReport(
        pod="m-decode-0",
        node="a",
        pool=Pool.DECODE,
        role=Role.COLOCATED,
        role_version=1,
        state=WorkerState.LOADING,
        engine_id="e",
        kv_total_blocks=10,
        max_num_seqs=8,
    )
    facts = WorkerFacts.from_report(report)
    assert (facts.ready, facts.fingerprint, facts.kv_total_tokens) == (False, None, 0)
    assert facts.max_num_seqs == 8
