"""Mathematical word problems: the answer is a worked solution, scored by its final answer alone.

Three names for one task. `math_reasoning` reads GSM8K's rows (question, answer) and removes the calculator notes
<<48/2=24>> from the training text; `math_reasoning_annotated` keeps them. `math_boxed` reads problems whose solution
ends in \\boxed{…} (problem, solution), as in MATH.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.free_text import LIKELIHOOD
from surefit.facts.thinking import split_think_tags
from surefit.metrics.exact_match import INVALID, final_answer, last_boxed, last_number, same_answer
from surefit.metrics.math_equivalence import is_equivalent, same_value
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Grammar, Message, Prediction, Row, Scores, TaskRecipe

NUMBER_INSTRUCTION = "Work the problem out, then write #### and the answer."
BOXED_INSTRUCTION = "Work the problem out and put the final answer in \\boxed{}."
_NUMBER_HELP = (
    "a row has question (text) and answer: the steps, and a last line '#### 18'; without answer it is only predicted"
)
_BOXED_HELP = (
    "a row has problem (text) and solution with its answer in \\boxed{…}; without solution it is only predicted"
)
_NOTE = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GoldAnswer:
    """The gold answer: a number as GSM8K extracts it, or the content of the solution's last box."""

    kind: Literal["number", "boxed"]
    answer: str


def without_annotations(solution: str) -> str:
    """Remove GSM8K's calculator notes from a solution.

    >>> without_annotations("16 - 3 - 4 = <<16-3-4=9>>9 eggs")
    '16 - 3 - 4 = 9 eggs'
    """
    return _NOTE.sub("", solution)


def to_example(row: Row) -> Example:
    """Convert a row in GSM8K's format, without calculator notes.

    Raises:
        DataError: question or answer is missing or empty, or the answer has no final line; `field` names it.
    """
    return _example(row, "question", "answer", _number, NUMBER_INSTRUCTION, _NUMBER_HELP, without_annotations)


def to_annotated_example(row: Row) -> Example:
    """Convert a row in GSM8K's format, with calculator notes."""
    return _example(row, "question", "answer", _number, NUMBER_INSTRUCTION, _NUMBER_HELP, str)


def to_boxed_example(row: Row) -> Example:
    """Convert a row with a problem and a solution that ends in a box.

    Raises:
        DataError: problem or solution is missing or empty, or the solution has no closed box; `field` names it.
    """
    return _example(row, "problem", "solution", _boxed, BOXED_INSTRUCTION, _BOXED_HELP, str)


def to_gold(row: Row) -> Example:
    """Convert a row with at least a gold answer: `solution` with a box, or `answer` in any of the formats.

    Raises:
        DataError: the row has neither, or it contains no answer.
    """
    if isinstance(solution := row.get("solution"), str):
        return Example(reference=_boxed(solution))
    answer = row.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = format(answer, ".15g")
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(_problem("answer", row), code="E7115", field="answer", help=f"{_NUMBER_HELP}; {_BOXED_HELP}")
    if "####" in answer or "\n" in answer.strip():
        return Example(reference=_number(answer))
    if last_boxed(answer) is not None:
        return Example(reference=_boxed(answer))
    bare = final_answer(f"#### {answer.strip()}")
    if bare == answer.strip().replace(",", "") and "problem" not in row:
        return Example(reference=GoldAnswer("number", bare))
    return Example(reference=GoldAnswer("boxed", answer.strip()))


def _example(
    row: Row,
    question: str,
    answer: str,
    gold: Callable[[str], GoldAnswer],
    instruction: str,
    help: str,
    cleaned: Callable[[str], str],
) -> Example:
    question_text = row.get(question)
    if not isinstance(question_text, str) or not question_text.strip():
        raise DataError(_problem(question, row), code="E7116", field=question, help=help)
    messages: list[Message] = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": question_text.strip()},
    ]
    if answer not in row:
        if hint := did_you_mean(answer, row):
            raise DataError(f"the row has no column {answer!r}{hint}", code="E7117", field=answer, help=help)
        return Example(messages=tuple(messages))
    solution = row[answer]
    if not isinstance(solution, str) or not solution.strip():
        raise DataError(_problem(answer, row), code="E7118", field=answer, help=help)
    reference = gold(split_think_tags(solution)[1] or solution)
    completion = cleaned(solution.strip())
    messages.append({"role": "assistant", "content": completion})
    return Example(messages=tuple(messages), completion=completion, reference=reference)


def _problem(column: str, row: Row) -> str:
    if column not in row:
        return (
            f"the row has no column {column!r}, only {', '.join(map(repr, row)) or 'none'}{did_you_mean(column, row)}"
        )
    return f"{column} is {'empty' if isinstance(row[column], str) else json_kind(row[column])}"


def _number(solution: str) -> GoldAnswer:
    answer = final_answer(solution)
    if answer == INVALID:
        end = truncate_text(repr(solution.strip().splitlines()[-1]))
        raise DataError(
            f"the answer has no final line '#### …'; it ends with {end}",
            code="E7119",
            field="answer",
            help=_NUMBER_HELP,
        )
    return GoldAnswer("number", answer)


def _boxed(solution: str) -> GoldAnswer:
    answer = last_boxed(solution)
    if answer is None:
        raise DataError("the solution has no closed \\boxed{…}", code="E7120", field="solution", help=_BOXED_HELP)
    return GoldAnswer("boxed", answer)


def parse(text: str) -> str | None:
    """Extract the final answer: after the first `#### `, or in the last box; None where the text has neither."""
    answer = final_answer(text)
    return last_boxed(text) if answer == INVALID else answer


def _score(example: Example, prediction: Prediction) -> Scores:
    gold = example.reference
    if not isinstance(gold, GoldAnswer):
        raise DataError("the row has no answer to score against", code="E7121", field="answer", help=_NUMBER_HELP)
    text = prediction.text if not prediction.truncated else ""
    if gold.kind == "number":
        answer = final_answer(text)
        number = last_number(text)
        return {
            "exact_match": float(same_answer(answer, gold.answer)),
            "last_number": float(number is not None and number == last_number(gold.answer)),
            "answered": float(answer != INVALID),
        }
    boxed = last_boxed(text)
    return {
        "exact_match": float(boxed is not None and is_equivalent(boxed, gold.answer)),
        "same_value": float(boxed is not None and same_value(boxed, gold.answer)),
        "answered": float(boxed is not None),
    }


def _ends_with_a_number(example: Example) -> Grammar:
    """Return the grammar of any steps and one final line: a model that knows the answer but not the format is scored on
    the answer.
    """
    return Grammar("regex", r"[^#]{1,2000}#### -?[0-9]{1,12}(\.[0-9]{1,6})?")


RECIPE = TaskRecipe(
    name="math_reasoning",
    purpose="Solves word problems step by step, with a number at the end.",
    version=3,
    citation=(
        "data and extraction: GSM8K, arXiv:2110.14168, openai/grade-school-math commit 3101c7d; equivalence: "
        "hendrycks/math commit 985bdc1 and openai/prm800k commit 7ecc794"
    ),
    columns=("question", "answer"),
    to_example=to_example,
    parse=parse,
    score=_score,
    primary_metric="exact_match",
    metrics=("exact_match", "last_number", "answered", LIKELIHOOD),
    grammar=_ends_with_a_number,
    to_gold=to_gold,
)
ANNOTATED = replace(
    RECIPE,
    name="math_reasoning_annotated",
    purpose="Solves word problems with calculator notes (<<2+3=5>>) in the solution, as GSM8K has them.",
    to_example=to_annotated_example,
)
BOXED = replace(
    RECIPE,
    name="math_boxed",
    purpose="Solves problems whose answer is a formula, at the end of the solution in \\boxed{}.",
    columns=("problem", "solution"),
    to_example=to_boxed_example,
    grammar=None,
    metrics=("exact_match", "same_value", "answered", LIKELIHOOD),
)
