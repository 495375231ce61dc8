"""AMR scores per phenomenon (Damonte, Cohen & Satta 2017), as counts that can be summed.

Concepts, named entities, wiki and negation are compared as sets; for the others the whole graph or a part of it is
aligned anew. `roles` is ours: the edges that agree under the alignment behind the Smatch score, for any set of labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from surefit.metrics.alignment import Alignment
from surefit.metrics.smatch import Graph, count_matches

Counts = tuple[int, int, int]
"""Counts in common, in the prediction, in the gold graph."""
BUDGET = 20_000
_SENSE = re.compile(r"-\d+$")
_CORE = re.compile(r"arg\d")


def _concepts(graph: Graph) -> set[Any]:
    return set(graph.concepts)


def _named_entities(graph: Graph) -> set[Any]:
    return {graph.concepts[node] for name, node, _ in (*graph.edges, *graph.attributes) if name == "name"}


def _wiki(graph: Graph) -> set[Any]:
    return {value for name, _, value in graph.attributes if name == "wiki"}


def _negation(graph: Graph) -> set[Any]:
    return {graph.concepts[node] for name, node, _ in graph.attributes if name == "polarity"}


def _reentrancies(graph: Graph) -> Graph:
    """Return the nodes with several incoming edges, with these edges and their sources."""
    incoming = Counter(target for _, _, target in graph.edges)
    return _part(graph, [edge for edge in graph.edges if incoming[edge[2]] > 1])


def _srl(graph: Graph) -> Graph:
    """Return :ARG0 to :ARG9 with the nodes they join."""
    return _part(graph, [edge for edge in graph.edges if _CORE.match(edge[0])])


def _part(graph: Graph, edges: list[tuple[str, int, int]]) -> Graph:
    nodes = sorted({node for _, *ends in edges for node in ends})
    number = {node: n for n, node in enumerate(nodes)}
    kept_edges = tuple((name, number[source], number[target]) for name, source, target in edges)
    return Graph(tuple(graph.concepts[node] for node in nodes), (), kept_edges)


def _unlabelled(graph: Graph) -> Graph:
    attributes = tuple(("", node, value) for _, node, value in graph.attributes)
    return replace(graph, attributes=attributes, edges=tuple(("", *ends) for _, *ends in graph.edges))  # type: ignore[misc]


def _no_senses(graph: Graph) -> Graph:
    return replace(graph, concepts=tuple(_SENSE.sub("", concept) for concept in graph.concepts))


_SETS: dict[str, Callable[[Graph], set[Any]]] = {
    "concepts": _concepts,
    "named_entities": _named_entities,
    "wiki": _wiki,
    "negation": _negation,
}
_GRAPHS: dict[str, Callable[[Graph], Graph]] = {
    "reentrancies": _reentrancies,
    "srl": _srl,
    "unlabelled": _unlabelled,
    "no_senses": _no_senses,
}
PHENOMENA = (*_SETS, *_GRAPHS, "roles")


def count_phenomena(test: Graph | None, gold: Graph, alignment: Alignment | None) -> dict[str, Counts]:
    """Return phenomenon → counts; an unreadable prediction (None) has only the gold graph's."""
    empty = Graph((), (), ())
    counts: dict[str, Counts] = {}
    for name, extract in _SETS.items():
        predicted_set, gold_set = extract(test or empty), extract(gold)
        counts[name] = len(predicted_set & gold_set), len(predicted_set), len(gold_set)
    for name, part in _GRAPHS.items():
        predicted_part, gold_part = part(test or empty), part(gold)
        counts[name] = count_matches(predicted_part, gold_part, BUDGET)[:3] if test else (0, 0, len(gold_part))
    counts["roles"] = _agreeing_edges(test or empty, gold, alignment.pairs if alignment else {})
    return counts


def _agreeing_edges(test: Graph, gold: Graph, pairs: dict[int, int]) -> Counts:
    mapped = Counter((name, pairs.get(source, -1), pairs.get(target, -1)) for name, source, target in test.edges)
    return (mapped & Counter(gold.edges)).total(), len(test.edges), len(gold.edges)
