"""The Berkeley Function-Calling Leaderboard's own files: its questions as rows to be asked, its verdict on answers.

The files are `BFCL_v4_CATEGORY.json` and `possible_answer/BFCL_v4_CATEGORY.json` (JSON Lines) of ShishirPatil/gorilla,
berkeley-function-call-leaderboard/bfcl_eval/data, as of commit 6ea5797. Nothing of them comes with SureFit.
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
    """A category's questions by id, each with its `ground_truth` where it has one.

    Raises:
        DataError: the file is not there or cannot be read.
    """
    questions, answers = (path / f"BFCL_v4_{category}.json" for path in (folder, folder / "possible_answer"))
    if not questions.is_file():
        raise DataError(
            f"{questions} is not there", code="E7077", path=folder, help="name the directory that has BFCL_v4_*.json"
        )
    gold = {row["id"]: row for row in read_jsonl(answers)} if answers.is_file() else {}
    return {row["id"]: {**row, **gold.get(row["id"], {})} for row in read_jsonl(questions)}


def row_from_question(question: Mapping[str, Any]) -> dict[str, str]:
    """A question of one turn in xLAM's layout, as `function_calling` reads it: `id`, `query`, `tools`, `answers`.

    Of several acceptable values the first becomes the gold one; what may be left out is. Without a `ground_truth` no
    tool fits.
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
    found = {}
    for name, about in schema["properties"].items():
        kind = _TYPES[about["type"]]
        if kind == "list" and "type" in about.get("items", {}):
            kind = f"List[{_TYPES[about['items']['type']]}]"
        kind += "" if name in schema.get("required", ()) else ", optional"
        kept = {key: about[key] for key in ("default", "enum", "properties") if key in about}
        found[name] = {"description": about.get("description", ""), "type": kind, **kept}
    return found


def score_bfcl_answer(question: Mapping[str, Any], text: str, category: str) -> float:
    """1 where the leaderboard takes an answer (a JSON array of calls) for right, with every value that it accepts.

    Where no tool fits, any text that makes no call is right, as on the leaderboard.
    """
    calls = parse_calls(text)
    if "ground_truth" not in question:
        return float(not calls)
    return float(
        calls is not None and check_calls(question["function"], calls, question["ground_truth"], category) is None
    )
