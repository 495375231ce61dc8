"""What a recipe's own code raises, said as a problem of that recipe: its name, file and line, and the row at hand.

A recipe is somebody's code that SureFit calls in twenty places. Each of its functions is wrapped here, once, where
`recipes.get` hands the recipe out; the callers add the row's place (`core.errors.errors_at`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from surefit.core.errors import EXIT_BUG, RecipeError, SureFitError
from surefit.core.units import truncate_text
from surefit.task import Example, Prediction, TaskRecipe, mean_scores

RETURN_TYPES: dict[str, type] = {
    "to_example": Example, "to_gold": Example, "score": Mapping, "score_samples": Mapping, "aggregate": Mapping,
    "parse": object, "grammar": object, "choices": object, "score_many": object,
}  # fmt: skip
"""Function of a recipe → what it has to return."""


def wrap_recipe_errors(recipe: TaskRecipe, ours: bool) -> TaskRecipe:
    """The same recipe, whose functions raise `RecipeError` in place of whatever else escapes them.

    Args:
        ours: it comes with SureFit, so that a failure is a bug of SureFit and not the user's to fix.
    """
    changed: dict[str, Any] = {
        name: _wrap_errors(getattr(recipe, name), recipe.name, name, ours)
        for name in RETURN_TYPES
        # Who compares recipes asks whether their scores are averaged.
        if getattr(recipe, name) not in (None, mean_scores)
    }
    changed["baselines"] = {
        name: _wrap_errors(answer, recipe.name, f"baselines[{name!r}]", ours)
        for name, answer in recipe.baselines.items()
    }
    return replace(recipe, **changed)


def _wrap_errors(function: Callable[..., Any], recipe: str, name: str, ours: bool) -> Callable[..., Any]:
    wanted = RETURN_TYPES.get(name, Prediction)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            made = function(*arguments)
        except (SureFitError, MemoryError):
            raise
        except Exception as error:
            given = _first_failing_row(function, *arguments) if name == "score_many" else arguments
            raise _failure(recipe, name, error, given, ours) from error
        if not isinstance(made, wanted):
            code = getattr(function, "__code__", None)
            place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
            problem = f"returned {type(made).__name__}, not {wanted.__name__}"
            raise _error(f"{name} of the recipe {recipe}{place} {problem}", arguments, ours)
        return made

    return call


def _first_failing_row(score_many: Callable[..., Any], pairs: Sequence[Any]) -> Sequence[Any]:
    """The first of these rows that fails by itself; all of them where none does."""
    for pair in pairs:
        try:
            score_many([pair])
        except Exception:  # the same again, or as good a reason
            return pair  # type: ignore[no-any-return]
    return (pairs,)


def _failure(recipe: str, name: str, error: Exception, arguments: Sequence[Any], ours: bool) -> RecipeError:
    """Named by the last line of the recipe's own file that the error went through, not by that of a library below."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the guard's own
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return _error(f"{name} of the recipe {recipe}{place} raised {said}", arguments, ours)


def _error(problem: str, arguments: Sequence[Any], ours: bool) -> RecipeError:
    what = _describe_arguments(arguments)
    found = RecipeError(
        f"{problem}{f'; it was given {what}' if what else ''}",
        code="E7108",
        field="recipe",
        help="this is a bug in SureFit, please report it with the row"
        if ours
        else "fix the recipe, or the row if that is wrong: to_example refuses a row with DataError, parse returns "
        "None for what is no answer, and score gives that zeros",
    )
    if ours:
        found.exit_code = EXIT_BUG
    return found


def _describe_arguments(arguments: Sequence[Any]) -> str:
    """The row, or the answer to it, in a few words."""
    given = arguments[-1] if arguments else None
    match given:
        case Prediction(text=text) | [Prediction(text=text), *_] | str(text):
            return f"the answer {truncate_text(text)!r}"
        case Mapping():
            return f"a row with {', '.join(map(str, list(given)[:8]))}"
        case Sequence():
            return f"{len(given):,} rows"
        case _:
            return ""
