"""HumanEval and MBPP: every reference solution that is here, run against its tests in the sandbox."""

import json
from pathlib import Path

import pytest

from surefit.core.errors import DataError, MachineError
from surefit.evaluate.sandbox import require_sandbox, run_many
from surefit.recipes.code_generation import RECIPE
from surefit.task import Prediction

DATA = Path(__file__).parents[2] / "../shared/data/math_code"
FILES = ("humaneval/HumanEval.jsonl", "mbpp/mbpp.jsonl", "mbpp/sanitized-mbpp.jsonl")
SLOW_REFERENCES = {123}
"""MBPP's 123 needs more than 15 seconds of CPython 3.11; it is right all the same."""

try:
    require_sandbox()
except MachineError as error:
    pytestmark = pytest.mark.skip(reason=error.message)
else:
    pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared benchmark data is not beside this checkout")


def _rows(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def _failures(rows):
    """Rows whose own reference, read back from the text that is trained on, does not pass."""
    examples = [RECIPE.to_example(row) for row in rows]
    jobs = [example.reference.job(RECIPE.parse(example.completion)) for example in examples]
    results = run_many(jobs)
    return {row["task_id"]: result for row, result in zip(rows, results, strict=True) if result.status != "passed"}


@pytest.mark.parametrize("name", FILES)
def test_a_sample_of_the_references_passes(name):
    rows = _rows(name)
    odd = [
        row for row in rows if row["task_id"] in ("HumanEval/32", "HumanEval/38", "HumanEval/50", 367, 533, 596, 927)
    ]
    assert _failures([*rows[:: len(rows) // 12], *odd]).keys() <= SLOW_REFERENCES


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_reference_passes(name):
    rows = _rows(name)
    assert len(rows) >= 100
    failures = _failures(rows)
    assert failures.keys() <= SLOW_REFERENCES
    assert all(result.status == "timeout" for result in failures.values())


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_an_example_whose_completion_is_its_program(name):
    for row in _rows(name):
        example = RECIPE.to_example(row)
        code = RECIPE.parse(example.completion)
        reference = row["code"] if "code" in row else row["prompt"] + row["canonical_solution"]
        assert code.strip() == reference.replace("\r\n", "\n").strip()
        assert example.reference.names


def test_setup_that_uses_the_program():
    """As MBPP 367: the setup builds a tree of the solution's own class, so it runs after the program."""
    nasties = [json.loads(line) for line in (DATA / "nasties.jsonl").read_text("utf-8").splitlines()]
    rows = {n["source"]: json.loads(n["raw"]) for n in nasties if n["source"] in ("MBPP 367", "MBPP 123")}
    assert _failures([rows["MBPP 367"]]) == {}
    example = RECIPE.to_example(rows["MBPP 367"])
    assert {"Node", "is_tree_balanced"} <= set(example.reference.names)


@pytest.mark.slow
def test_the_samples_published_with_humaneval():
    """Six answers that continue one prompt: the last three are right, indented by four spaces, by two and by a tab."""
    (task,) = _rows("humaneval/example_problem.jsonl")
    example = RECIPE.to_example(task)
    answers = [sample["completion"] for sample in _rows("humaneval/example_samples.jsonl")]
    passed = [result.status == "passed" for result in run_many([example.reference.job(a) for a in answers], 1.0)]
    assert passed == [False, False, False, True, True, True]
    predictions = [Prediction(answer, parsed=RECIPE.parse(answer)) for answer in answers[2:]]
    assert RECIPE.score_samples(example, predictions)["pass@1"] == 0.75


def test_a_row_without_tests_is_refused():
    with pytest.raises(DataError, match="test_list is empty") as caught:
        RECIPE.to_example({"task_id": 1, "text": "Add.", "code": "x = 1", "test_list": []})
    assert caught.value.field == "test_list"
