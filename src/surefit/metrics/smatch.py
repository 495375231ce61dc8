"""Smatch (Cai & Knight 2013): the number of matching triples of two graphs, exact where the official tool hill-climbs.

The triples are the ones of smatch 1.0.4, as its reader makes them: one instance per node, attributes, relations with
"-of" inverted (except consist-of), mod inverted as domain, and one TOP attribute for the root. Names and values are
compared in lower case and without quotation marks, and a graph that its reader rejects is rejected.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from surefit.core.packaging import require_import
from surefit.metrics.alignment import BUDGET, Alignment, Pair, best_alignment

LONGEST = 100_000
"""Longest graph in characters that is read; the longest of the AMR bank has fewer than 10,000."""
MOST_NODES = 500
"""Largest number of nodes that is read; a model that repeats itself writes more."""
Triple = tuple[str, int, str]
Edge = tuple[str, int, int]


@dataclass(frozen=True)
class Graph:
    """The triples of a graph, ready to compare: lower case, no quotation marks.

    Attributes:
        concepts: concept of each node.
        attributes: (name, node, constant), including the root's ("top", node, "top").
        edges: (name, from node, to node).
    """

    concepts: tuple[str, ...]
    attributes: tuple[Triple, ...]
    edges: tuple[Edge, ...]

    def __len__(self) -> int:
        """Return the number of triples."""
        return len(self.concepts) + len(self.attributes) + len(self.edges)

    @cached_property
    def attributes_of(self) -> dict[int, Counter[tuple[str, str]]]:
        """Return node → (name, constant) with its count; an edge to the node itself is such an attribute too."""
        attributes: dict[int, Counter[tuple[str, str]]] = {}
        for name, node, value in self.attributes:
            attributes.setdefault(node, Counter())[name, value] += 1
        for name, node, target in self.edges:
            if node == target:
                attributes.setdefault(node, Counter())[name, ""] += 1
        return attributes

    @cached_property
    def edges_named(self) -> dict[str, Counter[Pair]]:
        """Return name → the edges of that name between two nodes, with their counts."""
        edges: dict[str, Counter[Pair]] = {}
        for name, node, target in self.edges:
            if node != target:
                edges.setdefault(name, Counter())[node, target] += 1
        return edges


class SmatchCounts(NamedTuple):
    """Triples in common, in the prediction and in the gold graph.

    Attributes:
        bound: upper bound over all pairings of nodes; where it exceeds `match`, `match` is only a lower bound.
    """

    match: int
    test: int
    gold: int
    bound: int

    @property
    def proven(self) -> bool:
        """Return whether no pairing of nodes matches more."""
        return self.match == self.bound


@lru_cache(maxsize=4096)
def read_graph(text: str) -> Graph | None:
    """Return the graph as smatch reads it from a file, or None where its reader fails.

    That reader is lenient in its own way: it glues words ("(a / b c)" has the concept "bc"), reads a second graph as a
    part of the first, accepts a missing last quotation mark or missing parentheses after the last node, and keeps the
    first word of a string with spaces. Lines are joined as it joins them.

    >>> read_graph('(w / want-01 :ARG0 (b / boy) :polarity -)').concepts
    ('want-01', 'boy')
    >>> read_graph('(w / want-01 :ARG0 (b / boy') is None
    True
    """
    if len(text) > LONGEST:
        return None
    line = "".join(part for part in map(str.strip, text.splitlines()) if not part.startswith("#"))
    require_import("amr")
    import amr  # smatch's own module, imported only when needed because no other task needs it

    try:
        with _quiet(amr):
            amr_graph = amr.AMR.parse_AMR_line(line)
        if amr_graph is None or len(amr_graph.nodes) > MOST_NODES:
            return None
        return _graph(amr_graph)
    except (AttributeError, IndexError, KeyError, TypeError):  # exceptions of smatch's reader
        return None


@contextlib.contextmanager
def _quiet(module: object) -> Iterator[None]:
    """Silence smatch's reader, which writes errors to standard error, once per graph."""
    log, module.ERROR_LOG = module.ERROR_LOG, io.StringIO()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.ERROR_LOG = log  # type: ignore[attr-defined]


def _graph(read: object) -> Graph:
    names = {name: n for n, name in enumerate(read.nodes)}  # type: ignore[attr-defined]
    instances, attributes, edges = read.get_triples()  # type: ignore[attr-defined]
    return Graph(
        tuple(_plain(concept) for _, _, concept in instances),
        tuple((_plain(name), names[node], _plain(value)) for name, node, value in attributes),
        tuple((_plain(name), names[node], names[target]) for name, node, target in edges),
    )


def _plain(item: str) -> str:
    """Normalize an item as smatch does, whose reader writes "_" for a closing quotation mark."""
    return item.lower().rstrip("_")


def align(test: Graph, gold: Graph, budget: int = BUDGET) -> Alignment:
    """Align the nodes of `test` with nodes of `gold` so that most triples match. A triple matches at most one other."""
    single: Counter[Pair] = Counter()
    gold_nodes: dict[str, list[int]] = {}
    for node, concept in enumerate(gold.concepts):
        gold_nodes.setdefault(concept, []).append(node)
    for node, concept in enumerate(test.concepts):
        for gold_node in gold_nodes.get(concept, ()):
            single[node, gold_node] += 1
    for node, test_attributes in test.attributes_of.items():
        for gold_node, gold_attributes in gold.attributes_of.items():
            common = (test_attributes & gold_attributes).total()
            if common:
                single[node, gold_node] += common
    double: Counter[tuple[Pair, Pair]] = Counter()
    for name, test_edges in test.edges_named.items():
        for (source, target), count in test_edges.items():
            for (other_source, other_target), other_count in gold.edges_named.get(name, Counter()).items():
                pairs = sorted([(source, other_source), (target, other_target)])
                double[pairs[0], pairs[1]] += min(count, other_count)
    return best_alignment(single, double, budget)


def count_matches(test: Graph, gold: Graph, budget: int = BUDGET) -> SmatchCounts:
    """Count the triples in common under the best pairing of nodes.

    >>> count_matches(read_graph("(a / alpha :ARG0 (b / beta))"), read_graph("(b / beta :ARG0-of (a / alpha))"))
    SmatchCounts(match=3, test=4, gold=4, bound=3)
    """
    alignment = align(test, gold, budget)
    return SmatchCounts(alignment.worth, len(test), len(gold), alignment.bound)


def f_score(match: float, test: float, gold: float) -> tuple[float, float, float]:
    """Return precision, recall and F1 of counts; 0 where the denominator is 0, as in smatch.

    >>> f_score(3, 4, 6)
    (0.75, 0.5, 0.6)
    """
    if not test or not gold:
        return 0.0, 0.0, 0.0
    return match / test, match / gold, 2 * match / (test + gold)
