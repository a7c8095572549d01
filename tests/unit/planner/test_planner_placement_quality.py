"""Placement: what holds for every plan, and quality over exact optima."""

from dataclasses import replace
from statistics import mean, median, quantiles

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_placement import (
    GPU,
    POD,
    change_pool,
    make_node,
    make_request,
    random_request,
    used,
)
from helpers_placement_optima import read_optima
from helpers_planner import PATIENT
from phasesplit.api.names import Pool
from phasesplit.planner.facts import Resources
from phasesplit.planner.placement import plan_placement
from phasesplit.planner.placement_types import (
    PlacementRequest,
)

# Of the golden optima, which are tried here; `make bench-placement` tries all.
EVERY_SO_MANY = 40


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
