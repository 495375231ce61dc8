"""Programs: rows of both layouts, what is read as Python in an answer, pass@k, and rows that are refused."""

import json
import time

import pytest

from surefit import samples
from surefit.core.errors import DataError, MachineError
from surefit.evaluate.sandbox import require_sandbox
from surefit.recipes.code_generation import RECIPE, GoldTests, parse
from surefit.task import Prediction

try:
    require_sandbox()
    sandbox = pytest.mark.skipif(False, reason="")
except MachineError as error:
    sandbox = pytest.mark.skip(reason=error.message)

MBPP = {
    "task_id": 1,
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n\treturn x * 2",
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(-1) == -2"],
}
HUMANEVAL = {
    "task_id": "HumanEval/x",
    "prompt": (
        'from math import sqrt\n\n\ndef root(x: float) -> float:\n    """The root.\n    >>> root(4)\n    2.0\n    """\n'
    ),
    "entry_point": "root",
    "canonical_solution": "    return sqrt(x)\n",
    "test": "def check(candidate):\n    assert candidate(9) == 3\n",
}


def scores(row, text, **more):
    example = RECIPE.to_example(row)
    return RECIPE.score(example, Prediction(text, parsed=RECIPE.parse(text), **more))


def test_an_mbpp_row():
    example = RECIPE.to_example(MBPP)
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant"]
    assert example.messages[1]["content"] == (
        "Write a function to double a number.\nYour code should pass these tests:\n"
        "assert double(2) == 4\nassert double(-1) == -2"
    )
    assert example.completion == "```python\ndef double(x):\n\treturn x * 2\n```"
    assert example.reference == GoldTests("\nassert double(2) == 4\nassert double(-1) == -2", ("double",))


def test_a_humaneval_row():
    example = RECIPE.to_example(HUMANEVAL)
    assert example.messages[1]["content"].startswith("Complete this function:\n```python\nfrom math import sqrt")
    assert example.completion.endswith("    return sqrt(x)\n```")
    assert example.reference.names == ("root",)


def test_a_row_that_is_only_scored_has_tests_and_no_completion():
    for row, column in ((MBPP, "code"), (HUMANEVAL, "canonical_solution")):
        example = RECIPE.to_example({key: value for key, value in row.items() if key != column})
        assert example.completion is None
        assert example.reference.names == RECIPE.to_example(row).reference.names
        assert RECIPE.to_gold(row).reference == RECIPE.to_example(row).reference


@sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\ndef double(x):\n    return x * 2\n```", 1.0),
        ("def double(x):\n    return 2 * x", 1.0),
        ("- so:\n  ```python\n  def double(x):\n      return 2 * x\n  ```", 1.0),
        ("Sure:\n```python\ndef double(x):\n    return x + x\n```\nIt adds.", 1.0),
        ("```python\ndef double(x):\n    return x\n```", 0.0),
        ("```python\ndef twice(x):\n    return 2 * x\n```", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
    ],
)
def test_pass_at_1(text, expected):
    assert scores(MBPP, text) == {"pass@1": expected, "syntax_valid": 1.0, "timeout": 0.0}


@sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    return sqrt(x)\n", 1.0),
        ("```python\n    return x ** 0.5\n```", 1.0),
        ("```python\ndef root(x):\n    return sqrt(x)\n```", 1.0),
        ("```python\nimport math\ndef root(x):\n    return math.sqrt(x)\n```", 1.0),
        ("    return x", 0.0),
    ],
)
def test_an_answer_may_continue_the_prompt_or_stand_alone(text, expected):
    assert scores(HUMANEVAL, text)["pass@1"] == expected


@sandbox
def test_what_does_not_parse_keeps_its_zeros():
    zeros = {"pass@1": 0.0, "syntax_valid": 0.0, "timeout": 0.0}
    assert scores(MBPP, "") == zeros
    assert scores(MBPP, "def double(x:") == zeros
    assert RECIPE.score(RECIPE.to_example(MBPP), Prediction("def double(x): return 2 * x", truncated=True)) == zeros


@sandbox
@pytest.mark.parametrize("row", [MBPP, HUMANEVAL])
@pytest.mark.parametrize("text", ["x = 1\n" * 900_000, "x = f'" + "{1}" * 160_000 + "'"])
def test_an_answer_of_megabytes_is_not_parsed(text, row):
    """Python's parser took four minutes and 2.2 GB for the first of these, in this process."""
    before = time.process_time()
    assert scores(row, text) == {"pass@1": 0.0, "syntax_valid": 0.0, "timeout": 0.0}
    assert time.process_time() - before < 5


@sandbox
def test_a_timeout_is_counted(monkeypatch):
    monkeypatch.setattr("surefit.recipes.code_generation.TIMEOUT_S", 1.0)
    assert scores(MBPP, "def double(x):\n    while True: pass") == {"pass@1": 0.0, "syntax_valid": 1.0, "timeout": 1.0}


@sandbox
def test_pass_at_k_of_several_answers():
    texts = ["def double(x): return 2 * x", "def double(x): return x", "def double(x:", "", "def double(x): return x"]
    found = RECIPE.score_samples(RECIPE.to_example(MBPP), [Prediction(t, parsed=RECIPE.parse(t)) for t in texts])
    assert found == {"pass@1": pytest.approx(0.2), "pass@5": 1.0, "syntax_valid": 0.6, "timeout": 0.0}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nthen\n```python\ny = x\n```", "x = 1\n\ny = x\n"),
        ("```python\nx = 1", "x = 1"),
        ("Run:\n```bash\npip install x\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("- so:\n  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("    return 1\n", "    return 1\n"),
        ("```bash\nls\n```", None),
        (" \n", None),
        ("```python\n```", None),
    ],
)
def test_the_python_in_an_answer(text, code):
    assert parse(text) == code


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"test_list": None}, "test_list", "test_list is null"),
        ({"test_list": "assert True"}, "test_list", "not a list"),
        ({"test_list": ["assert double(2 == 4"]}, "test_list", "not Python"),
        ({"code": "def double(x:"}, "code", "not Python"),
        ({"code": None}, "code", "code is null"),
        ({"text": " "}, "text", "text is empty"),
    ],
)
def test_an_mbpp_row_is_refused(change, field, message):
    with pytest.raises(DataError, match=message) as caught:
        RECIPE.to_example(MBPP | change)
    assert caught.value.field == field
    assert caught.value.help


@pytest.mark.parametrize("column", ["prompt", "test", "entry_point"])
def test_a_humaneval_row_is_refused(column):
    with pytest.raises(DataError, match=column):
        RECIPE.to_example(HUMANEVAL | {column: ""})


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="did you mean 'tests_list'"):
        RECIPE.to_example({"task_id": 1, "text": "Add.", "tests_list": ["assert 1"]})


def test_imports_and_builtins_are_not_the_programs():
    row = MBPP | {
        "code": "import math\ndef sum(a):\n    return math.fsum(a)",
        "test_list": ["assert math.isclose(sum([1, 2]), 3)", "assert [sum([n]) for n in range(2)] == [0, 1]"],
    }
    gold = RECIPE.to_example(row).reference
    assert gold.names == ("sum",)
    assert gold.before == "import math"


@sandbox
def test_every_sample_task_is_passed_by_its_own_solution():
    for name in ("code-generation-eval", "code-generation-tasks"):
        rows = [json.loads(line) for line in samples.find_sample(f"surefit/{name}").read_text().splitlines()]
        for row in rows[:15]:
            assert scores(row, RECIPE.to_example(row).completion)["pass@1"] == 1.0, row["text"]
