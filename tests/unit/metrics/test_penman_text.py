"""Repairs, what counts as well formed, and ways to write concepts."""

from __future__ import annotations

import logging
from random import Random

import pytest
from graphs import random_graph

from surefit.metrics.penman_text import KINDS, is_well_formed, one_line, repair_graph, tokenize_penman, with_concepts
from surefit.metrics.penman_tree import concept_skeleton, without_coreference, without_role
from surefit.metrics.smatch import count_matches, read_graph

GOOD = '(m / muốn :polarity - :pivot (đ / đứa_trẻ :name (t / tên :op1 "Hà Nội")) :theme (a / ăn :pivot đ :quant 3.5))'


@pytest.mark.parametrize(
    ("text", "repaired", "kinds"),
    [
        ("(a / b :x (c / d", "(a / b :x (c / d))", {"parentheses"}),
        ("(a / b))", "(a / b)", {"parentheses"}),
        ("(b / bé :domain(c / chó))", "(b / bé :domain (c / chó))", {"spacing"}),
        ("(a / b:x(c / d))", "(a / b :x (c / d))", {"spacing"}),
        ("(c / chủ tịch)", "(c / chủtịch)", {"words"}),
        ("(a / b :op1 Hà Nội)", '(a / b :op1 "Hà Nội")', {"quotes"}),
        ('(a / b :op1 "Hà)', '(a / b :op1 "Hà")', {"quotes"}),
        ('(a / b :op1 "Hà :op2 (c / d))', '(a / b :op1 "Hà" :op2 (c / d))', {"quotes"}),
        ("(a / b :x (a / c) :y a)", "(a / b :x (a2 / c) :y a)", {"variables"}),
        ("(a / b :x (a2 / c) :y (a / d))", "(a / b :x (a2 / c) :y (a3 / d))", {"variables"}),
        ("(a / b :x (/ c))", "(a / b :x (x2 / c))", {"variables"}),
        ("(a / b :x", "(a / b)", {"parentheses", "dangling"}),
        ("(a / b :x (c /", "(a / b)", {"parentheses", "dangling"}),
        ("```\n(a / b)\n```", "(a / b)", {"around"}),
        ("(a / b) (c / d)", "(a / b)", {"around"}),
    ],
)
def test_each_repair(text, repaired, kinds):
    found = repair_graph(text)
    assert found.text == repaired
    assert set(found.kinds) == kinds
    assert kinds <= KINDS.keys()
    assert is_well_formed(found.text)
    assert read_graph(found.text) is not None


@pytest.mark.parametrize(
    "text", ["", "no graph", "()", "(a", "(boy)", "(a b)", "(a / b (c / d))", "(a / b/c)", "(a b / c)"]
)
def test_what_would_take_a_guess_stays_broken(text):
    assert repair_graph(text) is None
    assert not is_well_formed(text)


def test_a_sound_graph_needs_no_repair():
    assert is_well_formed(GOOD)
    assert repair_graph(GOOD) == (GOOD, ())


def test_a_repair_is_sound_and_a_second_one_changes_nothing():
    rng = Random(1)
    for _ in range(300):
        text = random_graph(rng, 12).text()
        broken = text[: rng.randrange(1, len(text) + 1)]
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(broken) + 1)
            broken = (
                broken[:place] + rng.choice(['"', "(", ")", ":", "/", " ", "x"]) + broken[place + rng.randrange(2) :]
            )
        found = repair_graph(broken)
        if found is not None:
            assert is_well_formed(found.text), broken
            assert repair_graph(found.text) == (found.text, ()), broken


def test_deep_nesting_is_refused_and_no_crash():
    deep = "(a / b :x " * 5000
    assert repair_graph(deep + ")" * 5000) is None
    assert not is_well_formed(deep + "(c / d)" + ")" * 5000)


def test_gaps_are_no_messages(caplog, capfd):
    with caplog.at_level(logging.INFO):
        assert not is_well_formed("(a / b :x)")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_one_line_keeps_every_token():
    laid_out = '(b / bi kịch\n\t:domain(c / chó)\n    :name (n / tên :op1 "Hà  Nội"))'
    assert one_line(laid_out) == '(b / bi kịch :domain (c / chó) :name (n / tên :op1 "Hà  Nội"))'
    assert tokenize_penman(one_line(laid_out)) == tokenize_penman(laid_out)


def test_concepts_in_three_ways_and_what_smatch_thinks():
    underscored = "(c / chủ_tịch :domain (n / người :mod (g / bi_kịch)))"
    spaced = with_concepts(underscored, " ")
    assert spaced == "(c / chủ tịch :domain (n / người :mod (g / bi kịch)))"
    assert with_concepts(spaced, "_") == underscored
    assert with_concepts(spaced, "") == "(c / chủtịch :domain (n / người :mod (g / bikịch)))"
    assert read_graph(spaced) == read_graph(with_concepts(spaced, ""))
    assert count_matches(read_graph(underscored), read_graph(spaced))[:3] == (4, 6, 6)


def test_the_skeleton_has_no_variables():
    text = concept_skeleton(GOOD)
    assert text == (
        '(muốn :polarity - :pivot (đứa_trẻ :name (tên :op1 "Hà Nội")) :theme (ăn :pivot (đứa_trẻ) :quant 3.5))'
    )


def test_without_coreference_every_node_is_a_node_of_its_own():
    graph = read_graph(without_coreference("(a / b :x (c / d :y a) :z c)"))
    assert sorted(graph.concepts) == ["b", "b", "d", "d"]
    assert len(graph.edges) == 3


def test_a_role_and_all_below_it_is_left_out():
    text = '(a / b :wiki "Q1" :x (c / d :wiki - :y (e / f :wiki (g / h :z i))))'
    assert without_role(text, ":wiki") == "(a / b :x (c / d :y (e / f)))"
