"""How near nodes are: seconds per byte between any two, measured where known, guessed elsewhere.

Nodes that are alike in every respect that matters form one class, so that a rack of thousands is
handled as a few. Never assumes NVLink: two pods on one node talk over the host unless measured.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from phasesplit.api.names import HOSTNAME_LABEL
from phasesplit.planner.facts import LinkFacts, NodeFacts

# Guesses in bytes per second; only their order matters until something is measured.
SAME_NODE_BYTES_PER_S = 4e9
NEAREST_BYTES_PER_S = 3.125e9  # 25 GbE
LEVEL_FACTOR = 2.5  # each level further out
_ENOUGH_MEASURED = 3  # pairs of a level, before their median stands for the others

Key = tuple[str | None, ...]


class Topology:
    """Distances between classes of nodes."""

    def __init__(
        self,
        nodes: Sequence[NodeFacts],
        levels: Sequence[str],
        links: Sequence[LinkFacts],
        also_apart: Mapping[str, object] | None = None,
    ) -> None:
        """`also_apart` gives further values by node that keep nodes in different classes."""
        self._levels = [level for level in levels if level != HOSTNAME_LABEL]
        known = {node.name for node in nodes}
        self._measured = {
            (link.from_node, link.to_node): 1.0 / link.bytes_per_s
            for link in sorted(links, key=lambda link: -link.age_s)
            if link.bytes_per_s > 0 and link.from_node in known and link.to_node in known
        }
        keys = {node.name: self._key(node) for node in nodes}
        self._guesses = self._calibrated(keys)
        single = {name for pair in self._measured for name in pair}
        apart = also_apart or {}
        ids: dict[object, int] = {}
        self._representatives: list[str] = []
        self.class_of: dict[str, int] = {}
        for node in nodes:
            name = node.name
            identity = (keys[name], apart.get(name), name if name in single else None)
            if identity not in ids:
                ids[identity] = len(ids)
                self._representatives.append(name)
            self.class_of[name] = ids[identity]
        self._keys = keys
        self._rows: dict[int, list[float]] = {}
        self._columns: dict[int, list[float]] = {}
        self._sharing: list[dict[str | None, list[int]]] = [{} for _ in self._levels]
        self._measured_from: dict[int, list[tuple[int, float]]] = {}
        self._measured_to: dict[int, list[tuple[int, float]]] = {}
        self._index_classes()

    @property
    def num_classes(self) -> int:
        """How many kinds of places there are."""
        return len(self._representatives)

    def group_keys(self) -> Mapping[str, Key]:
        """Values of the levels by node, nearest first."""
        return self._keys

    def seconds_per_byte(self, from_node: str, to_node: str) -> float:
        """Inverse bandwidth between two nodes."""
        measured = self._measured.get((from_node, to_node))
        if measured is not None:
            return measured
        if from_node == to_node:
            return self._guesses[0]
        return self._guesses[1 + self._distance(self._keys[from_node], self._keys[to_node])]

    def fastest_measured(self) -> list[tuple[str, str]]:
        """Measured pairs, fastest first."""
        return sorted(self._measured, key=lambda pair: (self._measured[pair], pair))

    def row(self, from_class: int) -> list[float]:
        """Seconds per byte from a class to every class, for different nodes."""
        if from_class not in self._rows:
            row = self._guessed_row(from_class)
            for to_class, value in self._measured_from.get(from_class, ()):
                row[to_class] = value
            self._rows[from_class] = row
        return self._rows[from_class]

    def column(self, to_class: int) -> list[float]:
        """Seconds per byte from every class to a class, for different nodes."""
        if to_class not in self._columns:
            column = self._guessed_row(to_class)
            for from_class, value in self._measured_to.get(to_class, ()):
                column[from_class] = value
            self._columns[to_class] = column
        return self._columns[to_class]

    def _guessed_row(self, kind: int) -> list[float]:
        """By distance alone, the same in both directions: the nearest level that is shared counts."""
        key = self._keys[self._representatives[kind]]
        row = [self._guesses[-1]] * self.num_classes
        for index in reversed(range(len(key))):
            for other in self._sharing[index].get(key[index], ()):
                row[other] = self._guesses[1 + index]
        return row

    def _index_classes(self) -> None:
        """Classes by what they share at each level, and measured links between classes of one node."""
        for kind, name in enumerate(self._representatives):
            for index, place in enumerate(self._keys[name]):
                if place is not None:
                    self._sharing[index].setdefault(place, []).append(kind)
        for (one, other), value in self._measured.items():
            from_class, to_class = self.class_of[one], self.class_of[other]
            if from_class != to_class:
                self._measured_from.setdefault(from_class, []).append((to_class, value))
                self._measured_to.setdefault(to_class, []).append((from_class, value))

    def _key(self, node: NodeFacts) -> Key:
        return tuple(node.labels.get(level) for level in self._levels)

    def _distance(self, one: Key, other: Key) -> int:
        """Index of the nearest level that two nodes share; the number of levels if none."""
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            if left is not None and left == right:
                return index
        return len(one)

    def _calibrated(self, keys: Mapping[str, Key]) -> list[float]:
        """Seconds per byte on one node and by distance; the median of what was measured, if enough was."""
        guesses = [1.0 / SAME_NODE_BYTES_PER_S]
        guesses += [LEVEL_FACTOR**index / NEAREST_BYTES_PER_S for index in range(len(self._levels) + 1)]
        seen: dict[int, list[float]] = {}
        for (one, other), value in self._measured.items():
            distance = -1 if one == other else self._distance(keys[one], keys[other])
            seen.setdefault(distance, []).append(value)
        for distance, values in seen.items():
            if len(values) >= _ENOUGH_MEASURED:
                guesses[1 + distance] = median(values)
        return guesses
