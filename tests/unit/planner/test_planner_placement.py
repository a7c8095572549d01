"""Placement: named clusters, what holds for every plan, and quality over exact optima."""

from dataclasses import replace
from statistics import mean, median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_placement import GPU, POD, make_node, make_request, random_request
from helpers_placement_optima import read_optima
from helpers_planner import PATIENT
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import Binding
from phasesplit.planner.facts import LinkFacts, NodeFacts, Resources, Taint
from phasesplit.planner.placement import binding_for, plan_placement
from phasesplit.planner.placement_types import (
    LabelRequirement,
    NodeTerm,
    PlacementPlan,
    PlacementRequest,
    PoolRequest,
    SpreadConstraint,
    Toleration,
)

# Of the golden optima, which are tried here; `make bench-placement` tries all.
EVERY_SO_MANY = 25


def cluster(*cliques: str, gpus: int = 1) -> tuple[NodeFacts, ...]:
    return tuple(make_node(i, clique or None, "z", gpus) for i, clique in enumerate(cliques))


def change_pool(request: PlacementRequest, pool: Pool, **changes: object) -> PlacementRequest:
    pools = tuple(replace(item, **changes) if item.pool is pool else item for item in request.pools)
    return replace(request, pools=pools)


def change_node(request: PlacementRequest, name: str, **changes: object) -> PlacementRequest:
    nodes = tuple(replace(node, **changes) if node.name == name else node for node in request.nodes)
    return replace(request, nodes=nodes)


def used(plan: PlacementPlan) -> set[str]:
    return {node for nodes in plan.nodes.values() for node in nodes if node}


def test_pair_goes_to_one_clique() -> None:
    plan = plan_placement(make_request(cluster("a", "b", "b", "c"), 1, 1))
    assert used(plan) == {"n0001", "n0002"}
    assert plan.condition_status == "True"
    assert plan.node_matters
    assert "prefill on" in plan.message


def test_measured_bandwidth_beats_the_guess() -> None:
    links = (
        LinkFacts("n0001", "n0002", 1e7),
        LinkFacts("n0002", "n0001", 1e7),
        LinkFacts("n0000", "n0003", 2e10),
    )
    plan = plan_placement(make_request(cluster("a", "b", "b", "c"), 1, 1, links=links))
    assert plan.nodes == {Pool.PREFILL: ("n0000",), Pool.DECODE: ("n0003",)}


def test_two_pods_on_one_node_are_not_taken_for_nvlink() -> None:
    """A measured fast pair of nodes wins over the host's guessed memory copy."""
    links = (LinkFacts("n0000", "n0001", 4e10),)
    plan = plan_placement(make_request(cluster("a", "a", gpus=2), 1, 1, links=links))
    assert plan.nodes == {Pool.PREFILL: ("n0000",), Pool.DECODE: ("n0001",)}


def test_equal_nodes_need_no_pins() -> None:
    plan = plan_placement(make_request(cluster("", "", ""), 1, 2))
    assert not plan.node_matters
    assert binding_for(Binding.AUTOMATIC, plan) is Binding.AFFINITY


def test_binding_is_gated_only_where_the_node_matters() -> None:
    plan = plan_placement(make_request(cluster("a", "b", "b"), 1, 1))
    assert binding_for(Binding.AUTOMATIC, plan) is Binding.GATED
    assert binding_for(Binding.AFFINITY, plan) is Binding.AFFINITY
    assert binding_for(Binding.GATED, plan) is Binding.GATED


busy = Resources(0, 0, 0, {GPU: 1})
AVOIDED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "cordoned": ({"unschedulable": True}, {}),
    "not ready": ({"ready": False}, {}),
    "tainted": ({"taints": (Taint("gpu", "NoSchedule", "x"),)}, {}),
    "tolerates another value": (
        {"taints": (Taint("gpu", "NoSchedule", "x"),)},
        {"tolerations": (Toleration("gpu", value="y"),)},
    ),
    "full": ({"requested": busy}, {}),
    "short of memory": ({"allocatable": Resources(64_000, 1 << 20, 110, {GPU: 1})}, {}),
    "short of pods": ({"allocatable": Resources(64_000, 512 << 30, 0, {GPU: 1})}, {}),
    "another product": ({"gpu_product": "NVIDIA-T4"}, {"products": ("NVIDIA-L4",)}),
    "too little GPU memory": ({"gpu_memory_bytes": 8 << 30}, {"min_gpu_memory_bytes": 20 << 30}),
    "other GPU resource": ({"allocatable": Resources(64_000, 512 << 30, 110, {"amd.com/gpu": 1})}, {}),
    "not selected": ({}, {"node_selector": {"disk": "ssd"}}),
    "affinity NotIn": (
        {"labels": {"nvidia.com/gpu.clique": "b", "age": "7", "kind": "old"}},
        {"required_terms": (NodeTerm((LabelRequirement("kind", "NotIn", ("old",)),)),)},
    ),
    "affinity Gt": (
        {"labels": {"nvidia.com/gpu.clique": "b", "age": "7"}},
        {
            "required_terms": (
                NodeTerm((LabelRequirement("age", "Gt", ("7",)),)),
                NodeTerm((LabelRequirement("age", "DoesNotExist"),)),
            )
        },
    ),
}


@pytest.mark.parametrize("name", AVOIDED)
def test_node_is_avoided(name: str) -> None:
    node_changes, pool_changes = AVOIDED[name]
    request = make_request(cluster("a", "b", "b", "a"), 1, 1)
    for pool in Pool:
        request = change_pool(request, pool, **pool_changes)
    if name == "not selected":
        for other in ("n0000", "n0001", "n0003"):
            labels = {"nvidia.com/gpu.clique": "b" if other == "n0001" else "a", "disk": "ssd"}
            request = change_node(request, other, labels=labels)
    request = change_node(request, "n0002", **node_changes)
    plan = plan_placement(request)
    assert "n0002" not in used(plan)
    assert used(plan) == {"n0000", "n0003"}


def test_tolerated_taint_and_promise_of_another_object() -> None:
    request = make_request(cluster("b", "b"), 1, 1)
    tainted = change_node(request, "n0001", taints=(Taint("gpu", "NoSchedule", "x"),))
    for pool in Pool:
        tainted = change_pool(tainted, pool, tolerations=(Toleration("gpu", "Exists"),))
    assert used(plan_placement(tainted)) == {"n0000", "n0001"}
    promised = replace(request, promised={"n0001": POD})
    plan = plan_placement(promised)
    assert used(plan) == {"n0000"}
    assert plan.nodes[Pool.DECODE] == ("n0000",)
    assert plan.nodes[Pool.PREFILL] == (None,)


def test_what_is_missing_is_said() -> None:
    plan = plan_placement(make_request(cluster("a", "a"), 2, 3))
    assert plan.condition_status == "False"
    assert plan.reason is Reason.NOT_ENOUGH_GPUS
    assert {item.pool: item.count for item in plan.missing} == {Pool.PREFILL: 1, Pool.DECODE: 2}
    assert "lacks 2 nvidia.com/gpu for 2 of its 3 workers: 2 nodes would do but are full" in plan.message


def test_no_gpu_anywhere_points_to_cpu() -> None:
    nodes = tuple(replace(node, allocatable=Resources(8000, 8 << 30, 110)) for node in cluster("a", "a"))
    plan = plan_placement(make_request(nodes, 1, 1))
    assert plan.reason is Reason.NO_GPU_RESOURCE
    assert "gpu.count: 0" in plan.message


def test_no_node_at_all_names_the_obstacles() -> None:
    nodes = tuple(replace(node, unschedulable=True) for node in cluster("a", "a"))
    plan = plan_placement(make_request(nodes, 1, 1))
    assert plan.reason is Reason.NO_ELIGIBLE_NODE
    assert "2 nodes cordoned" in plan.message


def test_nodes_without_gpu_labels_are_used_and_it_is_said() -> None:
    request = make_request(cluster("a", "a"), 1, 1)
    for pool in Pool:
        request = change_pool(request, pool, products=("NVIDIA-L4",))
    plan = plan_placement(request)
    assert plan.condition_status == "True"
    assert "carry no GPU labels" in plan.message


def test_cpu_pools_are_placed_by_cpu_and_memory() -> None:
    pod = Resources(2000, 4 << 30, 1)
    nodes = tuple(replace(node, allocatable=Resources(3000, 8 << 30, 110)) for node in cluster("", ""))
    pools = (PoolRequest(Pool.PREFILL, 1, pod), PoolRequest(Pool.DECODE, 1, pod))
    plan = plan_placement(PlacementRequest(pools, nodes))
    assert used(plan) == {"n0000", "n0001"}
    short = replace(pools[0], count=2)
    lacking = plan_placement(PlacementRequest((short, pools[1]), nodes))
    assert "cpu" in lacking.message


def test_existing_pods_stay() -> None:
    request = make_request(cluster("a", "b", "b", "a"), 1, 2)
    request = change_pool(request, Pool.DECODE, existing={0: "n0000"})
    request = change_node(request, "n0000", requested=POD)
    plan = plan_placement(request)
    assert plan.nodes[Pool.DECODE][0] == "n0000"
    assert "n0003" in used(plan)
    assert not plan.moves


def test_existing_pod_on_a_cordoned_node_stays() -> None:
    request = change_pool(make_request(cluster("a", "a"), 1, 1), Pool.DECODE, existing={0: "n0000"})
    request = change_node(request, "n0000", requested=POD, unschedulable=True)
    assert plan_placement(request).nodes == {Pool.PREFILL: ("n0001",), Pool.DECODE: ("n0000",)}


def test_move_only_when_it_pays_for_the_model_load() -> None:
    links = (LinkFacts("n0000", "n0001", 1e7), LinkFacts("n0001", "n0000", 1e7))
    request = make_request(cluster("a", "c", "b", "b"), 1, 1, links=links, movable=True)
    request = change_pool(request, Pool.PREFILL, existing={0: "n0000"})
    request = change_pool(request, Pool.DECODE, existing={0: "n0001"})
    for name in ("n0000", "n0001"):
        request = change_node(request, name, requested=POD)
    quiet = plan_placement(replace(request, requests_per_s=1e-4))
    busy_plan = plan_placement(replace(request, requests_per_s=1.0))
    assert not quiet.moves
    assert quiet.nodes == {Pool.PREFILL: ("n0000",), Pool.DECODE: ("n0001",)}
    assert {move.to_node for move in busy_plan.moves} == {"n0002", "n0003"}


def test_volume_pins_its_ordinal() -> None:
    request = change_pool(
        make_request(cluster("a", "a", "b"), 1, 2), Pool.DECODE, allowed_nodes={1: frozenset({"n0002"})}
    )
    plan = plan_placement(request)
    assert plan.nodes[Pool.DECODE][1] == "n0002"
    lost = change_pool(request, Pool.DECODE, allowed_nodes={1: frozenset({"gone"})})
    assert plan_placement(lost).nodes[Pool.DECODE][1] is None


def test_spread_constraint_is_kept() -> None:
    nodes = tuple(make_node(i, f"c{i // 2}", "z", 4) for i in range(4))
    request = make_request(nodes, 2, 4)
    spread = (SpreadConstraint("nvidia.com/gpu.clique", 1),)
    plan = plan_placement(change_pool(request, Pool.DECODE, spread=spread))
    cliques = [int(node[1:]) // 2 for node in plan.nodes[Pool.DECODE] if node]
    assert sorted(cliques) == [0, 0, 1, 1]


def test_decode_lies_on_two_nodes_when_it_costs_little() -> None:
    links = tuple(LinkFacts(f"n{a:04}", f"n{b:04}", 4e9) for a in range(3) for b in range(3) if a != b)
    request = make_request(cluster("a", "a", "a", gpus=4), 1, 2, links=links)
    assert len(set(plan_placement(request).nodes[Pool.DECODE])) == 2


def test_preferred_affinity_breaks_ties() -> None:
    nodes = tuple(
        replace(node, labels={"kind": "new" if i > 1 else "old"})
        for i, node in enumerate(cluster("", "", "", ""))
    )
    request = make_request(nodes, 1, 1)
    term = NodeTerm((LabelRequirement("kind", "In", ("new",)),), weight=50)
    for pool in Pool:
        request = change_pool(request, pool, preferred_terms=(term,))
    assert used(plan_placement(request)) == {"n0002", "n0003"}


requests = st.integers(0, 100_000).map(lambda seed: random_request(seed, 12))


@settings(PATIENT, max_examples=25)
@given(requests)
def test_no_gpu_is_given_twice_and_everything_that_fits_is_placed(request_: PlacementRequest) -> None:
    plan = plan_placement(request_)
    size = {node.name: node.allocatable.gpus[GPU] for node in request_.nodes}
    taken: dict[str, int] = {}
    for nodes in plan.nodes.values():
        for node in nodes:
            if node is not None:
                taken[node] = taken.get(node, 0) + 1
    assert all(count <= size[node] for node, count in taken.items())
    pods = sum(pool.count for pool in request_.pools)
    assert sum(taken.values()) == min(pods, sum(size.values()))
    assert plan.wire_s >= plan.bound_wire_s * (1 - 1e-9)


@settings(PATIENT, max_examples=12)
@given(requests)
def test_order_of_nodes_changes_nothing(request_: PlacementRequest) -> None:
    turned = replace(request_, nodes=request_.nodes[::-1])
    assert plan_placement(turned).nodes == plan_placement(request_).nodes


@settings(PATIENT, max_examples=12)
@given(requests)
def test_planning_again_with_the_pods_in_place_changes_nothing(request_: PlacementRequest) -> None:
    plan = plan_placement(request_)
    if plan.missing:
        return
    placed: dict[str, Resources] = {}
    for nodes in plan.nodes.values():
        for node in nodes:
            assert node is not None
            placed[node] = placed.get(node, Resources()).plus(POD)
    after = replace(
        request_,
        nodes=tuple(replace(node, requested=placed.get(node.name, Resources())) for node in request_.nodes),
        pools=tuple(
            replace(pool, existing={i: n for i, n in enumerate(plan.nodes[pool.pool]) if n})
            for pool in request_.pools
        ),
    )
    assert plan_placement(after).nodes == plan.nodes


def shrink(request: PlacementRequest, nodes: dict[Pool, list[str]]) -> PlacementRequest:
    """The same cluster with just these pods in place."""
    for pool in Pool:
        count = len(nodes[pool])
        request = change_pool(request, pool, count=count, existing=dict(enumerate(nodes[pool])))
    return request


def without_pods(request: PlacementRequest) -> PlacementRequest:
    """The same counts to be placed afresh."""
    for pool in Pool:
        request = change_pool(request, pool, existing={})
    return request


def test_every_prefix_of_the_ordinals_is_good() -> None:
    """What a scale-down leaves, against a plan made for that size on the whole cluster."""
    ratios = []
    for seed in range(12):
        request = replace(random_request(seed, 12), spread_decode=False)
        plan = plan_placement(request)
        if plan.missing:
            continue
        nodes = {pool: [node for node in plan.nodes[pool] if node] for pool in Pool}
        full = {pool.pool: pool.count for pool in request.pools}
        while sum(len(found) for found in nodes.values()) > 2:
            larger = [pool for pool in Pool if len(nodes[pool]) > 1]
            nodes[max(larger, key=lambda pool: len(nodes[pool]) / full[pool])].pop()
            smaller = shrink(request, nodes)
            ratios.append(plan_placement(smaller).wire_s / plan_placement(without_pods(smaller)).wire_s)
    assert median(ratios) < 1.05
    assert quantiles(ratios, n=10)[-1] < 1.5


# What single moves and exchanges alone leave 5 to 14 % above the optimum.
HARD_SEEDS = (706, 628, 542, 44, 362, 389, 489, 90)


def test_quality_over_exact_optima() -> None:
    optima = read_optima()
    hard = [optimum for optimum in optima if optimum.seed in HARD_SEEDS]
    gaps = [optimum.excess() for optimum in (*optima[::EVERY_SO_MANY], *hard)]
    assert min(gaps) > -1e-6
    assert mean(gaps) <= 0.01
    assert max(gaps) <= 0.05


def test_a_large_cluster_is_planned_whole() -> None:
    nodes = tuple(make_node(i, f"c{i // 18}", f"z{i // 500}", 8) for i in range(2000))
    plan = plan_placement(make_request(nodes, 100, 100))
    assert not plan.missing
    assert len({node[:3] for node in used(plan)}) >= 1
    assert plan.wire_s < 4 * plan.bound_wire_s
