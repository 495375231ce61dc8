"""Guard around a recipe's own code: its exceptions become errors with the recipe's name, file and line, and the row.

A recipe is other people's code that SureFit calls in twenty places. Each of its functions is wrapped here, once, when
`recipes.get_recipe` returns the recipe; the callers add the row's location (`core.errors.errors_at`).
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
"""Function of a recipe → the type that it must return."""


def wrap_recipe_errors(recipe: TaskRecipe, ours: bool) -> TaskRecipe:
    """Return the recipe with functions that raise `RecipeError` in place of any other exception.

    Args:
        ours: whether it is one of SureFit's own, so that a failure is a bug in SureFit and not the user's to fix.
    """
    wrapped: dict[str, Any] = {
        name: _wrap_errors(getattr(recipe, name), recipe.name, name, ours)
        for name in RETURN_TYPES
        # `mean_scores` stays unwrapped, because code compares `aggregate` with it.
        if getattr(recipe, name) not in (None, mean_scores)
    }
    wrapped["baselines"] = {
        name: _wrap_errors(answer, recipe.name, f"baselines[{name!r}]", ours)
        for name, answer in recipe.baselines.items()
    }
    return replace(recipe, **wrapped)


def _wrap_errors(function: Callable[..., Any], recipe: str, name: str, ours: bool) -> Callable[..., Any]:
    return_type = RETURN_TYPES.get(name, Prediction)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            result = function(*arguments)
        except (SureFitError, MemoryError):
            raise
        except Exception as error:
            failing_arguments = _first_failing_row(function, *arguments) if name == "score_many" else arguments
            raise _failure(recipe, name, error, failing_arguments, ours) from error
        if not isinstance(result, return_type):
            code = getattr(function, "__code__", None)
            location = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
            problem = f"returned {type(result).__name__}, not {return_type.__name__}"
            raise _error(f"{name} of the recipe {recipe}{location} {problem}", arguments, ours)
        return result

    return call


def _first_failing_row(score_many: Callable[..., Any], pairs: Sequence[Any]) -> Sequence[Any]:
    """Return the first row that fails by itself; all rows if none does."""
    for pair in pairs:
        try:
            score_many([pair])
        except Exception:  # the same exception, or one that explains as much
            return pair  # type: ignore[no-any-return]
    return (pairs,)


def _failure(recipe: str, name: str, error: Exception, arguments: Sequence[Any], ours: bool) -> RecipeError:
    """Make the error for an exception, with the last line in the recipe's own file that it passed, not in a library."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the guard's own
    recipe_frames = [frame for frame in frames if frame.filename == frames[0].filename]
    location = f" ({Path(recipe_frames[-1].filename).name}:{recipe_frames[-1].lineno})" if recipe_frames else ""
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return _error(f"{name} of the recipe {recipe}{location} raised {message}", arguments, ours)


def _error(problem: str, arguments: Sequence[Any], ours: bool) -> RecipeError:
    input_text = _describe_arguments(arguments)
    error = RecipeError(
        f"{problem}{f'; it was given {input_text}' if input_text else ''}",
        code="E7108",
        field="recipe",
        help="this is a bug in SureFit, please report it with the row"
        if ours
        else "fix the recipe, or the row if it is wrong: to_example raises DataError for a bad row, parse returns "
        "None for text without an answer, and score gives None zeros",
    )
    if ours:
        error.exit_code = EXIT_BUG
    return error


def _describe_arguments(arguments: Sequence[Any]) -> str:
    """Describe the row, or the answer to it, in a few words."""
    value = arguments[-1] if arguments else None
    match value:
        case Prediction(text=text) | [Prediction(text=text), *_] | str(text):
            return f"the answer {truncate_text(text)!r}"
        case Mapping():
            return f"a row with {', '.join(map(str, list(value)[:8]))}"
        case Sequence():
            return f"{len(value):,} rows"
        case _:
            return ""
