"""The area under the curve and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefit.metrics.auc import area_under_curve, auc_interval


def test_it_is_the_share_of_pairs_in_the_right_order() -> None:
    rng = np.random.default_rng(0)
    above, below = rng.integers(0, 9, 40).tolist(), rng.integers(0, 9, 30).tolist()
    wins = sum((a > b) + (a == b) / 2 for a in above for b in below)
    assert area_under_curve(above, below) == pytest.approx(wins / (len(above) * len(below)))
    assert math.isnan(area_under_curve([1.0, math.nan], [0.0]))
    assert math.isnan(area_under_curve([1.0], [math.inf]))


@pytest.mark.parametrize("auc", [0.0, 0.03, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("counts", [(3, 3), (8, 40), (200, 100)])
def test_an_interval_holds_its_value_and_is_the_mirror_of_the_other_order(auc: float, counts: tuple[int, int]) -> None:
    low, high = auc_interval(auc, *counts)
    assert 0 <= low <= auc <= high <= 1
    assert low < high
    mirrored = auc_interval(1 - auc, *counts)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_an_interval_covers_the_true_value_in_95_of_100_samples(shift: float) -> None:
    """Normal rewards, of which the desirable ones are `shift` deviations higher: the AUC is Φ(shift / √2)."""
    rng, true, draws = np.random.default_rng(1), 0.5 * (1 + math.erf(shift / 2)), 1500
    inside = 0
    for _ in range(draws):
        above, below = rng.normal(shift, 1, 20).tolist(), rng.normal(0, 1, 12).tolist()
        low, high = auc_interval(area_under_curve(above, below), 20, 12)
        inside += low <= true <= high
    assert 0.925 <= inside / draws <= 0.99
