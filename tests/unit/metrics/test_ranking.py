"""Ranking metrics: all shared cases, and what they cannot be."""

import json
from pathlib import Path

import pytest

from surefit.metrics.ranking import mean_ranking, ranking_scores

CASES = Path(__file__).parents[3] / "../shared/data/recommendation/scorer/ranking_metric_cases.jsonl"


@pytest.mark.skipif(not CASES.exists(), reason="the shared data are not here")
def test_every_shared_case():
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    assert len(cases) >= 36
    for case in cases:
        scores = ranking_scores(case["rank_of_target"])
        for name, value in scores.items():
            kind, _, k = name.partition("@")
            expected = case[f"{'Recall' if kind == 'recall' else kind.upper()}@{k}"]
            assert round(value, 5) == pytest.approx(expected, abs=1e-5), (case["rank_of_target"], name)


def test_outside_and_below_one():
    assert set(ranking_scores(None).values()) == {0.0}
    with pytest.raises(ValueError, match="ranks begin at 1"):
        ranking_scores(0)


def test_the_mean_counts_who_was_not_found():
    assert mean_ranking([1, None, 3, 40])["recall@5"] == 0.5
    assert mean_ranking([2, None])["mrr@10"] == 0.25
