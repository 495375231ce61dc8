"""The pages about recipes: their Python blocks are run, top to bottom, as a reader would paste them."""

import re
from pathlib import Path

import pytest

from surefit.task import TaskRecipe

DOCS = Path(__file__).parents[2] / "docs"


def run_blocks(page):
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    return namespace


def test_the_guides_recipe_is_complete_and_passes_its_own_tests():
    recipe = run_blocks("write-a-recipe.md")["RECIPE"]
    assert isinstance(recipe, TaskRecipe)
    to_predict = recipe.to_example({"review": "Fine."})
    assert to_predict.completion is None
    assert to_predict.prompt == to_predict.messages


def test_every_field_of_a_recipe_is_in_the_guide():
    text = (DOCS / "write-a-recipe.md").read_text("utf-8")
    assert [name for name in TaskRecipe.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_the_worked_examples_of_function_calling_hold():
    run_blocks("recipes/function-calling.md")


@pytest.mark.parametrize("page", ["write-a-recipe.md", "recipes/function-calling.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (DOCS / page).read_text("utf-8"))
    assert [link for link in links if not (DOCS / page).parent.joinpath(link).exists()] == []
