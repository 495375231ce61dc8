"""Function calling: from tools and a question to a JSON array of calls, and nothing else.

The tools are in the system message as JSON text, not in the chat template's own `tools` argument, because templates
write instructions for other answer formats than ours: Llama 3.2's for one object with "parameters", Qwen's for
<tool_call> tags. With the tools in the text, one format serves every base model, and the scored format is the trained
one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.free_text import LIKELIHOOD
from surefit.metrics.strict_json import strict_json
from surefit.metrics.tool_calls import GoldCalls, ToolCall, is_call, parse_calls, score_calls
from surefit.metrics.tool_grammar import calls_grammar
from surefit.metrics.tool_schema import function_document
from surefit.task import Example, Grammar, Message, Prediction, Row, Scores, TaskRecipe

_INSTRUCTION = (
    'Answer with a JSON array of tool calls, each {"name": ..., "arguments": {...}}, or [] if no tool fits.\nTools: '
)
_COLUMNS_HELP = (
    "a row has the columns query (text), tools and answers (lists, or the same as JSON text); "
    "a row for prediction only has no column answers"
)
_CALL_HELP = 'write each call as {"name": "…", "arguments": {…}}, and [] where no tool fits'


def to_example(row: Row) -> Example:
    """Convert a row in xLAM's format to system (instruction and tools), user (query), assistant (calls).

    Args:
        row: `query` (str), `tools` and `answers` (lists, or the same as JSON text; the tools in any format of
            `metrics.tool_schema`). Without the column `answers` the row can be predicted but neither trained on nor
            scored: no assistant turn, `completion` and `reference` are None.

    Raises:
        DataError: a column is missing, null or does not parse, a tool or a call is malformed, or a call names a tool
            that is not among `tools`. `field` is the column, with the position inside it.
    """
    query = row.get("query")
    if not isinstance(query, str) or not query.strip():
        raise DataError(_missing("query", row), code="E7096", field="query", help=_COLUMNS_HELP)
    tools = _list("tools", row)
    functions = [function_document(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
    messages: list[Message] = [
        {"role": "system", "content": _INSTRUCTION + json.dumps(tools, ensure_ascii=False)},
        {"role": "user", "content": query},
    ]
    if "answers" not in row:
        _refuse_misspelt_answers(row)
        return Example(messages=tuple(messages))
    answers = _list("answers", row)
    _check_answers(answers, functions)
    completion = json.dumps(answers, ensure_ascii=False)
    messages.append({"role": "assistant", "content": completion})
    return Example(messages=tuple(messages), completion=completion, reference=GoldCalls(answers, functions))


def _list(column: str, row: Row) -> list[Any]:
    value = row.get(column)
    if value is None:
        raise DataError(_missing(column, row), code="E7097", field=column, help=_COLUMNS_HELP)
    try:
        # A value that is not text is checked in the same way, which finds NaN and the like in it too.
        parsed = strict_json(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{column} is not JSON: {error}", code="E7098", field=column, help=_COLUMNS_HELP) from None
    if not isinstance(parsed, list):
        raise DataError(f"{column} is {_shortened(parsed)}, not a list", code="E7099", field=column, help=_COLUMNS_HELP)
    return parsed


def _missing(column: str, row: Row) -> str:
    if column in row:
        return f"{column} is {_shortened(row[column])}"
    return f"the row has no column {column!r}, only {', '.join(map(repr, row)) or 'none'}{did_you_mean(column, row)}"


def _refuse_misspelt_answers(row: Row) -> None:
    candidates = get_close_matches("answers", list(row), n=1)
    if candidates:
        raise DataError(
            f"the row has a column {candidates[0]!r} but no column 'answers'",
            code="E7100",
            field="answers",
            help=f"rename {candidates[0]!r} to 'answers'; a row for prediction only has neither",
        )


def _check_answers(answers: Sequence[Any], functions: Sequence[Mapping[str, Any]]) -> None:
    parameters = {function["name"]: function["parameters"]["properties"] for function in functions}
    for n, answer in enumerate(answers):
        where = f"answers[{n}]"
        if not isinstance(answer, dict):
            raise DataError(
                f"a call is {_shortened(answer)}, not an object", code="E7101", field=where, help=_CALL_HELP
            )
        if not isinstance(answer.get("name"), str):
            raise DataError("the call has no name", code="E7102", field=f"{where}.name", help=_CALL_HELP)
        if not isinstance(answer.get("arguments"), dict):
            problem = f"the arguments of {answer['name']!r} are {_shortened(answer.get('arguments'))}, not an object"
            raise DataError(problem, code="E7103", field=f"{where}.arguments", help=_CALL_HELP)
        if not is_call(answer):
            extra = ", ".join(repr(key) for key in answer if key not in ("name", "arguments"))
            raise DataError(
                f"the call has {extra} in addition to name and arguments", code="E7104", field=where, help=_CALL_HELP
            )
        if answer["name"] not in parameters:
            raise DataError(
                f"the answer calls {answer['name']!r}, which is not among the row's tools"
                f"{did_you_mean(answer['name'], parameters)}",
                code="E7105",
                field=f"{where}.name",
                help="the prompt does not show this tool to the model: add it to tools, or drop the row",
            )
        _refuse_merged_arguments(answer, parameters[answer["name"]], f"{where}.arguments")


def _refuse_merged_arguments(call: ToolCall, parameters: Mapping[str, Any], where: str) -> None:
    for name, value in call["arguments"].items():
        if value is None and name not in parameters:
            raise DataError(
                f"the argument {name!r} of {call['name']!r} is null, but the tool has no such parameter",
                code="E7106",
                field=f"{where}.{name}",
                help="a table schema has merged the arguments of different tools: store answers as JSON text",
            )


def _shortened(value: Any) -> str:
    return "null" if value is None else truncate_text(repr(value))


def _score(example: Example, prediction: Prediction) -> Scores:
    if not isinstance(example.reference, GoldCalls):
        raise DataError("the row has no answers to score against", code="E7107", field="answers", help=_COLUMNS_HELP)
    calls: list[ToolCall] | None = prediction.parsed
    return score_calls(example.reference, calls)


def _grammar(example: Example) -> Grammar:
    """Return the grammar of calls of the tools in the system message; `[]` without tools, as in a hand-written
    prompt.
    """
    system = example.messages[0]["content"]
    tools = strict_json(system.removeprefix(_INSTRUCTION)) if system.startswith(_INSTRUCTION) else []
    return Grammar("ebnf", calls_grammar(tools))


RECIPE = TaskRecipe(
    name="function_calling",
    purpose="Chooses tools and fills in their arguments, as a JSON array of calls.",
    version=3,
    citation=(
        "data format: xLAM function-calling 60k, arXiv:2406.18518; scores: Berkeley Function-Calling Leaderboard V4, "
        "ShishirPatil/gorilla commit 6ea57973c7a6097fd7c5915698c54c17c5b1b6c8"
    ),
    columns=("query", "tools", "answers"),
    to_example=to_example,
    parse=parse_calls,
    score=_score,
    primary_metric="exact_match",
    metrics=("exact_match", "ast", "name_accuracy", "argument_accuracy", "json_valid", "irrelevance", LIKELIHOOD),
    grammar=_grammar,
)
