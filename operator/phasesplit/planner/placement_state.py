"""A partial placement with incremental costs: who is where, what room is left, what one more would cost.

The cost is the sum over pairs (prefill pod, decode pod) of seconds per byte. One more pod of a pool on
a node costs the node's potential, which is kept per class of nodes and updated with every change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, sub

from phasesplit.api.names import Pool
from phasesplit.planner.facts import Resources
from phasesplit.planner.placement_types import SpreadConstraint
from phasesplit.planner.topology import Topology

Vector = list[int]
OTHER = {Pool.PREFILL: Pool.DECODE, Pool.DECODE: Pool.PREFILL}
_UNLIMITED = 1 << 60
_POOLS = tuple(Pool)  # iterating over an enum is slow in the inner loop


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes, room and rules, independent of any placement. Room is shared by both pools."""

    topology: Topology
    nodes: tuple[str, ...]  # eligible for some pool, in a fixed order
    room: Mapping[str, Vector]
    requests: Mapping[Pool, Vector]
    eligible: Mapping[Pool, frozenset[str]]
    spread: Mapping[Pool, tuple[SpreadConstraint, ...]]
    labels: Mapping[str, Mapping[str, str]]
    resource_names: tuple[str, ...]  # what the vectors' entries are
    # Nodes with room for at least one pod, by class, roomiest last.
    by_class: Mapping[Pool, Mapping[int, tuple[str, ...]]]
    penalty: Mapping[Pool, Mapping[str, float]]  # soft dislike of a node, in seconds per byte


def to_vector(amount: Resources, gpu_names: Sequence[str]) -> Vector:
    """Amounts in a fixed order."""
    return [
        amount.cpu_millis,
        amount.memory_bytes,
        amount.pods,
        *(amount.gpus.get(name, 0) for name in gpu_names),
    ]


def how_many_fit(request: Vector, room: Vector) -> int:
    """Pods of that request that the room holds."""
    return _how_many_fit(tuple(request), tuple(room))


@lru_cache(maxsize=4096)  # thousands of nodes have the same few amounts of room
def _how_many_fit(request: tuple[int, ...], room: tuple[int, ...]) -> int:
    return min(
        (have // need for need, have in zip(request, room, strict=True) if need > 0), default=_UNLIMITED
    )


def group_by_class(
    topology: Topology, eligible: Iterable[str], request: Vector, room: Mapping[str, Vector]
) -> dict[int, tuple[str, ...]]:
    """Nodes with room for at least one pod of the request, by class, roomiest last."""
    size = {node: how_many_fit(request, room[node]) for node in eligible}
    found: dict[int, list[str]] = {}
    for node in sorted((name for name in size if size[name] > 0), key=lambda name: (size[name], name)):
        found.setdefault(topology.class_of[node], []).append(node)
    return {kind: tuple(nodes) for kind, nodes in found.items()}


class Placement:
    """Counts of pods per pool and node, mutable while searching."""

    def __init__(self, problem: Problem, fixed: Iterable[tuple[Pool, str]] = ()) -> None:
        """`fixed` pods exist already: they use no further room and are never moved."""
        self.problem = problem
        self.counts: dict[Pool, dict[str, int]] = {pool: {} for pool in Pool}
        self.movable: dict[Pool, dict[str, int]] = {pool: {} for pool in Pool}
        self.room: dict[str, Vector] = {}
        self.totals = dict.fromkeys(Pool, 0)
        self.cost = 0.0
        classes = problem.topology.num_classes
        self._potential = {pool: [0.0] * classes for pool in Pool}
        self._needs = {
            pool: [(index, amount) for index, amount in enumerate(problem.requests[pool]) if amount > 0]
            for pool in Pool
        }
        # Nodes with room for one more, counted by class; the classes that have any; and those of the nodes
        # that hold the other pool.
        self._num_open = {
            pool: {kind: len(nodes) for kind, nodes in problem.by_class[pool].items()} for pool in Pool
        }
        self._open = {pool: dict.fromkeys(problem.by_class[pool]) for pool in Pool}
        self._shared: dict[Pool, set[str]] = {pool: set() for pool in Pool}
        self._domains = self._empty_domains()
        for pool, node in fixed:
            self._change(pool, node, 1)

    def copy(self) -> "Placement":
        """An independent copy."""
        other = Placement.__new__(Placement)
        other.problem = self.problem
        other.counts = {pool: dict(found) for pool, found in self.counts.items()}
        other.movable = {pool: dict(found) for pool, found in self.movable.items()}
        other.room = {node: list(vector) for node, vector in self.room.items()}
        other.totals = dict(self.totals)
        other.cost = self.cost
        other._potential = {pool: list(values) for pool, values in self._potential.items()}
        other._needs = self._needs
        other._num_open = {pool: dict(found) for pool, found in self._num_open.items()}
        other._open = {pool: dict(found) for pool, found in self._open.items()}
        other._shared = {pool: set(found) for pool, found in self._shared.items()}
        other._domains = {
            pool: {key: dict(found) for key, found in by_key.items()}
            for pool, by_key in self._domains.items()
        }
        return other

    def potential(self, pool: Pool, node: str) -> float:
        """What one more pod of the pool on the node would add to the cost, its penalty included."""
        topology = self.problem.topology
        kind = topology.class_of[node]
        value = self._potential[pool][kind] + self.problem.penalty[pool].get(node, 0.0)
        here = self.counts[OTHER[pool]].get(node, 0)
        if here:
            value += here * (topology.seconds_per_byte(node, node) - topology.row(kind)[kind])
        return value

    def potentials(self, pool: Pool, nodes: Sequence[str]) -> list[float]:
        """`potential` of many nodes; what they have in common is looked up once."""
        values, class_of = self._potential[pool], self.problem.topology.class_of
        others, penalty = self.counts[OTHER[pool]], self.problem.penalty[pool]
        return [
            self.potential(pool, node) if node in others or node in penalty else values[class_of[node]]
            for node in nodes
        ]

    def cheapest_class(self, pool: Pool) -> tuple[float, int] | None:
        """Of the classes with room for one more that with the least potential, the first of equals."""
        values = self._potential[pool]
        kind = min(self._open[pool], key=values.__getitem__, default=None)
        return None if kind is None else (values[kind], kind)

    def open_classes(self, pool: Pool) -> list[tuple[float, int]]:
        """Classes with room for one more, with their potentials; nodes shared with the other pool may
        be nearer than their class says.
        """
        values = self._potential[pool]
        return [(values[kind], kind) for kind in self._open[pool]]

    def shared_nodes(self, pool: Pool) -> set[str]:
        """Nodes that hold the other pool and have room for one more of this."""
        return self._shared[pool]

    def fits(self, pool: Pool, node: str) -> bool:
        """Room, rules and spread allow one more pod of the pool."""
        return self._has_room(pool, node) and (
            not self.problem.spread[pool] or self._keeps_spread(pool, node)
        )

    def would_hold(self, node: str, prefill: int, decode: int) -> bool:
        """Is there room for so many more of both, spread aside?"""
        room = self.room.get(node) or self.problem.room[node]
        requests = self.problem.requests
        return all(
            prefill * one + decode * other <= have
            for one, other, have in zip(requests[Pool.PREFILL], requests[Pool.DECODE], room, strict=True)
            if one > 0 or other > 0
        )

    def _has_room(self, pool: Pool, node: str) -> bool:
        if node not in self.problem.eligible[pool]:
            return False
        room = self.room.get(node) or self.problem.room[node]
        for index, amount in self._needs[pool]:  # noqa: SIM110 - all() of a generator takes twice as long here
            if amount > room[index]:
                return False
        return True

    def add(self, pool: Pool, node: str) -> None:
        """Place one movable pod."""
        self._take(pool, node, 1)
        self.movable[pool][node] = self.movable[pool].get(node, 0) + 1
        self._change(pool, node, 1)

    def remove(self, pool: Pool, node: str) -> None:
        """Take one movable pod away."""
        self._take(pool, node, -1)
        self.movable[pool][node] -= 1
        if not self.movable[pool][node]:
            del self.movable[pool][node]
        self._change(pool, node, -1)

    def used_nodes(self) -> list[str]:
        """Nodes with any pod, in a fixed order."""
        return sorted({*self.counts[Pool.PREFILL], *self.counts[Pool.DECODE]})

    def _take(self, pool: Pool, node: str, sign: int) -> None:
        had = [(which, self._has_room(which, node)) for which in _POOLS]
        room = self.room.get(node)
        if room is None:
            room = self.room[node] = list(self.problem.room[node])
        for index, amount in self._needs[pool]:
            room[index] -= sign * amount
        for which, before in had:
            after = self._has_room(which, node)
            if after is not before:
                self._count_open(which, self.problem.topology.class_of[node], 1 if after else -1)

    def _count_open(self, pool: Pool, kind: int, change: int) -> None:
        count = self._num_open[pool][kind] = self._num_open[pool].get(kind, 0) + change
        if count > 0:
            self._open[pool].setdefault(kind)
        else:
            self._open[pool].pop(kind, None)

    def _note_shared(self, node: str) -> None:
        for pool in _POOLS:
            if node in self.counts[OTHER[pool]] and self._has_room(pool, node):
                self._shared[pool].add(node)
            else:
                self._shared[pool].discard(node)

    def _change(self, pool: Pool, node: str, sign: int) -> None:
        topology = self.problem.topology
        if sign < 0:
            self.cost -= self._without_penalty(pool, node)
        else:
            self.cost += self._without_penalty(pool, node)
        found = self.counts[pool]
        found[node] = found.get(node, 0) + sign
        if not found[node]:
            del found[node]
        self.totals[pool] += sign
        self._note_shared(node)
        kind = topology.class_of[node]
        # A prefill pod changes what decode pods would cost, by the way from it to them; and conversely.
        costs = topology.row(kind) if pool is Pool.PREFILL else topology.column(kind)
        values = self._potential[OTHER[pool]]
        self._potential[OTHER[pool]] = list(map(add if sign > 0 else sub, values, costs))
        for key, domains in self._domains[pool].items():
            value = self.problem.labels[node].get(key)
            if value is not None:
                domains[value] = domains.get(value, 0) + sign

    def _without_penalty(self, pool: Pool, node: str) -> float:
        return self.potential(pool, node) - self.problem.penalty[pool].get(node, 0.0)

    def _empty_domains(self) -> dict[Pool, dict[str, dict[str, int]]]:
        """Pods per value of each spread constraint's label; values without a pod count as zero."""
        return {
            pool: {
                constraint.topology_key: {
                    value: 0
                    for node in self.problem.eligible[pool]
                    if (value := self.problem.labels[node].get(constraint.topology_key)) is not None
                }
                for constraint in self.problem.spread[pool]
                if constraint.hard
            }
            for pool in Pool
        }

    def _keeps_spread(self, pool: Pool, node: str) -> bool:
        for constraint in self.problem.spread[pool]:
            if not constraint.hard:
                continue
            value = self.problem.labels[node].get(constraint.topology_key)
            domains = self._domains[pool][constraint.topology_key]
            if value is None or value not in domains:
                return False
            if domains[value] + 1 - min(domains.values()) > constraint.max_skew:
                return False
        return True
