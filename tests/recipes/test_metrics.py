"""What holds of every recipe: the metrics that it names are those of its scores; constraints need no gold answer."""

from __future__ import annotations

import contextlib

import pytest

from surefit import recipes
from surefit.core.errors import DataError
from surefit.facts.free_text import LIKELIHOOD
from surefit.recipes import code_generation
from surefit.task import Prediction, Row

TOOLS = [{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]
GSM8K: Row = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
DOCUMENT: Row = {"document": "Một con chó. Một con mèo.", "summary": "Đây là chó và mèo."}
AMR: Row = {
    "sentence": "Ann does not want to go.",
    "graph": '(w / want-01 :polarity - :ARG0 (p / person :wiki "Ann" :name (n / name :op1 "Ann")) '
    ":ARG1 (g / go-01 :ARG0 p))",
}
ROWS: dict[str, list[Row]] = {
    "amr_parsing": [AMR],
    "amr_parsing_two_task": [AMR],
    "code_generation": [{"task_id": 1, "text": "One", "code": "def f(): return 1", "test_list": ["assert f() == 1"]}],
    "function_calling": [
        {"query": "Ring Ann", "tools": TOOLS, "answers": [{"name": "ring", "arguments": {"who": "Ann"}}]},
        {"query": "Sing", "tools": TOOLS, "answers": []},
    ],
    "long_summarization": [DOCUMENT],
    "long_summarization_letters": [DOCUMENT],
    "math_boxed": [{"problem": "1 + 1?", "solution": "It is \\boxed{2}."}],
    "math_reasoning": [GSM8K],
    "math_reasoning_annotated": [GSM8K],
    "rec_ranking": [{"history": ["A"], "candidates": ["B", "C"], "answer": "A"}],
    "chat": [{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}],
}
"""Rows that together have every metric of their recipe."""


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_every_metric_is_said_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_generation, "require_sandbox", lambda: None)  # no answer has a program to run
    recipe = recipes.get_recipe(name)
    examples = [recipe.to_example(row) for row in ROWS[name]]
    if recipe.score_samples is not None:
        scores = [recipe.score_samples(example, [Prediction("")] * 100) for example in examples]
    else:
        scores = [recipe.score(example, Prediction("")) for example in examples]
    given = {metric for row in (*scores, recipe.aggregate(scores)) for metric in row if not metric.startswith("_")}
    if recipe.measures_likelihood:
        given.add(LIKELIHOOD)  # read from the model, whatever the answer
    assert set(recipe.metrics) == given
    assert len(recipe.metrics) == len(given)
    assert recipe.primary_metric in recipe.metrics


@pytest.mark.parametrize(
    "name", [name for name in recipes.list_recipes() if (r := recipes.get_recipe(name)).grammar or r.choices]
)
def test_constraints_are_known_without_the_gold_answer(name: str) -> None:
    """`surefit predict` asks for them too, of rows that have no answer yet."""
    recipe = recipes.get_recipe(name)
    asked = [{key: value for key, value in row.items() if key != gold} for row in ROWS[name] for gold in row]
    tried = 0
    for row in asked:
        with contextlib.suppress(DataError):
            example = recipe.to_example(row)
            if example.completion is None:
                tried += 1
                assert recipe.grammar is None or recipe.grammar(example).source
                assert recipe.choices is None or recipe.choices(example)
    assert tried, "no row without its gold column can be asked"
