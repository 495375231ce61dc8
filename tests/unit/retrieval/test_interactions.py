"""The 5-core against a slow one, ties, leave-one-out, the counting retrievers and their published figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.core.errors import DataError
from surefit.metrics.ranking import mean_ranking
from surefit.retrieval.interactions import Events, build_interactions
from surefit.retrieval.markov import CoOccurrence, Popularity
from surefit.retrieval.ranking import rank_items
from surefit.retrieval.retrievers import BASELINES
from surefit.retrieval.sources import read_events

SHARED = Path(__file__).parents[3] / "../shared/data/recommendation"


def events_of(triples, titles=None):
    users, items, times = zip(*triples, strict=True) if triples else ((), (), ())
    return Events("test", users, items, times, titles or {})


def slow_core(triples, core):
    while True:
        users, items = Counter(t[0] for t in triples), Counter(t[1] for t in triples)
        kept = [t for t in triples if users[t[0]] >= core and items[t[1]] >= core]
        if len(kept) == len(triples):
            return kept
        triples = kept


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=90))
def test_the_core_is_what_dropping_one_by_one_leaves(triples):
    expected = slow_core(triples, 3)
    if not expected:
        with pytest.raises(DataError, match="no user and no item"):
            build_interactions(events_of(triples), core=3)
        return
    made = build_interactions(events_of(triples), core=3)
    number = {item: n for n, item in enumerate(sorted({t[1] for t in expected}), start=1)}
    assert made.items == tuple(number)
    assert made.users == tuple(sorted({t[0] for t in expected}))
    for user, history in zip(made.users, made.histories, strict=True):
        mine = sorted((time, number[item]) for u, item, time in expected if u == user)
        assert history == tuple(n for _, n in mine)


def test_ties_go_by_the_items_number_and_the_last_two_are_kept_apart():
    triples = [(user, item, time) for user in "abc" for item, time in ((30, 1), (10, 5), (20, 5))]
    made = build_interactions(events_of(triples, {10: "ten", 20: "twenty", 30: "thirty"}), core=3)
    assert made.histories == ((3, 1, 2),) * 3
    assert made.titles == ("", "ten", "twenty", "thirty")
    assert made.trained == [(3,)] * 3
    assert made.questions("valid") == ([(3,)] * 3, [1] * 3)
    assert made.questions("test") == ([(3, 1)] * 3, [2] * 3)
    assert made.tied == 3


def test_the_published_numbering_is_that_of_a_set():
    keys = [70_000, 3, 8_193, 1, 900]
    triples = [(user, item, 0) for user in range(3) for item in keys]
    assert build_interactions(events_of(triples), core=3, numbering="published").items == tuple(set(keys))
    assert build_interactions(events_of(triples), core=3).items == tuple(sorted(keys))


def test_items_without_a_title_are_dropped_first():
    triples = [(user, item, item) for user in range(3) for item in (1, 2, 3, 4)]
    made = build_interactions(events_of(triples, {1: "a", 2: "b", 3: "c"}), core=3)
    assert (made.items, made.without_title) == ((1, 2, 3), 3)
    assert build_interactions(events_of([("u", 1, 0)] * 3), core=3).titles == ("", "1")


def test_a_core_too_small_for_three_parts_is_refused():
    with pytest.raises(DataError, match="a history needs three events"):
        build_interactions(events_of([(1, 1, 1)]), core=2)
    with pytest.raises(DataError, match="0 were read"):
        build_interactions(events_of([]))


def test_ranking_leaves_out_the_history_and_prefers_the_lower_number():
    class Fixed:
        def scores(self, histories):
            return np.array([[9, 1, 2, 2, 5, 2]] * len(histories), dtype=np.float32)

    ranking = rank_items(Fixed(), [(4,), ()], [3, 5], k=3)
    assert ranking.ranks.tolist() == [2, 4]
    assert ranking.top.tolist() == [[2, 3, 5], [4, 2, 3]]
    assert ranking.scores.tolist() == [[2, 2, 2], [5, 2, 2]]


def test_an_item_out_of_sight_may_come_again():
    trained = Popularity([(1, 1, 2)], 2)
    assert rank_items(trained, [(1, *[2] * 200)], [1]).ranks.tolist() == [1]
    assert rank_items(trained, [(2, *[1] * 200)], [1]).ranks.tolist() == [3], "taken lately: after all others"


def test_counting_by_hand():
    trained = [(1, 2, 3), (1, 3)]
    one = CoOccurrence(trained, 3, weights=(1.0,), recent=(1.0,)).scores([(2, 1), ()])
    assert one[0, 1:].round().tolist() == [0, 1, 1]
    assert one[1].argmax() == 1, "the popular ones where nothing is known"
    two = CoOccurrence(trained, 3, weights=(1.0, 0.5), recent=(1.0, 0.5)).scores([(1, 2)])
    assert two[0, 1:].tolist() == pytest.approx([0.0, 0.5, 1 + 0.5 * 1.5], abs=2e-3)


@pytest.fixture(scope="module")
def small():
    if not SHARED.exists():
        pytest.skip("the shared data are not here")
    return read_events(SHARED / "ml-latest-small")


@pytest.mark.parametrize("baseline", ["popularity", "markov"])
def test_baselines_are_the_published_figures(small, baseline):
    """In the numbering of LlamaRec's code, to the printed digit."""
    reference = json.loads((SHARED / "reference_numbers.json").read_text())["measured_here"]
    expected = reference['ml-latest-small (LlamaRec "ML-100k")']["baselines"][
        "markov1" if baseline == "markov" else baseline
    ]
    interactions = build_interactions(small, numbering="published")
    scores = scored(interactions, baseline)
    assert {name: round(scores[name.lower()], 4) for name in expected} == expected


def test_the_previous_item_in_the_order_of_keys(small):
    """The figures of SOURCE.md, which go by sorted numbers."""
    scores = scored(build_interactions(small), "markov")
    found = [round(scores[name], 4) for name in ("recall@10", "ndcg@10", "mrr@10", "recall@20")]
    assert found == [0.0869, 0.0514, 0.0405, 0.1115]


def scored(interactions, baseline):
    retriever = BASELINES[baseline](interactions)
    return mean_ranking(rank_items(retriever, *interactions.questions("test"), k=1).ranks.tolist())
