"""The exact search against brute force and by hand, and what the reader takes and refuses."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest
from graphs import random_pair

from surefit.metrics.alignment import best_alignment
from surefit.metrics.assignment import best_assignment
from surefit.metrics.smatch import MOST_NODES, align, count_matches, f_score, read_graph


def _brute(first: str, second: str) -> int:
    test, gold = read_graph(first), read_graph(second)
    width = max(len(test.concepts), len(gold.concepts))

    def worth(places: tuple[int, ...]) -> int:
        return sum(
            len(mine & theirs)
            for mine, theirs in (
                (
                    {(concept, places[n]) for n, concept in enumerate(test.concepts)},
                    {(concept, n) for n, concept in enumerate(gold.concepts)},
                ),
                ({(name, places[n], value) for name, n, value in test.attributes}, set(gold.attributes)),
                ({(name, places[a], places[b]) for name, a, b in test.edges}, set(gold.edges)),
            )
        )

    return max(worth(places) for places in permutations(range(width)))


def test_the_optimum_is_that_of_trying_every_pairing():
    rng = Random(3)
    for _ in range(120):
        first, second = random_pair(rng, 5)
        found = count_matches(read_graph(first), read_graph(second))
        assert found.proven
        assert found.match == _brute(first, second), (first, second)


def test_the_alignment_is_worth_what_it_says():
    rng = Random(4)
    for _ in range(60):
        first, second = (read_graph(text) for text in random_pair(rng, 12))
        found = align(first, second)
        pairs = found.pairs
        assert len(set(pairs.values())) == len(pairs)
        moved = {(name, pairs.get(a, -1), pairs.get(b, -1)) for name, a, b in first.edges}
        worth = len(moved & set(second.edges))
        worth += len({(name, pairs.get(n, -1), value) for name, n, value in first.attributes} & set(second.attributes))
        worth += sum(first.concepts[n] == second.concepts[other] for n, other in pairs.items())
        assert worth == found.worth


def test_order_does_not_matter_and_a_graph_is_itself():
    rng = Random(5)
    for _ in range(40):
        first, second = (read_graph(text) for text in random_pair(rng, 16))
        assert count_matches(first, second).match == count_matches(second, first).match
        assert count_matches(first, first)[:3] == (len(first),) * 3


def test_without_a_budget_the_bounds_are_still_right():
    rng = Random(6)
    for _ in range(40):
        first, second = (read_graph(text) for text in random_pair(rng, 12))
        optimum, quick = count_matches(first, second).match, count_matches(first, second, budget=0)
        assert quick.match <= optimum <= quick.bound


def test_graphs_of_one_concept_end_within_the_budget():
    many = read_graph("(a / x " + " ".join(f":ARG0 (x{n} / x :ARG1 (y{n} / x))" for n in range(40)) + ")")
    some = read_graph("(a / x " + " ".join(f":ARG0 (x{n} / x :ARG1 (y{n} / x :ARG0 a))" for n in range(9)) + ")")
    found = count_matches(many, some, budget=20_000)
    assert found.match <= found.bound
    assert found.match >= 1 + len(some.concepts) + 18  # the top, every concept and every edge but those back


def test_a_triple_agrees_with_one_other():
    twice = read_graph("(a / b :quant 3 :quant 3 :ARG0 a)")
    assert count_matches(twice, twice)[:3] == (5, 5, 5)
    assert count_matches(twice, read_graph("(a / b :quant 3 :ARG0 a)"))[:3] == (4, 5, 4)


def test_f_score_of_nothing_is_zero():
    assert f_score(0, 0, 4) == (0, 0, 0)
    assert f_score(0, 4, 4) == (0, 0, 0)


@pytest.mark.parametrize(
    "text",
    ["", "()", "no graph", "(a / b", "a / b)", "(a b)", "(a / b :ARG0 (a / c))", "(a / b :ARG0)", "(a / b))", "(a"],
)
def test_what_smatch_refuses(text, capfd):
    assert read_graph(text) is None
    assert capfd.readouterr() == ("", ""), "nothing is written"


def test_a_graph_too_large_is_refused():
    assert read_graph("(a / b" + " :x (c / d" * MOST_NODES + ")" * MOST_NODES + ")") is None
    assert read_graph("(a / " + "b" * 100_000 + ")") is None


def test_what_the_reader_makes_of_triples():
    graph = read_graph('(b / Bi kịch\n  :domain(c / CHÓ :mod (đ / đỏ) :wiki "Chó" :ARG0-of b)\n :consist-of c)')
    assert graph.concepts == ("bikịch", "chó", "đỏ")
    assert set(graph.attributes) == {("wiki", 1, "chó"), ("top", 0, "top")}
    assert set(graph.edges) == {("domain", 0, 1), ("domain", 2, 1), ("arg0", 0, 1), ("consist-of", 0, 1)}


def test_assignments_are_those_of_trying_all():
    rng = np.random.default_rng(0)
    for _ in range(80):
        rows, columns = rng.integers(1, 6, 2)
        gains = rng.integers(-3, 9, (rows, columns)).astype(float)
        gains[rng.random(gains.shape) < 0.3] = -np.inf
        found = best_assignment(gains)
        padded = np.hstack([gains, np.zeros((rows, rows))])
        best = max(sum(padded[n, c] for n, c in enumerate(p)) for p in permutations(range(columns + rows), int(rows)))
        assert found.value == pytest.approx(best)
        paired = np.flatnonzero(found.columns >= 0)
        assert gains[paired, found.columns[paired]].sum() == pytest.approx(best)
        assert (found.rows_dual[:, None] + found.columns_dual >= gains - 1e-9).all()


def test_no_pairs_at_all():
    assert best_alignment({}, {}).pairs == {}
    assert best_alignment({}, {}).proven
