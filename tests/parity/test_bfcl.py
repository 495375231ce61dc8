"""The Berkeley leaderboard's checker, case by case: recorded verdicts of the real code against ours."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from surefit.metrics.bfcl_checker import check_calls

DATA = Path(__file__).parents[2] / "../shared/data/function_calling"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared benchmark data is not beside this checkout")


def _read(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def questions() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in _read(*DATA.glob("bfcl/*.json"))}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return {row["id"]: row["ground_truth"] for row in _read(*DATA.glob("bfcl/possible_answer/*.json"))}


def test_checker_agrees_on_every_recorded_case(questions, answers):
    cases = _read(DATA / "scorer/bfcl_ast_checker_cases.jsonl")
    assert cases
    disagreements = []
    for case in cases:
        calls = [{"name": name, "arguments": given} for call in case["model_output"] for name, given in call.items()]
        error = check_calls(questions[case["id"]]["function"], calls, answers[case["id"]], case["category"])
        if error != case.get("error_type") or (error is None) != case["valid"]:
            disagreements.append((case["id"], case["mutation"], error, case.get("error_type")))
    assert disagreements == []
    verdicts = Counter(case["valid"] for case in cases)
    assert min(verdicts[True], verdicts[False]) > 100, "cases of both verdicts, or agreement would mean little"


@pytest.mark.parametrize("row_id", ["live_simple_106-63-0", "live_multiple_862-181-3", "live_multiple_964-207-0"])
def test_rows_that_no_output_can_pass(row_id, questions, answers):
    """Rows whose answer contradicts their schema: even the answer's own values fail."""
    (answer,) = answers[row_id]
    ((name, acceptable),) = answer.items()
    given = {parameter: values[0] for parameter, values in acceptable.items() if values}
    category = "live_multiple" if "multiple" in row_id else "live_simple"
    assert check_calls(questions[row_id]["function"], [{"name": name, "arguments": given}], [answer], category)
