"""The lazy table: what it knows, what it imports, and what other packages may add to it."""

import json
import subprocess
import sys

import pytest

from surefit import recipes
from surefit.core.errors import ConfigError
from surefit.task import TaskRecipe


def test_every_name_gives_a_recipe_of_that_name():
    for name in recipes.list_recipes():
        recipe = recipes.get_recipe(name)
        assert isinstance(recipe, TaskRecipe)
        assert recipe.name == name
        assert recipe.citation
        assert recipe.version >= 1


def test_an_unknown_name_is_a_config_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'function_calling'") as caught:
        recipes.get_recipe("functon_calling")
    assert caught.value.field == "recipe"
    assert "chat" in caught.value.help


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import json, sys; from surefit import recipes; recipes.list_recipes(); a = set(sys.modules); "
        "recipes.get_recipe('function_calling'); b = set(sys.modules); "
        "print(json.dumps([sorted(m for m in s if m.startswith('surefit.recipes.')) for s in (a, b)]"
        " + [[m for m in ('torch', 'transformers', 'datasets') if m in b]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["surefit.recipes.answering", "surefit.recipes.guard"],
        ["surefit.recipes.answering", "surefit.recipes.function_calling", "surefit.recipes.guard"],
        [],
    ]  # fmt: skip


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """An installed package with three recipes: a good one, one that breaks on import and one that is no recipe."""
    (tmp_path / "guest_recipes.py").write_text(
        "import dataclasses, sys\n"
        "from surefit.recipes.chat import RECIPE as chat\n"
        "RECIPE = dataclasses.replace(chat, name='guest')\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "guest_broken.py").write_text("import a_module_that_is_not_there\n")
    info = tmp_path / "guest_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[surefit.recipes]\nguest = guest_recipes:RECIPE\nchat = guest_recipes:NUMBER\n"
        "number = guest_recipes:NUMBER\nbroken = guest_broken:RECIPE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guest_recipes", raising=False)


@pytest.mark.usefixtures("outside")
def test_another_package_adds_a_recipe_and_cannot_replace_one():
    assert recipes.list_recipes()[-3:] == ["broken", "guest", "number"]
    assert recipes.list_recipes().count("chat") == 1
    assert "guest_recipes" not in sys.modules
    assert recipes.get_recipe("chat").name == "chat"
    assert "guest_recipes" not in sys.modules
    assert recipes.get_recipe("guest").name == "guest"


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "of the package 'guest-recipes' cannot be loaded: ModuleNotFoundError: .*a_module_that_is_not_there",
        ),
        ("number", "of the package 'guest-recipes' is of type int, not TaskRecipe"),
    ],
)
def test_a_broken_recipe_of_another_package_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        recipes.get_recipe(name)
