"""A recipe of the user's own that fails: the guide's recipe with a mistake in one line, as verbs of SureFit meet it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit import recipes
from surefit.cli.app import app
from surefit.core.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE, DataError, RecipeError, errors_at
from surefit.recipes.chat import RECIPE as SFT
from surefit.recipes.guard import wrap_recipe_errors
from surefit.task import Prediction

GUIDE = Path(__file__).parents[2] / "docs/write-a-recipe.md"
ROWS = [{"review": "Good.", "label": "positive"}, {"review": "So so.", "label": "neutral"}]
CONFIG = """recipe: sentiment
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: rows.jsonl, max_length: 64}
train: {max_steps: 1, global_batch_size: 2}
output_dir: runs/one
"""


class Home:
    """An empty directory in which a package with the guide's recipe is installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        info = path / "feelings-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: feelings\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[surefit.recipes]\nsentiment = feelings:RECIPE\n")
        (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (path / "answers.txt").write_text("positive\nwrong\n")
        (path / "run.yaml").write_text(CONFIG)

    def recipe(self, old: str = "", new: str = "") -> int:
        """Write the recipe with a mistake; the line it is in."""
        found = re.search(r'^```python title="sentiment.py"\n(.*?)^```$', GUIDE.read_text("utf-8"), re.M | re.S)
        assert found is not None
        assert found[1].count(old) == 1 or not old
        text = found[1].replace(old, new) if old else found[1]
        (self.path / "feelings.py").write_text(text)
        return text[: text.index(new)].count("\n") + 1

    def says(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and result of a verb; its error, where it ends with one."""
        done = CliRunner().invoke(app, [*arguments, "--json"])
        return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "feelings", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changed twice in a second counts as unchanged
    return Home(tmp_path)


TO_EXAMPLE = ("    if label not in LABELS:\n", "    if label.casefold() not in LABELS[row['id']]:\n")
PARSE = ("    word = text.strip().lower()\n", "    word = {'positive': 'positive'}[text]\n")
SCORE = ('        "valid": float(prediction.parsed is not None),\n', '        "valid": float(prediction.parsed),\n')
SCORING = ("score", "--recipe", "sentiment", "--predictions", "answers.txt", "--references", "rows.jsonl")


def test_the_recipe_as_it_is_scores(home: Home) -> None:
    home.recipe()
    code, said = home.says(*SCORING)
    assert code == EXIT_OK
    assert said["metrics"]["accuracy"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("mistake", "row", "message"),
    [
        (TO_EXAMPLE, 1, "to_example of the recipe sentiment (feelings.py:{}) raised KeyError: 'id'; it was given a row "
                        "with review, label"),
        (PARSE, 2, "parse of the recipe sentiment (feelings.py:{}) raised KeyError: 'wrong'; it was given the answer "
                   "'wrong'"),
        (SCORE, 1, "score of the recipe sentiment (feelings.py:{}) raised ValueError: could not convert string to "
                   "float: 'positive'; it was given the answer 'positive'"),
    ],
)  # fmt: skip
def test_its_error_says_recipe_line_and_row(home: Home, mistake: tuple[str, str], row: int, message: str) -> None:
    line = home.recipe(*mistake)
    code, said = home.says(*SCORING)
    assert code == EXIT_USAGE
    assert said["error"] == "RecipeError"
    assert said["message"] == message.format(line)
    place = f"{said['path']}:{said['line']}" if said["line"] else said["path"]
    assert place.endswith(f"rows.jsonl:{row}")
    assert "fix the recipe" in said["help"]


def test_every_verb_that_reads_rows_says_it(home: Home) -> None:
    line = home.recipe(*TO_EXAMPLE)
    for verb in ("check", "train", "audit"):
        code, said = home.says(verb, "run.yaml")
        text = json.dumps(said)
        assert code in (1, EXIT_USAGE), (verb, said)
        assert f"feelings.py:{line}) raised KeyError" in text, (verb, said)


def test_bad_rows_skip_leaves_no_row_out_over_it(home: Home) -> None:
    line = home.recipe(*TO_EXAMPLE)
    (home.path / "run.yaml").write_text(CONFIG.replace("max_length: 64", "max_length: 64, bad_rows: skip"))
    code, said = home.says("train", "run.yaml")
    assert code in (1, EXIT_USAGE)
    assert f"feelings.py:{line}) raised KeyError" in json.dumps(said)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            ('    return {\n        "valid"', '    {\n        "valid"'),
            "score of the recipe sentiment (feelings.py:{}) returned NoneType, not Mapping",
        ),
        (
            ("    return Example(messages=(*prompt, answer), completion=label, reference=label)", "    return answer"),
            "to_example of the recipe sentiment (feelings.py:{}) returned dict, not Example",
        ),
    ],
)
def test_what_it_returns_is_looked_at(home: Home, mistake: tuple[str, str], message: str) -> None:
    home.recipe(*mistake)
    code, said = home.says(*SCORING)
    name = message.partition(" ")[0]
    line = (home.path / "feelings.py").read_text().split(f"def {name}")[0].count("\n") + 1
    assert code == EXIT_USAGE
    assert said["message"].startswith(message.format(line))


def test_of_many_rows_the_one_that_fails_is_named() -> None:
    def score_many(pairs: Any) -> Any:
        return [{"exact_match": 1 / len(answer.text)} for _, answer in pairs]

    recipe = wrap_recipe_errors(replace(SFT, score_many=score_many), ours=False)
    example = SFT.to_example({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert recipe.score_many is not None
    with pytest.raises(RecipeError) as caught:
        recipe.score_many([(example, Prediction(text=text)) for text in ("b", "", "c")])
    assert caught.value.message.endswith("raised ZeroDivisionError: division by zero; it was given the answer ''")


def test_in_our_own_recipes_it_is_a_bug_of_ours() -> None:
    recipe = recipes.get_recipe("math_reasoning")
    with pytest.raises(RecipeError) as caught, errors_at("rows.jsonl:7"):
        recipe.score(None, Prediction(text="4"))  # type: ignore[arg-type]
    assert caught.value.exit_code == EXIT_BUG
    assert "bug in SureFit" in (caught.value.help or "")
    assert caught.value.path == "rows.jsonl:7"
    assert re.match(r"score of the recipe math_reasoning \(math_reasoning.py:\d+\) raised ", caught.value.message)


def test_a_row_that_the_recipe_refuses_stays_what_it_was() -> None:
    with pytest.raises(DataError) as caught:
        recipes.get_recipe("math_reasoning").to_example({})
    assert not isinstance(caught.value, RecipeError)
