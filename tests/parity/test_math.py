"""Equal answers to mathematics problems: recorded verdicts of the two published judges against ours, case by case."""

import json
from collections import Counter
from pathlib import Path

import pytest

from surefit.metrics.math_equivalence import is_equivalent, same_value

CASES = Path(__file__).parents[2] / "../shared/data/math_code/scorer/math_equivalence_cases.jsonl"
pytestmark = pytest.mark.skipif(not CASES.is_file(), reason="the shared benchmark data is not beside this checkout")


@pytest.fixture(scope="module")
def cases():
    return [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("ours", "column"), [(is_equivalent, "hendrycks_is_equiv"), (same_value, "prm800k_grade_answer")]
)
def test_every_recorded_verdict(cases, ours, column):
    differing = [(case["given"], case["gold"]) for case in cases if ours(case["given"], case["gold"]) != case[column]]
    assert differing == []
    verdicts = Counter(case[column] for case in cases)
    assert min(verdicts[True], verdicts[False]) > 100, "cases of both verdicts, or agreement would mean little"


def test_the_verdicts_published_with_the_code(cases):
    published = [case for case in cases if "published_is_equiv" in case]
    assert published
    for case in published:
        assert is_equivalent(case["given"], case["gold"]) == case["published_is_equiv"]


def test_the_stricter_never_accepts_what_the_looser_rejects(cases):
    for case in cases:
        assert same_value(case["given"], case["gold"]) or not is_equivalent(case["given"], case["gold"])
