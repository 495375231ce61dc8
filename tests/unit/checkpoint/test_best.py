"""The best checkpoint and the end of improvement are decided by the log alone."""

import pytest

from surefit.checkpoint.best import EvalPoint, count_evals_since_best, eval_points, lower_is_better, rank_checkpoints

LINES = [
    {"step": 1, "loss": 2.0},
    {"step": 2, "eval_loss": 1.0, "exact_match": 0.1},
    {"step": 4, "eval_loss": None, "exact_match": 0.3},
    {"step": 6, "eval_loss": 0.9, "exact_match": 0.3},
]


def test_scores_are_the_held_out_lines_of_a_metric() -> None:
    assert eval_points(LINES, "eval_loss") == [EvalPoint(2, 1.0), EvalPoint(4, None), EvalPoint(6, 0.9)]
    assert eval_points(LINES, "rouge") == []


def test_losses_are_better_low_and_a_recipes_metrics_high() -> None:
    assert [score.step for score in rank_checkpoints(eval_points(LINES, "eval_loss"), "eval_loss")] == [6, 2]
    assert [score.step for score in rank_checkpoints(eval_points(LINES, "exact_match"), "exact_match")] == [4, 6, 2]
    assert lower_is_better("eval_perplexity")
    assert not lower_is_better("exact_match")


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0), ([1.0], 0), ([1.0, 1.0], 1), ([1.0, 0.5, 0.7, 0.6], 2), ([None, None], 2), ([1.0, None, 0.5], 0)],
)
def test_measurements_without_improvement(values: list[float | None], expected: int) -> None:
    found = [EvalPoint(step, value) for step, value in enumerate(values)]
    assert count_evals_since_best(found, "eval_loss") == expected
