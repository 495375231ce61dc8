"""Random PENMAN graphs, and random changes to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

CONCEPTS = [
    "boy",
    "girl",
    "want-01",
    "go-02",
    "person",
    "name",
    "and",
    "city",
    "see-01",
    "book",
    "thing",
    "cậu_bé",
    "ĐI",
]
ROLES = ["ARG0", "ARG1", "ARG2", "mod", "domain", "op1", "op2", "name", "ARG0-of", "ARG1-of", "consist-of", "agent"]
CONSTANTS = [("polarity", "-"), ("quant", "3"), ("wiki", '"Q1"'), ("wiki", "-"), ("mode", "imperative")]


@dataclass
class RandomGraph:
    """A tree of nodes with a few edges back, and constants; no triple twice."""

    parents: list[int]
    concepts: list[str]
    roles: list[str]
    again: dict[int, tuple[str, int]]
    constants: dict[int, tuple[str, str]]

    def text(self, node: int = 0) -> str:
        parts = [f"(v{node} / {self.concepts[node]}"]
        if node in self.constants:
            parts.append(":{} {}".format(*self.constants[node]))
        if node in self.again:
            parts.append(":{} v{}".format(*self.again[node]))
        children = [n for n, parent in enumerate(self.parents) if parent == node and n]
        return " ".join([*parts, *(f":{self.roles[n]} {self.text(n)}" for n in children)]) + ")"


def random_graph(rng: Random, most: int) -> RandomGraph:
    size = rng.randint(1, most)
    again = {n: (f"loop{rng.randrange(2)}", rng.randrange(size)) for n in range(size) if rng.random() < 0.15}
    return RandomGraph(
        [0, *(rng.randrange(max(0, n - 4), n) for n in range(1, size))],
        [rng.choice(CONCEPTS) for _ in range(size)],
        [rng.choice(ROLES) for _ in range(size)],
        {n: (role, other) for n, (role, other) in again.items() if other != n},
        {n: rng.choice(CONSTANTS) for n in range(size) if rng.random() < 0.2},
    )


def changed(rng: Random, graph: RandomGraph, share: float) -> RandomGraph:
    """The same graph with about `share` of its parts different."""
    size = len(graph.parents)
    return RandomGraph(
        [parent if not n or rng.random() > share else rng.randrange(n) for n, parent in enumerate(graph.parents)],
        [rng.choice(CONCEPTS) if rng.random() < share else concept for concept in graph.concepts],
        [rng.choice(ROLES) if rng.random() < share else role for role in graph.roles],
        {n: edge for n, edge in graph.again.items() if rng.random() > share},
        {n: rng.choice(CONSTANTS) for n in range(size) if rng.random() < share},
    )


def random_pair(rng: Random, most: int) -> tuple[str, str]:
    """Two graphs, in seven of ten cases one made from the other."""
    first = random_graph(rng, most)
    second = changed(rng, first, rng.choice((0.1, 0.3, 0.5))) if rng.random() < 0.7 else random_graph(rng, most)
    return first.text(), second.text()
