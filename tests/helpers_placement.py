"""Random placement problems, and their exact optima by mixed-integer programming (scipy, HiGHS)."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from phasesplit.api.names import Pool
from phasesplit.planner.facts import LinkFacts, NodeFacts, Resources
from phasesplit.planner.placement import plan_placement
from phasesplit.planner.placement_types import PlacementPlan, PlacementRequest, PoolRequest
from phasesplit.planner.topology import Topology

GPU = "nvidia.com/gpu"
LEVELS = ("nvidia.com/gpu.clique", "kubernetes.io/hostname", "topology.kubernetes.io/zone")
POD = Resources(1000, 1 << 30, 1, {GPU: 1})


def make_node(index: int, clique: str | None, zone: str | None, gpus: int) -> NodeFacts:
    """A node with plenty of everything but GPUs."""
    labels = {"kubernetes.io/hostname": f"n{index:04}"}
    if clique is not None:
        labels["nvidia.com/gpu.clique"] = clique
    if zone is not None:
        labels["topology.kubernetes.io/zone"] = zone
    return NodeFacts(f"n{index:04}", labels, allocatable=Resources(64_000, 512 << 30, 110, {GPU: gpus}))


def make_request(nodes: tuple[NodeFacts, ...], prefill: int, decode: int, **more: object) -> PlacementRequest:
    """One GPU per pod."""
    pools = tuple(
        PoolRequest(pool, count, POD, GPU) for pool, count in ((Pool.PREFILL, prefill), (Pool.DECODE, decode))
    )
    return replace(PlacementRequest(pools, nodes, levels=LEVELS, kv_bytes_per_request=1e8), **more)


def random_request(seed: int, max_nodes: int = 40, max_pods: int = 12) -> PlacementRequest:
    """Groups of nodes with uneven GPUs, half of them with measured links of very different speeds."""
    rng = random.Random(seed)
    count = rng.randint(2, max_nodes)
    cliques, zones = rng.randint(1, 6), rng.randint(1, 3)
    nodes = tuple(
        make_node(
            index,
            f"c{rng.randrange(cliques)}" if rng.random() < 0.8 else None,
            f"z{rng.randrange(zones)}",
            rng.choice((0, 1, 1, 2, 4)),
        )
        for index in range(count)
    )
    free = sum(node.allocatable.gpus[GPU] for node in nodes)
    pods = rng.randint(2, max(2, min(free, max_pods)))
    prefill = rng.randint(1, pods - 1)
    links = ()
    if rng.random() < 0.5:
        pairs = [(a.name, b.name) for a in nodes for b in nodes if a is not b]
        chosen = rng.sample(pairs, min(len(pairs), rng.randint(1, 3 * count)))
        links = tuple(LinkFacts(a, b, 10 ** rng.uniform(7.5, 9.7)) for a, b in chosen)
    return make_request(nodes, prefill, pods - prefill, links=links)


def plan_cost(request: PlacementRequest, plan: PlacementPlan) -> float:
    """Mean seconds per byte over all pairs, from the nodes of the plan alone."""
    topology = Topology(request.nodes, request.levels, request.links)
    prefill, decode = plan.nodes[Pool.PREFILL], plan.nodes[Pool.DECODE]
    values = [topology.seconds_per_byte(a, b) for a in prefill for b in decode if a and b]
    return sum(values) / len(values)


def planned_cost(request: PlacementRequest) -> float:
    """Cost of the planner's answer when cost is all that counts."""
    request = replace(request, spread_decode=False)
    return plan_cost(request, plan_placement(request))


def exact_cost(request: PlacementRequest, limit_s: float = 60.0) -> float | None:
    """The least possible cost; None when it could not be proven in time or nothing fits.

    Counts per node: x prefill, y decode. The product x*y is made linear by writing x in unary: for
    each node and value k a binary u(n,k), and g(n,k,m) = u(n,k) * y(m), exact at whole u.
    """
    topology = Topology(request.nodes, request.levels, request.links)
    nodes = [node for node in request.nodes if node.allocatable.gpus[GPU] > 0]
    prefill, decode = request.pools[0].count, request.pools[1].count
    size = [node.allocatable.gpus[GPU] for node in nodes]
    if sum(size) < prefill + decode:
        return None
    rate = np.array([[topology.seconds_per_byte(a.name, b.name) for b in nodes] for a in nodes])
    scale = 1 / rate.min()
    unary = [(n, k) for n in range(len(nodes)) for k in range(min(size[n], prefill) + 1)]
    rows = _exact_rows(size, unary, prefill, decode)
    first_g = len(unary) + len(nodes)
    products = np.concatenate([k * rate[n] * scale for n, k in unary])
    upper = np.full(first_g + len(products), np.inf)
    upper[: len(unary)] = 1
    result = milp(
        np.concatenate([np.zeros(first_g), products]),
        constraints=rows.constraint(len(upper)),
        bounds=Bounds(np.zeros(len(upper)), upper),
        integrality=np.concatenate([np.ones(first_g), np.zeros(len(products))]),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
    )
    if result.status != 0:
        return None
    return float(result.fun) / scale / (prefill * decode)


class _Rows:
    """Rows of a sparse constraint matrix."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.entries.extend((len(self.low), column, value) for column, value in terms)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, columns: int) -> LinearConstraint:
        row, column, value = zip(*self.entries, strict=True)
        matrix = coo_matrix((value, (row, column)), shape=(len(self.low), columns)).tocsr()
        return LinearConstraint(matrix, self.low, self.high)


def _exact_rows(size: Sequence[int], unary: Sequence[tuple[int, int]], prefill: int, decode: int) -> _Rows:
    rows, nodes = _Rows(), range(len(size))
    first_y = len(unary)
    first_g = first_y + len(size)
    own = [[index for index, (node, _) in enumerate(unary) if node == n] for n in nodes]
    for n in nodes:
        rows.add([(index, 1.0) for index in own[n]], 1, 1)
        rows.add([(i, float(unary[i][1])) for i in own[n]] + [(first_y + n, 1.0)], 0, size[n])
    rows.add([(index, float(k)) for index, (_, k) in enumerate(unary)], prefill, prefill)
    rows.add([(first_y + m, 1.0) for m in nodes], decode, decode)
    for index in range(len(unary)):
        start = first_g + index * len(size)
        rows.add([(start + m, 1.0) for m in nodes] + [(index, -float(decode))], 0, 0)
        for m in nodes:
            rows.add([(start + m, 1.0), (index, -float(min(size[m], decode)))], -np.inf, 0)
    for n in nodes:
        for m in nodes:
            terms = [(first_g + index * len(size) + m, 1.0) for index in own[n]]
            rows.add([*terms, (first_y + m, -1.0)], 0, 0)
    return rows


def change_pool(request: PlacementRequest, pool: Pool, **changes: object) -> PlacementRequest:
    """The request with other values for one pool."""
    pools = tuple(replace(item, **changes) if item.pool is pool else item for item in request.pools)
    return replace(request, pools=pools)


def used(plan: PlacementPlan) -> set[str]:
    """Nodes that got a worker."""
    return {node for nodes in plan.nodes.values() for node in nodes if node}
