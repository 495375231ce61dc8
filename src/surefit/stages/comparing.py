"""The stage `compare`: two sets of answers to the same rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefit.evaluate.compare import AnswerComparison


def compare_answer_sets(
    a: str,
    b: str,
    set_name: str = "eval",
    variant: str | None = None,
    metric: str | None = None,
    recipe_name: str | None = None,
) -> AnswerComparison:
    """Compare two sets of answers by the gold answers: is B better than A?

    Args:
        a, b: run directories, RUN:VARIANT, files of scored predictions, or a baseline of the other side's run.
        variant: the variant of run directories that are named without one.
        metric: the metric that decides; the recipe's primary metric by default.
        recipe_name: the recipe of files that do not name theirs.

    Raises:
        DataError: a side does not exist, or has no scores on the set.
    """
    from surefit import recipes
    from surefit.evaluate.compare import compare_answers, judging_recipe, read_pair

    answers_a, answers_b = read_pair(a, b, set_name, variant)
    recipe = recipes.get_recipe(judging_recipe(answers_a, answers_b, recipe_name))
    return compare_answers(answers_a, answers_b, recipe, metric)
