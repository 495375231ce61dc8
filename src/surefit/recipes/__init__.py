"""SureFit's built-in recipes: one file each, imported when a config names it.

Any package can add recipes with an entry point in the group "surefit.recipes"; docs/write-a-recipe.md shows how.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from surefit.core.errors import ConfigError, did_you_mean
from surefit.recipes.answering import judge_final_answers
from surefit.recipes.guard import wrap_recipe_errors
from surefit.task import TaskRecipe

_RECIPES = {
    "amr_parsing": "surefit.recipes.amr_parsing:RECIPE",
    "amr_parsing_two_task": "surefit.recipes.amr_parsing:TWO_TASK",
    "code_generation": "surefit.recipes.code_generation:RECIPE",
    "function_calling": "surefit.recipes.function_calling:RECIPE",
    "long_summarization": "surefit.recipes.long_summarization:RECIPE",
    "long_summarization_letters": "surefit.recipes.long_summarization:LETTERS",
    "rec_ranking": "surefit.recipes.rec_ranking:RECIPE",
    "math_boxed": "surefit.recipes.math_reasoning:BOXED",
    "math_reasoning": "surefit.recipes.math_reasoning:RECIPE",
    "math_reasoning_annotated": "surefit.recipes.math_reasoning:ANNOTATED",
    "chat": "surefit.recipes.chat:RECIPE",
}
GENERAL = "chat"
"""The recipe for rows that have none of their own."""
ENTRY_POINT_GROUP = "surefit.recipes"


def list_recipes() -> list[str]:
    """List every name that `get_recipe` accepts, SureFit's own first; imports no recipe."""
    return [*_RECIPES, *sorted(_outside().keys() - _RECIPES.keys())]


def get_recipe(name: str) -> TaskRecipe:
    """Import and return the recipe of that name; for several names joined by +, the recipe that mixes them. Other
    packages cannot replace SureFit's own names.

    Raises:
        ConfigError: no recipe has that name, or it belongs to another package and does not load or is no `TaskRecipe`;
            or the recipes cannot be mixed.
    """
    if "+" in name:
        from surefit.recipes.mixed import mix_recipes

        return mix_recipes([get_recipe(part.strip()) for part in name.split("+")])
    if name in _RECIPES:
        return _own(name)
    outside = _outside()
    if name in outside:
        return _load(outside[name])
    names = list_recipes()
    raise ConfigError(
        f"there is no recipe {name!r}{did_you_mean(name, names)}",
        code="E7083",
        field="recipe",
        help=f"chat is for conversations, instructions and all else without a recipe of its own; the others: "
        f"{', '.join(name for name in names if name != 'chat')}; `surefit init --list` says what each is for",
    )


def is_own(name: str) -> bool:
    """Return whether the name consists of SureFit's own recipes only."""
    return all(part.strip() in _RECIPES for part in name.split("+"))


@cache
def _own(name: str) -> TaskRecipe:
    module, _, attribute = _RECIPES[name].partition(":")
    return judge_final_answers(wrap_recipe_errors(getattr(import_module(module), attribute), ours=True))


def _outside() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(point: EntryPoint) -> TaskRecipe:
    owner = f"the package {point.dist.name!r}" if point.dist else "another package"
    try:
        recipe = point.load()
    except Exception as error:  # a stranger's module may raise anything while it is imported
        raise ConfigError(
            f"the recipe {point.name!r} of {owner} cannot be loaded: {type(error).__name__}: {error}",
            code="E7084",
            field="recipe",
            help=f"its entry point is {point.value}; reinstall or repair that package",
        ) from error
    if not isinstance(recipe, TaskRecipe):
        raise ConfigError(
            f"the recipe {point.name!r} of {owner} is of type {type(recipe).__name__}, not TaskRecipe",
            code="E7085",
            field="recipe",
            help=f"make its entry point {point.value} name an object made with surefit.task.TaskRecipe(…)",
        )
    return judge_final_answers(wrap_recipe_errors(recipe, ours=False))
