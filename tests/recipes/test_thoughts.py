"""A model that thinks before it answers is scored on the answer, in every recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefit import recipes
from surefit.data.rows.reasoning import convert_reasoning
from surefit.recipes.answering import judge_final_answers
from surefit.task import Prediction

THOUGHTS = (
    "<think>\n{}\n</think>\n\n",
    "{}\n</think>\n\n",
    "<|channel|>analysis<|message|>{}<|end|><|channel|>final<|message|>",
)
TOOL = {"name": "add", "description": "", "parameters": {}}
GRAPH = "(w / want-01 :ARG0 (b / boy))"
ROWS = {
    "function_calling": (
        {"query": "Add 1.", "tools": [TOOL], "answers": [{"name": "add", "arguments": {}}]},
        '[{"name": "add", "arguments": {}}]',
        "[]",
    ),
    "amr_parsing": ({"sentence": "The boy wants.", "graph": GRAPH}, GRAPH, "(d / dog)"),
    "amr_parsing_two_task": ({"sentence": "The boy wants.", "graph": GRAPH}, f"Graph: {GRAPH}", "Graph: (d / dog)"),
    "math_reasoning": ({"question": "2+2?", "answer": "Count.\n#### 4"}, "Count.\n#### 4", "#### 5"),
    "math_boxed": ({"problem": "2+2?", "solution": "\\boxed{4}"}, "It is \\boxed{4}.", "\\boxed{5}"),
    "long_summarization": ({"document": "One two. Three four.", "summary": "One two."}, "One two.", "Three four."),
    "chat": ({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}, "4", "5"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_final_answer_is_scored(name):
    recipe = recipes.get_recipe(name)
    row, answer, thought = ROWS[name]
    example = recipe.to_example(row)

    def scores(text, truncated=False):
        found = Prediction(text, truncated, None if truncated else recipe.parse(text))
        many = recipe.score_many([(example, found)])[0] if recipe.score_many else None
        one = recipe.score(example, found)
        assert many in (None, one)
        return one

    plain, wrong = scores(answer), scores(thought)
    assert plain[recipe.primary_metric] == 1.0
    assert wrong[recipe.primary_metric] < 1.0
    for form in THOUGHTS:
        assert scores(form.format(thought) + answer) == plain
        assert scores(form.format(answer) + thought) == wrong
    assert scores(f"<think>{answer}", truncated=True) == scores("", truncated=True)


def test_a_sampled_program_too():
    name = "code_generation"
    recipe = recipes.get_recipe(name)
    assert recipe.parse("<think>\n```python\nx = 1\n```\n</think>\n\n```python\ny = 2\n```") == "y = 2\n"


def test_a_recipe_can_ask_for_the_reasoning():
    own = replace(
        recipes.get_recipe("chat"), parse=str, score=lambda example, found: {"length": float(len(found.text))}
    )
    text = "<think>t</think>a"
    for recipe, seen in ((own, "a"), (replace(own, thoughts=True), text)):
        asked = judge_final_answers(recipe)
        assert asked.parse(text) == seen
        assert asked.score(None, Prediction(text)) == {"length": len(seen)}


def test_a_gold_answer_with_reasoning_is_its_answer():
    thought = "<think>#### 5 or \\boxed{5}, say the boys.</think>\n\n"
    for name, column in (("math_reasoning", "answer"), ("math_boxed", "solution"), ("long_summarization", "summary")):
        recipe = recipes.get_recipe(name)
        row, answer, _ = ROWS[name]
        example = recipe.to_example({**row, column: thought + answer})
        assert example.reference == recipe.to_example({**row, column: answer}).reference
        assert example.messages[-1]["content"] == thought + answer
        dropped = convert_reasoning(example, "drop")
        assert (dropped.messages, dropped.completion) == (recipe.to_example({**row, column: answer}).messages, answer)
