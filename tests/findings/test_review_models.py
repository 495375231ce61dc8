"""Faults that a review of gates, merges, plans and serving found: each by its number, from the smallest input."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from surefit import recipes
from surefit.config.schema import GateSection
from surefit.evaluate.gate import judge
from surefit.evaluate.stats import (
    aggregate_intervals,
    paired_aggregates,
    paired_bootstrap,
    rows_to_rule_out,
)
from surefit.task import mean_scores

Rows = list[dict[str, float]]


def scored(*values: float) -> Rows:
    return [{"exact_match": float(value)} for value in values]


def verdict(base: Rows, tuned: Rows, **gate: Any) -> dict[str, Any]:
    return judge(GateSection(**gate), recipes.get("sft"), {"base": base, "merged": tuned}, None)


def binary(won: int, lost: int, tied: int) -> tuple[list[float], list[float]]:
    return [0.0] * won + [1.0] * (lost + tied), [1.0] * won + [0.0] * lost + [1.0] * tied


def graded(n: int) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(1)
    before = rng.random(n).round(2)
    return list(before), list((before + rng.normal(0, 0.2, n)).clip(0, 1).round(2))


@pytest.mark.parametrize(
    ("before", "after", "margin"),
    [
        pytest.param(*binary(0, 0, 20), 0.05, id="W3-twenty ties"),
        pytest.param(*binary(0, 0, 40), 0.05, id="W3-forty ties"),
        pytest.param(*binary(0, 0, 4), 0.01, id="W3-ties, another margin"),
        pytest.param(*binary(10, 12, 78), 0.05, id="W3-a little worse"),
        pytest.param(*binary(5, 5, 40), 0.05, id="W3-equal, with rows won and lost"),
        pytest.param(*binary(30, 32, 38), 0.1, id="W3-many differ"),
        pytest.param(*graded(40), 0.04, id="W3-scores between 0 and 1"),
        pytest.param([0.5] * 30, [0.49] * 30, 0.05, id="W3-all rows lose the same"),
    ],
)
def test_the_rows_that_a_gate_asks_for_are_enough(before: list[float], after: list[float], margin: float) -> None:
    needed = rows_to_rule_out(scored(*before), scored(*after), "exact_match", mean_scores, margin)
    assert needed is not None

    def low(n: float) -> float:
        """The interval of about n rows of which as many differ as of these."""
        times = ((np.arange(round(n)) + 0.5) * len(before) / round(n)).astype(int)
        return paired_bootstrap(np.array(before)[times], np.array(after)[times]).low

    assert low(1.15 * needed) >= -margin > low(0.85 * needed)
    said = verdict(scored(*before), scored(*after), not_worse_than="base", margin=margin)
    assert (said["outcome"], f" {needed:,} " in said["reason"]) == ("cannot tell", True)


@pytest.mark.parametrize("n", [20, 40], ids=["W3-20", "W3-40"])
def test_fewer_rows_do_not_ask_for_more(n: int) -> None:
    assert rows_to_rule_out(scored(*[1] * n), scored(*[1] * n), "exact_match", mean_scores, 0.05) == 54


@pytest.mark.parametrize(
    ("won", "lost", "tied"), [(2, 7, 91), (1, 5, 4), (0, 1, 19)], ids=["W3-5 points", "W3-40", "W3-one of 20"]
)
def test_no_number_of_rows_rules_out_what_these_rows_show(won: int, lost: int, tied: int) -> None:
    before, after = binary(won, lost, tied)
    assert rows_to_rule_out(scored(*before), scored(*after), "exact_match", mean_scores, 0.05) is None
    said = verdict(scored(*before), scored(*after), not_worse_than="base")
    assert (said["outcome"], "about" in said["reason"]) == ("cannot tell", False)


def share(rows: Sequence[Any]) -> dict[str, float]:
    return {"f": sum(row["m"] for row in rows) / sum(row["s"] for row in rows)}


def test_w3_corpus_scores() -> None:
    rng = np.random.default_rng(11)
    sizes = rng.integers(4, 13, 60).astype(float)
    old, new = (
        [{"m": float(m), "s": float(s)} for m, s in zip(sizes * (rng.random(60) < 0.8), sizes, strict=True)]
        for _ in range(2)
    )
    needed = rows_to_rule_out(old, new, "f", share, 0.05)
    assert needed is not None
    three, four = (paired_aggregates(old * times, new * times, share)["f"][1] for times in (3, 4))
    assert three < -0.05 <= four
    assert 3 * 60 < needed <= 4 * 60


@pytest.mark.parametrize(
    ("right", "n", "least", "outcome"),
    [
        pytest.param(7, 10, 0.8, "cannot tell", id="W26-0.7 of ten rows"),
        pytest.param(79, 100, 0.8, "cannot tell", id="W26-0.79 of a hundred"),
        pytest.param(70, 100, 0.8, "failed", id="W26-0.7 of a hundred"),
        pytest.param(81, 100, 0.8, "cannot tell", id="W26-0.81 of a hundred, as before"),
        pytest.param(90, 100, 0.8, "passed", id="W26-0.9 of a hundred"),
        pytest.param(0, 4, 0.8, "failed", id="W26-none of four"),
    ],
)
def test_a_score_below_min_fails_where_its_interval_does(right: int, n: int, least: float, outcome: str) -> None:
    rows = scored(*[1] * right, *[0] * (n - right))
    assert verdict(rows, rows, min=least)["outcome"] == outcome


def correlation(rows: Sequence[Any]) -> dict[str, float]:
    return {"r": statistics.correlation([row["x"] for row in rows], [row["y"] for row in rows])}


def mcc(rows: Sequence[Any]) -> dict[str, float]:
    """Matthews' correlation: 0 for any one row."""
    gold, said = (np.array([row[key] for row in rows]) for key in "xy")
    if len({*gold}) < 2 or len({*said}) < 2:
        return {"r": 0.0}
    return {"r": float(np.corrcoef(gold, said)[0, 1])}


def bleu(rows: Sequence[Any]) -> dict[str, float]:
    return {"bleu": statistics.fmean(row["b"] for row in rows)}


def test_w13_an_aggregate_that_needs_two_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.random(30)
    low, high = aggregate_intervals([{"x": a, "y": a + rng.random()} for a in x], correlation)["r"]
    assert -1 < low < high < 1


def test_w13_a_score_that_is_the_same_of_any_one_row_is_resampled() -> None:
    rng = np.random.default_rng(0)
    gold = rng.random(2000) < 0.5
    rows = [{"x": float(g), "y": float(g if rng.random() < 0.8 else not g)} for g in gold]
    (low, high), whole = aggregate_intervals(rows, mcc)["r"], mcc(rows)["r"]
    half = 1.96 * np.sqrt((1 - whole**2) / len(rows))
    assert (whole - low, high - whole) == pytest.approx((half, half), rel=0.15)


@pytest.mark.parametrize("wrong", [0, 1], ids=["W13-all right", "W13-all but one"])
def test_rows_that_are_alike_are_still_found(wrong: int) -> None:
    sizes = np.random.default_rng(4).integers(4, 13, 20).astype(float)
    rows = [{"m": s * (n >= wrong), "s": s} for n, s in enumerate(sizes)]
    low, high = aggregate_intervals(rows, share)["f"]
    assert low <= share(rows)["f"] - 0.16 * (1 - wrong / 10)
    assert high <= 1


@pytest.mark.parametrize(
    ("score", "bounds"),
    [
        pytest.param(50.0, (25.5, 74.5), id="W14-BLEU of 50"),
        pytest.param(0.8, (0.408, 0.898), id="W14-Smatch"),
        pytest.param(-0.5, (-0.745, 0.235), id="W14-a correlation"),
        pytest.param(150.0, (76.5, 223.5), id="W14-no known scale"),
    ],
)
def test_four_equal_rows_prove_little_on_any_scale(score: float, bounds: tuple[float, float]) -> None:
    assert aggregate_intervals([{"b": score}] * 4, bleu)["bleu"] == pytest.approx(bounds, abs=0.05)
