"""The stage `compare`: two sets of answers to the same rows."""

from __future__ import annotations

from typing import Any


def compare_answer_sets(
    a: str,
    b: str,
    set_name: str = "eval",
    variant: str | None = None,
    metric: str | None = None,
    recipe_name: str | None = None,
) -> dict[str, Any]:
    """Whether B is better than A by the gold answers.

    Args:
        a, b: run directories, RUN:VARIANT, files of scored predictions, or a baseline of the other side's run.
        variant: of run directories that are named without one.
        metric: that decides; the recipe's primary metric by default.
        recipe_name: for files that do not name theirs.

    Returns:
        What `surefit compare --json` prints but for the judge, and in `matched` the pairs of lines.

    Raises:
        DataError: a side names nothing, or has no scores on the set.
    """
    from surefit import recipes
    from surefit.evaluate.compare import compare_answers, judging_recipe, read_pair

    before, after = read_pair(a, b, set_name, variant)
    recipe = recipes.get_recipe(judging_recipe(before, after, recipe_name))
    return compare_answers(before, after, recipe, metric)
