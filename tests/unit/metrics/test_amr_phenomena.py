"""The breakdown, with every count written by hand."""

from __future__ import annotations

from surefit.metrics.amr_phenomena import PHENOMENA, count_phenomena
from surefit.metrics.smatch import align, read_graph

GOLD = read_graph(
    '(w / want-01 :polarity - :ARG0 (p / person :wiki "Q1" :name (n / name :op1 "Anna")) :ARG1 (g / go-02 :ARG0 p))'
)


def counts(text: str) -> dict[str, tuple[int, int, int]]:
    graph = read_graph(text)
    return count_phenomena(graph, GOLD, align(graph, GOLD))


def test_gold_against_itself():
    found = count_phenomena(GOLD, GOLD, align(GOLD, GOLD))
    assert set(found) == set(PHENOMENA)
    assert all(a == b == c for a, b, c in found.values())
    assert found["concepts"] == (4, 4, 4)
    assert found["named_entities"] == (1, 1, 1)
    assert found["reentrancies"] == (5, 5, 5)  # two edges to the person, three nodes
    assert found["srl"] == (6, 6, 6)  # three edges, three nodes
    assert found["roles"] == (4, 4, 4)


def test_each_fault_shows_where_it_is():
    found = counts(
        '(w / want-02 :ARG0 (p / city :wiki - :name (n / name :op1 "Anna")) :ARG1 (g / go-02 :ARG0 (x / boy)))'
    )
    assert found["concepts"] == (2, 5, 4)
    assert found["named_entities"] == (0, 1, 1)
    assert found["wiki"] == (0, 1, 1)
    assert found["negation"] == (0, 0, 1)
    assert found["reentrancies"] == (0, 0, 5)
    assert found["roles"] == (3, 4, 4)
    assert found["no_senses"][0] == found["unlabelled"][0] + 1  # the sense was wrong, no label was


def test_an_answer_that_cannot_be_read_has_only_gold_counts():
    found = count_phenomena(None, GOLD, None)
    assert {(a, b) for a, b, _ in found.values()} == {(0, 0)}
    assert all(gold for _, _, gold in found.values())
