"""The Berkeley Function-Calling Leaderboard's own files: its questions as rows to answer, its verdict on answers.

The files are `BFCL_v4_CATEGORY.json` and `possible_answer/BFCL_v4_CATEGORY.json` (JSON Lines) of ShishirPatil/gorilla,
berkeley-function-call-leaderboard/bfcl_eval/data, as of commit 6ea5797. SureFit does not include them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.core.errors import DataError
from surefit.core.rundir import read_jsonl
from surefit.metrics.bfcl_checker import check_calls
from surefit.metrics.tool_calls import parse_calls

_TYPES = {
    "string": "str", "integer": "int", "float": "float", "boolean": "bool", "array": "list", "dict": "dict",
    "tuple": "tuple", "any": "Any",
}  # fmt: skip


def read_category(folder: Path, category: str) -> dict[str, dict[str, Any]]:
    """Read a category's questions by id, each with its `ground_truth` if it has one.

    Raises:
        DataError: the file does not exist or cannot be read.
    """
    questions, answers = (path / f"BFCL_v4_{category}.json" for path in (folder, folder / "possible_answer"))
    if not questions.is_file():
        raise DataError(
            f"{questions} does not exist", code="E7077", path=folder, help="name the directory that has BFCL_v4_*.json"
        )
    gold = {row["id"]: row for row in read_jsonl(answers)} if answers.is_file() else {}
    return {row["id"]: {**row, **gold.get(row["id"], {})} for row in read_jsonl(questions)}


def row_from_question(question: Mapping[str, Any]) -> dict[str, str]:
    """Convert a single-turn question to xLAM's layout, as `function_calling` reads it: `id`, `query`, `tools`,
    `answers`.

    The first of several acceptable values becomes the gold one; optional values are left out. Without a `ground_truth`
    no tool fits.
    """
    calls = []
    for call in question.get("ground_truth", ()):
        ((name, values),) = call.items()
        arguments = {key: options[0] for key, options in values.items() if options and options[0] != ""}
        calls.append({"name": name, "arguments": arguments})
    tools = [{**tool, "parameters": _parameters(tool["parameters"])} for tool in question["function"]]
    return {
        "id": question["id"],
        "query": "\n".join(turn["content"] for turn in question["question"][0]),
        "tools": json.dumps(tools, ensure_ascii=False),
        "answers": json.dumps(calls, ensure_ascii=False),
    }


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {}
    for name, specification in schema["properties"].items():
        kind = _TYPES[specification["type"]]
        if kind == "list" and "type" in specification.get("items", {}):
            kind = f"List[{_TYPES[specification['items']['type']]}]"
        kind += "" if name in schema.get("required", ()) else ", optional"
        extra = {key: specification[key] for key in ("default", "enum", "properties") if key in specification}
        parameters[name] = {"description": specification.get("description", ""), "type": kind, **extra}
    return parameters


def score_bfcl_answer(question: Mapping[str, Any], text: str, category: str) -> float:
    """Return 1 if the leaderboard judges an answer (a JSON array of calls) correct, with every value that it accepts.

    Where no tool fits, any text without a call is correct, as on the leaderboard.
    """
    calls = parse_calls(text)
    if "ground_truth" not in question:
        return float(not calls)
    return float(
        calls is not None and check_calls(question["function"], calls, question["ground_truth"], category) is None
    )
