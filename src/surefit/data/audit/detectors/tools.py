"""Detectors for function calling: the calls in the answers against the offered tools, and how both are written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from surefit.core.errors import DataError
from surefit.data.audit.detectors import DetectorMatch
from surefit.data.audit.detectors.parts import conversation_turns, turn_roles
from surefit.data.rows.messages import ARGUMENTS, SYSTEM_COLUMNS
from surefit.metrics.bfcl_checker import check_calls
from surefit.metrics.tool_calls import GoldCalls, ToolCall, is_call
from surefit.metrics.tool_schema import function_document

ToolMatches = Iterator[tuple[str, str]]
"""(name of the observation, description)."""
_TOOLS = ("tools", "function", "functions")
_CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT's turns that count as the assistant's."""
_PYTHON_TYPE = re.compile(r"(?:str|int|float|bool|list|dict|tuple|set|Any|List|Dict|Tuple|Set|Union|Optional)\b(?!ing)")
_SCHEMA_KEYS = ("type", "enum", "items", "properties", "description", "required")


class ToolUse:
    """Tools and calls, in xLAM's columns, in conversations, and in the Berkeley leaderboard's files."""

    names = (
        "has_tools",
        "no_tools",
        "unknown_tool",
        "unknown_parameter",
        "missing_required",
        "unwinnable",
        "merged_schema",
        "python_types",
        "double_encoded",
        "name_first",
        "arguments_first",
    )

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return whether the rows have tools, or the leaderboard's gold answers."""
        return any(name in columns for name in (*_TOOLS, "ground_truth", "tool_calls"))

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Return the first match per name."""
        first: dict[str, str] = {}
        for name, description in _find_matches(row):
            first.setdefault(name, description)
        return [DetectorMatch(name, index, description) for name, description in first.items()]


@dataclass(frozen=True)
class _Tools:
    """The tools of a row: how many, what is odd about them, and name → document (None: calls cannot be compared)."""

    count: int
    seen: tuple[tuple[str, str], ...]
    functions: Mapping[str, Any] | None


def _find_matches(row: Mapping[str, Any]) -> ToolMatches:
    value = next((row[name] for name in _TOOLS if name in row), None)
    tools = _read_text(value) if isinstance(value, str) else _read(value)
    if any(name in row for name in _TOOLS):
        yield ("has_tools", f"{tools.count} tools") if tools.count else ("no_tools", "the list of tools is empty")
    yield from tools.seen
    if isinstance(row.get("ground_truth"), list):
        yield from _unwinnable(row["ground_truth"], tools.functions)
    else:
        yield from _answers(row, tools.functions)


@lru_cache(maxsize=512)
def _read_text(text: str) -> _Tools:
    """Parse and read the tools; cached, because rows of one data set often share their tools."""
    return _read(_parsed(text))


def _read(value: Any) -> _Tools:
    matches = [("double_encoded", "tools are JSON text inside JSON text")] if isinstance(value, str) else []
    tools = _objects(value)
    return _Tools(len(tools), tuple(dict([*_schemas(tools), *matches]).items()), _functions(tools))


def _parsed(value: Any) -> Any:
    """Return the value, parsed where it is JSON text; None where it does not parse."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _functions(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """Return name → document; None without tools or with a malformed one: then calls cannot be compared with them."""
    try:
        return {document["name"]: document for document in map(function_document, reversed(tools))} or None
    except (DataError, RecursionError):
        return None


def _schemas(tools: Sequence[dict[str, Any]]) -> ToolMatches:
    """Yield faults in the schemas of the parameters."""
    for tool in tools:
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        for name, spec in _properties(function).items():
            if spec is None:
                yield "merged_schema", f"the parameter {name!r} of {function.get('name')!r} is null"
                continue
            if not isinstance(spec, dict):
                continue
            null_keys = [key for key in _SCHEMA_KEYS if key in spec and spec[key] is None]
            if null_keys:
                yield "merged_schema", f"{null_keys[0]!r} of the parameter {name!r} is null"
            kind = spec.get("type")
            if isinstance(kind, str) and (kind.endswith("optional") or _PYTHON_TYPE.match(kind)):
                yield "python_types", f"the parameter {name!r} has the type {kind!r}"


def _properties(function: Any) -> dict[str, Any]:
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return {}
    inner = parameters.get("properties") if isinstance(parameters.get("type"), str) else parameters
    return inner if isinstance(inner, dict) else {}


def _answers(row: Mapping[str, Any], functions: Mapping[str, Any] | None) -> ToolMatches:
    """Yield faults of the calls in the answers, compared with the tools."""
    answers = _parsed(row.get("answers"))
    if isinstance(answers, str):
        yield "double_encoded", "answers are JSON text inside JSON text"
    calls = _objects(answers) or list(_calls_in_turns(row))
    for call in calls:
        if isinstance(call.get("arguments"), str):
            yield "double_encoded", f"the arguments of {call.get('name')!r} are JSON text"
        keys = [key for key in call if key in ("name", "arguments")]
        if len(keys) == 2:
            yield f"{keys[0]}_first", f"a call begins with {keys[0]!r}"
    valid_calls = [call for call in calls if is_call(call)]
    contradictions = list(_contradictions(valid_calls, functions)) if functions else []
    yield from contradictions
    if functions and valid_calls and isinstance(answers, list) and not contradictions:
        yield from _score_gold_answer(valid_calls, list(functions.values()))


def _calls_in_turns(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `{"name", "arguments"}` of every call in a conversation; arguments as JSON text, as OpenAI's, are
    parsed."""
    for turn in conversation_turns(row):
        value = _parsed(turn.get("tool_calls") or turn.get("function_call"))
        value = _parsed(turn.get("value")) if turn.get("from") == "function_call" else value
        for item in _objects(value if isinstance(value, list) else [value]):
            function = item["function"] if isinstance(item.get("function"), dict) else item
            arguments: Any = next((function[name] for name in ARGUMENTS if function.get(name)), {})
            yield {"name": function.get("name"), "arguments": _parsed(arguments)}


def _contradictions(calls: Sequence[ToolCall], functions: Mapping[str, Any]) -> ToolMatches:
    for call in calls:
        name, arguments = call["name"], call["arguments"]
        if name not in functions:
            yield "unknown_tool", f"calls {name!r}; the tools are {', '.join(sorted(functions)[:5])}"
            continue
        parameters = functions[name]["parameters"]
        for key, value in arguments.items():
            if key not in parameters["properties"]:
                kind = "merged_schema" if value is None else "unknown_parameter"
                yield kind, f"gives {name!r} the argument {key!r}, which it does not have"
        missing = [key for key in parameters["required"] if key not in arguments]
        if missing:
            yield "missing_required", f"calls {name!r} without the required {missing[0]!r}"


def _score_gold_answer(calls: Sequence[ToolCall], functions: Sequence[Mapping[str, Any]]) -> ToolMatches:
    """Score the gold answer by the metric that will score the model."""
    try:
        category = "parallel" if len(calls) > 1 else "multiple"
        error = check_calls(functions, calls, GoldCalls(calls, functions).answers(), category)
    except (ValueError, TypeError, RecursionError):
        return
    if error:
        yield "unwinnable", f"the gold answer fails its own check: {error}"


def _unwinnable(truth: Sequence[Any], functions: Mapping[str, Any] | None) -> ToolMatches:
    """Yield faults of the leaderboard's gold answers: acceptable values per parameter, "" among them if optional."""
    for name, accepted in ((name, value) for answer in _objects(list(truth)) for name, value in answer.items()):
        if not isinstance(accepted, dict):
            continue
        empty_keys = [key for key, values in accepted.items() if values == []]
        if empty_keys:
            yield "unwinnable", f"no value of {empty_keys[0]!r} of {name!r} is acceptable"
        if functions is None:
            continue
        if name not in functions:
            yield "unwinnable", f"the answer calls {name!r}, which is not among the tools"
            continue
        yield from _unwinnable_parameters(name, accepted, functions[name]["parameters"])


def _unwinnable_parameters(name: str, accepted: Mapping[str, Any], parameters: Mapping[str, Any]) -> ToolMatches:
    for key in parameters["required"]:
        if key not in accepted:
            yield "unwinnable", f"{name!r} requires {key!r}, for which no value is acceptable"
    for key, values in accepted.items():
        if key not in parameters["properties"] and isinstance(values, list) and "" not in values:
            yield "unwinnable", f"the answer needs {key!r}, which {name!r} does not have"


class TurnsInARow:
    """Two or more user turns without an answer between them, two answers in a row, and two system messages."""

    names = ("user_turns_in_a_row", "assistant_turns_in_a_row", "two_system_messages")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return whether the rows are conversations."""
        return any(name in columns for name in ("messages", "conversations", "contents", "question"))

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Match the longest run of turns by one role."""
        runs = [(role, len([*run])) for role, run in groupby(turn_roles(row), key=_speaker)]
        for role in ("user", "assistant"):
            longest = max((count for run_role, count in runs if run_role == role), default=0)
            if longest > 1:
                yield DetectorMatch(f"{role}_turns_in_a_row", index, f"{longest} {role} turns in a row")
        if runs and runs[0][0] == "system" and (system_column := _system_column(row)):
            yield DetectorMatch("two_system_messages", index, f"{system_column!r} and a first turn with another text")


def _speaker(role: str) -> str:
    return "assistant" if role in _CALLS else role


def _system_column(row: Mapping[str, Any]) -> str | None:
    """Return the column whose system message is written before another one."""
    name = next((name for name in SYSTEM_COLUMNS if isinstance(row.get(name), str) and row[name].strip()), None)
    first = conversation_turns(row)[0]
    return name if name and row[name] != first.get("content", first.get("value")) else None


DETECTORS = (ToolUse(), TurnsInARow())
