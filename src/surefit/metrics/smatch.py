"""Smatch (Cai & Knight 2013): how many triples of two graphs agree, exactly where the official tool climbs hills.

The triples are those of smatch 1.0.4, because its reader makes them: one instance per node, attributes, relations with
"-of" turned round (consist-of apart), mod as domain turned round, and one TOP attribute for the root. Names and values
are compared in lower case and without quotation marks, and a graph that its reader refuses is refused here.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from surefit.metrics.alignment import BUDGET, Alignment, Pair, best_alignment

LONGEST = 100_000
"""Characters of a graph that is read; the longest of the AMR bank has fewer than 10,000."""
MOST_NODES = 500
"""Nodes of a graph that is read; a model that repeats itself writes more."""
Triple = tuple[str, int, str]
Edge = tuple[str, int, int]


@dataclass(frozen=True)
class Graph:
    """The triples of a graph, ready to compare: lower case, no quotation marks.

    Attributes:
        concepts: of each node.
        attributes: (name, node, constant), the root's ("top", node, "top") among them.
        edges: (name, from node, to node).
    """

    concepts: tuple[str, ...]
    attributes: tuple[Triple, ...]
    edges: tuple[Edge, ...]

    def __len__(self) -> int:
        """The number of triples."""
        return len(self.concepts) + len(self.attributes) + len(self.edges)

    @cached_property
    def attributes_of(self) -> dict[int, Counter[tuple[str, str]]]:
        """Node → (name, constant) with how often it has it; an edge to itself is such an attribute too."""
        found: dict[int, Counter[tuple[str, str]]] = {}
        for name, node, value in self.attributes:
            found.setdefault(node, Counter())[name, value] += 1
        for name, node, other in self.edges:
            if node == other:
                found.setdefault(node, Counter())[name, ""] += 1
        return found

    @cached_property
    def edges_named(self) -> dict[str, Counter[Pair]]:
        """Name → the edges of that name between two nodes, with how often each is there."""
        found: dict[str, Counter[Pair]] = {}
        for name, node, other in self.edges:
            if node != other:
                found.setdefault(name, Counter())[node, other] += 1
        return found


class SmatchCounts(NamedTuple):
    """Triples in common, of the prediction and of the gold graph.

    Attributes:
        bound: no pairing of nodes matches more; where that is not `match` itself, `match` is only a lower bound.
    """

    match: int
    test: int
    gold: int
    bound: int

    @property
    def proven(self) -> bool:
        """Whether no pairing of nodes matches more."""
        return self.match == self.bound


@lru_cache(maxsize=4096)
def read_graph(text: str) -> Graph | None:
    """The graph as smatch reads it from a file, or None where its reader fails.

    That reader is lenient in its own way: it glues words ("(a / b c)" has the concept "bc"), takes a second graph for a
    part of the first, does not miss a last quotation mark or the parentheses after the last node, and keeps of a text
    with spaces the first word. Lines are joined as it joins them.

    >>> read_graph('(w / want-01 :ARG0 (b / boy) :polarity -)').concepts
    ('want-01', 'boy')
    >>> read_graph('(w / want-01 :ARG0 (b / boy') is None
    True
    """
    if len(text) > LONGEST:
        return None
    line = "".join(part for part in map(str.strip, text.splitlines()) if not part.startswith("#"))
    import amr  # smatch's own module; not before it is needed, because it is loaded for no other task

    try:
        with _quiet(amr):
            read = amr.AMR.parse_AMR_line(line)
        if read is None or len(read.nodes) > MOST_NODES:
            return None
        return _graph(read)
    except (AttributeError, IndexError, KeyError, TypeError):  # what its reader dies of
        return None


@contextlib.contextmanager
def _quiet(module: object) -> Iterator[None]:
    """Its reader writes to standard error what is wrong, once per graph."""
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
        tuple((_plain(name), names[node], names[other]) for name, node, other in edges),
    )


def _plain(item: str) -> str:
    """As smatch compares: its reader writes "_" for a closing quotation mark."""
    return item.lower().rstrip("_")


def align(test: Graph, gold: Graph, budget: int = BUDGET) -> Alignment:
    """Which node of `test` is which of `gold`, so that most triples agree. A triple agrees with one other at most."""
    single: Counter[Pair] = Counter()
    places: dict[str, list[int]] = {}
    for node, concept in enumerate(gold.concepts):
        places.setdefault(concept, []).append(node)
    for node, concept in enumerate(test.concepts):
        for other in places.get(concept, ()):
            single[node, other] += 1
    for node, mine in test.attributes_of.items():
        for other, theirs in gold.attributes_of.items():
            common = (mine & theirs).total()
            if common:
                single[node, other] += common
    double: Counter[tuple[Pair, Pair]] = Counter()
    for name, mine_named in test.edges_named.items():
        for (source, target), count in mine_named.items():
            for (other_source, other_target), other_count in gold.edges_named.get(name, Counter()).items():
                pairs = sorted([(source, other_source), (target, other_target)])
                double[pairs[0], pairs[1]] += min(count, other_count)
    return best_alignment(single, double, budget)


def count_matches(test: Graph, gold: Graph, budget: int = BUDGET) -> SmatchCounts:
    """The triples in common under the best pairing of nodes.

    >>> count_matches(read_graph("(a / alpha :ARG0 (b / beta))"), read_graph("(b / beta :ARG0-of (a / alpha))"))
    SmatchCounts(match=3, test=4, gold=4, bound=3)
    """
    found = align(test, gold, budget)
    return SmatchCounts(found.worth, len(test), len(gold), found.bound)


def f_score(match: float, test: float, gold: float) -> tuple[float, float, float]:
    """Precision, recall and F1 of counts; 0 where there is nothing to divide by, as smatch has it.

    >>> f_score(3, 4, 6)
    (0.75, 0.5, 0.6)
    """
    if not test or not gold:
        return 0.0, 0.0, 0.0
    return match / test, match / gold, 2 * match / (test + gold)
