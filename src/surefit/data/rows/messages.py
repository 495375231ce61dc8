"""Conversion of data sets' conversation formats to the messages that chat templates accept.

Everything here raises `DataError` with the field that is wrong; the caller adds the file and line.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.data.rows.cloud_layouts import TEXT_ALONE, is_bedrock_turn, messages_from_bedrock, tools_from_clouds
from surefit.facts.thinking import FIELDS
from surefit.metrics.strict_json import json_kind, strict_json
from surefit.task import Message

ROLES = ("system", "user", "assistant", "tool")
THOUGHTS = ("thinking", "reasoning")
"""`type` of an assistant's content parts that hold reasoning: Mistral's and Anthropic's, and LLaMA-Factory's."""
_TEXTS = ("text",)
PYTHON_TEXT = 100_000
"""The most characters of an invalid JSON text for which Python's notation is tried."""
MARKS = ("weight", "loss", "train", "training", "trainable", "loss_weight")
"""Keys of a turn that mark whether it is trained on: OpenAI's, ms-swift's, Axolotl's, and other tools'."""
PARTIAL_MARKS = ("train_detail", "training_detail")
"""Axolotl's keys that mark parts of a turn."""
ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Names of the arguments in a call: OpenAI's, Llama 3's, Anthropic's, LangChain's."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "systemInstruction", "system_instruction")
"""Columns that hold a row's system message."""
CALL_KEYS = ("name", "type", "id", "index", "call_id", "tool_call_id", "description", "strict")
"""Keys of a call beside its arguments; models write only the name of these."""
TOOL_KEYS = ("description", "parameters", "input_schema")
"""Keys of a tool beside its name."""
OTHER_ROLES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ipython": "tool",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Roles of other formats → the role to write instead."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""`from` → role, as in ShareGPT dumps and the tools that read them."""


def parse_conversation(value: Any, field: str) -> list[Message]:
    """Return messages with known roles and text contents, ending with the last assistant turn.

    Args:
        value: a list of `{"role", "content"}`, or that list as JSON text.
        field: the column's name.

    Raises:
        DataError: a message is malformed, or there is no assistant turn with something before it.
    """
    return trim_to_last_answer(parse_messages(value, field), field)


def trim_to_last_answer(messages: list[Message], field: str) -> list[Message]:
    """Return checked messages up to the last assistant turn.

    The turns after it are left out: no loss falls on them, and no turn before them can see them.

    Raises:
        DataError: no assistant turn is trained on, or the first turn is one.
    """
    roles = [message["role"] for message in messages]
    if not any(map(is_trained_on, messages)):
        weights = "assistant" in roles
        message = "every assistant message has weight 0" if weights else "no message has the role assistant"
        raise DataError(f"{message}: there is nothing to train on", code="E4050", field=field)
    if roles[0] == "assistant":
        raise DataError(
            "the conversation starts with the assistant, so there is no prompt to answer",
            code="E4051",
            field=f"{field}[0].role",
        )
    return messages[: len(roles) - roles[::-1].index("assistant")]


def is_trained_on(message: Message) -> bool:
    """Return whether the loss falls on this message: an assistant's, without `"weight": 0`.

    `weight` (0 or 1) is how OpenAI's fine-tuning format leaves earlier turns out; no chat template sees it.
    """
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def parse_messages(value: Any, field: str) -> list[Message]:
    """Check every message and convert it to one form, whatever its role."""
    items = parse_json_list(value, field)
    if not items:
        raise DataError("the list of messages is empty", code="E4052", field=field)
    return [message for i, item in enumerate(items) for message in _checked_messages(item, f"{field}[{i}]")]


def _checked_messages(item: Any, field: str) -> list[Message]:
    """Return a message in one form; a turn of Bedrock's may hold several tool results, and so become several."""
    if isinstance(item, Mapping) and is_bedrock_turn(item):
        return [_message(message, field) for message in messages_from_bedrock(item, field)]
    return [_message(item, field)]


def _message(item: Any, field: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(
            f"a message must be an object with role and content, not {json_kind(item)}", code="E4053", field=field
        )
    item = _with_tool_calls(item, field)
    role = item.get("role")
    if role not in ROLES:
        raise _bad_role(item, role, field)
    item = _with_weight(item, role, field)
    thoughts, item = _thoughts(item, field) if role == "assistant" else ({}, item)
    message: Message = {"role": role, "content": _content(item, role, field)}
    if item.get("tool_calls"):
        if role != "assistant":
            raise DataError(f"a {role} message cannot call tools", code="E4054", field=f"{field}.tool_calls")
        message["tool_calls"] = parse_tool_calls(item["tool_calls"], f"{field}.tool_calls")
    if role == "assistant" and not message["content"].strip() and "tool_calls" not in message:
        raise DataError("the assistant's message is empty", code="E4055", field=f"{field}.content")
    other_keys = {key: value for key, value in item.items() if key not in ("role", "content", "tool_calls")} | thoughts
    # A key set to null counts as missing: templates test whether a key exists.
    return message | {key: value for key, value in other_keys.items() if value is not None}


def _with_weight(item: Mapping[str, Any], role: Any, field: str) -> Mapping[str, Any]:
    """Return the message with `weight` in place of every mark that tells whether it is trained on.

    Raises:
        DataError: a mark is neither true nor false, or asks to train on a turn that is never trained on.
    """
    marks = {name: item[name] for name in (*MARKS, *PARTIAL_MARKS) if item.get(name) is not None}
    if not marks:
        return item
    for name, mark in marks.items():
        if name in PARTIAL_MARKS:
            raise DataError(
                f"{name} marks parts of a turn, but SureFit trains on a turn as a whole or not at all",
                code="E4320",
                field=f"{field}.{name}",
                help='leave it out, or set "weight": 0 on turns that must not be trained on',
            )
        if not isinstance(mark, (bool, int, float)) or mark not in (0, 1):
            raise DataError(f"{name} must be 0 or 1, not {mark!r}", code="E4056", field=f"{field}.{name}")
        if mark and role != "assistant" and name in ("train", "training", "trainable"):
            raise DataError(
                f"{name} marks a {role} turn for training, but SureFit trains on assistant turns only",
                code="E4321",
                field=f"{field}.{name}",
                help="remove the mark from turns that are not answers",
            )
    unmarked = {key: value for key, value in item.items() if key not in MARKS}
    return unmarked | {"weight": min(int(mark) for mark in marks.values())} if role == "assistant" else unmarked


def _with_tool_calls(item: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the message with `tool_calls` and the role tool instead of OpenAI's older `function_call` and role
    function.
    """
    call = item.get("function_call")
    if item.get("role") == "function":
        item = {**item, "role": "tool"}
    if not call:
        return item
    if item.get("tool_calls"):
        raise DataError(
            "the message has both tool_calls and function_call",
            code="E4322",
            field=f"{field}.function_call",
            help="keep tool_calls, which can hold several calls",
        )
    other_keys = {key: value for key, value in item.items() if key != "function_call"}
    return other_keys | {"tool_calls": [parse_json_value(call, f"{field}.function_call")]}


def _bad_role(item: Mapping[str, Any], role: Any, field: str) -> DataError:
    if role is None:
        help_text = (
            "turns of from and value are conversations: set data.columns: {conversations: messages}"
            if "from" in item
            else None
        )
        return DataError("the message has no role", code="E4057", field=f"{field}.role", help=help_text)
    hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
    replacement = OTHER_ROLES.get(role.lower()) if isinstance(role, str) else None
    advice = f'write "role": "{replacement}" in its place; ' if replacement else ""
    help_text = f"{advice}the roles are {', '.join(ROLES)}"
    return DataError(f"unknown role {role!r}{hint}", code="E4058", field=f"{field}.role", help=help_text)


def _thoughts(item: Mapping[str, Any], field: str) -> tuple[dict[str, str], Mapping[str, Any]]:
    """Return an assistant's reasoning by field, and the message without the content parts that hold reasoning.

    Raises:
        DataError: reasoning that is not text: templates silently ignore it.
    """
    kinds = (*_TEXTS, *THOUGHTS)
    by_field = {
        name: _join_text_parts(item[name], f"{field}.{name}", kinds) for name in FIELDS if item.get(name) is not None
    }
    parts = item.get("content")
    if not isinstance(parts, list):
        return by_field, item
    thoughts = [isinstance(part, Mapping) and part.get("type") in THOUGHTS for part in parts]
    reasoning_parts, kept_parts = ([part if flag is select else "" for part, flag in zip(parts, thoughts, strict=True)]
                 for select in (True, False))  # fmt: skip
    if any(thoughts) and not by_field:
        by_field = {FIELDS[0]: _join_text_parts(reasoning_parts, f"{field}.content", kinds)}
    return by_field, {**item, "content": kept_parts}


def _join_text_parts(value: Any, field: str, kinds: Sequence[str] = _TEXTS) -> str:
    """Return a text, or the joined texts of a list of parts of these types."""
    if isinstance(value, list):
        return "".join(_part_text(part, f"{field}[{i}]", kinds) for i, part in enumerate(value))
    return require_text(value, field)


def _content(item: Mapping[str, Any], role: str, field: str) -> str:
    """Return the text of a message; parts of type text are joined. Only a message that calls tools may have none."""
    content = item.get("content")
    if content is None:
        if role == "assistant" and item.get("tool_calls"):
            return ""
        raise DataError("the message has no content", code="E4059", field=f"{field}.content")
    return _join_text_parts(content, f"{field}.content")


def _part_text(part: Any, field: str, kinds: Sequence[str]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and set(part) == {"text"}:  # Bedrock's parts have no type
        part = {"type": "text", **part}
    if isinstance(part, Mapping) and part.get("type") in kinds:
        inner = next((part[key] for key in (part["type"], "text", "value") if part.get(key) is not None), None)
        if isinstance(inner, str) or (isinstance(inner, list) and part["type"] != "text"):
            return _join_text_parts(inner, f"{field}.{part['type']}", kinds)
    subject = f"parts of type {part.get('type')!r} are" if isinstance(part, Mapping) else f"{json_kind(part)} is"
    raise DataError(
        f'{subject} not supported: only {{"type": "text", "text": …}} and, in assistant messages, reasoning',
        code="E4060",
        field=field,
        help=_part_help(part.get("type")) if isinstance(part, Mapping) else None,
    )


def _part_help(kind: Any) -> str | None:
    if kind in ("tool_call", "tool_use"):
        return "write calls in tool_calls of the message"
    return TEXT_ALONE if kind not in (*_TEXTS, *THOUGHTS) else None


def parse_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return calls as `{"type": "function", "function": {"name": str, "arguments": dict}}`.

    Arguments that are JSON text (as in the OpenAI API) are parsed: templates write them as JSON, and would write a text
    as a quoted string.
    """
    return [_tool_call(item, f"{field}[{i}]") for i, item in enumerate(parse_json_list(value, field))]


def _tool_call(item: Any, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise DataError(f"a tool call must be an object, not {json_kind(item)}", code="E4061", field=field)
    wrapped = isinstance(item.get("function"), Mapping)
    function = item["function"] if wrapped else item
    inner = f"{field}.function" if wrapped else field
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError("the tool call has no name", code="E4062", field=f"{inner}.name")
    arguments = _arguments({inner: function, field: item} if wrapped else {field: item})
    call = {key: value for key, value in item.items() if wrapped and key not in ("type", "function", *ARGUMENTS)}
    return call | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a call's arguments, from the one name under which it holds them; empty if there is no such name.

    Args:
        places: field → object that may have them: the function and, around it, the call.

    Raises:
        DataError: they are no object, stand in two places, or under a name that is not known.
    """
    raw_values = {
        (field, name): holder[name] for field, holder in places.items() for name in ARGUMENTS if name in holder
    }
    values = {
        (field, name): {} if value is None or value == "" else parse_json_value(value, f"{field}.{name}")
        for (field, name), value in raw_values.items()
    }
    filled = [(field, name, value) for (field, name), value in values.items() if value != {}]
    if len(filled) > 1:
        (_, first, _), (field, second, _), *_ = filled
        both = f"{first} and {second}" if first != second else f"{first} both inside the function and next to it"
        help_text = f"keep {ARGUMENTS[0]} in the function"
        raise DataError(f"the call has both {both}", code="E4323", field=f"{field}.{second}", help=help_text)
    innermost = next(iter(places))
    field, name, value = filled[0] if filled else (innermost, ARGUMENTS[0], {})
    if not isinstance(value, Mapping):
        raise DataError(f"{name} must be an object, not {json_kind(value)}", code="E4063", field=f"{field}.{name}")
    if name == "parameters" and value.get("type") == "object" and isinstance(value.get("properties"), Mapping):
        raise DataError(
            "the call has a schema of the parameters in place of the arguments",
            code="E4325",
            field=f"{field}.parameters",
            help='write "arguments": {…} with their values; schemas belong in the column tools',
        )
    known_keys = (*ARGUMENTS, *CALL_KEYS, "function")
    unknown = [
        (place, key)
        for place, holder in places.items()
        for key in holder
        if key not in known_keys and holder[key] is not None
    ]
    if not values and unknown:
        raise DataError(
            f"the call has no arguments, but {', '.join(repr(key) for _, key in unknown)}",
            code="E4324",
            field=".".join(unknown[0]),
            help='write "arguments": {…}; for a call without arguments, "arguments": {}',
        )
    return dict(value)


def tools_from_row(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row, from its column `tools` or OpenAI's older `functions`."""
    declared = tools_from_clouds(row)
    tools = parse_tools(row.get("tools") if declared is None else declared)
    return tools if tools is not None else parse_tools(row.get("functions"), "functions")


def parse_tools(value: Any, field: str = "tools") -> list[dict[str, Any]] | None:
    """Return tools as `{"type": "function", "function": {"name", …}}`, the form that chat templates expect; None for
    none.

    Args:
        value: a list of such objects, or of bare `{"name", "description", "parameters"}`; either may be JSON text.
        field: the column's name.
    """
    if value is None or value == "":
        return None
    return [_tool(item, f"{field}[{i}]") for i, item in enumerate(parse_json_list(value, field))] or None


def _tool(value: Any, field: str) -> dict[str, Any]:
    item = parse_json_value(value, field)
    if not isinstance(item, Mapping):
        raise DataError(f"a tool must be an object, not {json_kind(item)}", code="E4064", field=field)
    wrapped = isinstance(item.get("function"), Mapping)
    function = item["function"] if wrapped else item
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(
            "the tool has no name", code="E4065", field=f"{field}.function.name" if wrapped else f"{field}.name"
        )
    if wrapped:  # templates write only the function, not the keys beside it
        misplaced = {key: item[key] for key in TOOL_KEYS if item.get(key) is not None and function.get(key) is None}
        item = {key: content for key, content in item.items() if key not in misplaced}
        function = {**function, **misplaced}
    if "input_schema" in function and "parameters" not in function:
        schema = {"parameters" if key == "input_schema" else key: content for key, content in function.items()}
        return {**item, "function": schema} if wrapped else {"type": "function", "function": schema}
    return {**item, "function": dict(function)} if wrapped else {"type": "function", "function": dict(item)}


def messages_from_sharegpt(row: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the messages of a ShareGPT row, not yet checked, and the field that their errors should name."""
    return sharegpt_turns(parse_json_list(row["conversations"], "conversations"), "conversations"), "conversations"


def sharegpt_turns(turns: Sequence[Any], field: str) -> list[Message]:
    """Return turns of from and value as messages, not yet checked."""
    return [_sharegpt_turn(turn, f"{field}[{i}]") for i, turn in enumerate(turns)]


def system_turn(row: Mapping[str, Any], messages: Sequence[Message] = ()) -> list[Message]:
    """Return the system message from a separate column of the row; empty if the conversation begins with the same
    one."""
    name = next((name for name in SYSTEM_COLUMNS if row.get(name)), None)
    if name is None:
        return []
    value = row[name]
    if isinstance(value, Mapping) and "parts" in value:  # Vertex AI's
        value = value["parts"] if isinstance(value["parts"], (list, str)) else [value["parts"]]
    turn = {"role": "system", "content": _join_text_parts(value, name)}
    return [turn] if turn["content"].strip() and list(messages[:1]) != [turn] else []


def _sharegpt_turn(turn: Any, field: str) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(
            f"a turn must be an object with from and value, not {json_kind(turn)}", code="E4066", field=field
        )
    speaker = turn.get("from")
    if speaker is None:
        help_text = (
            "turns of role and content are messages: set data.columns: {messages: conversations}"
            if "role" in turn
            else None
        )
        raise DataError("the turn has no from", code="E4067", field=f"{field}.from", help=help_text)
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        hint = did_you_mean(str(speaker), SHAREGPT_ROLES)
        help_text = f"known speakers: {', '.join(SHAREGPT_ROLES)}"
        raise DataError(f"unknown speaker {speaker!r}{hint}", code="E4068", field=f"{field}.from", help=help_text)
    value = require_text(turn.get("value"), f"{field}.value")
    other_keys = {key: content for key, content in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        calls = parse_json_value(value, f"{field}.value")
        calls = calls if isinstance(calls, list) else [calls]
        return other_keys | {
            "role": "assistant",
            "content": "",
            "tool_calls": parse_tool_calls(calls, f"{field}.value"),
        }
    return other_keys | {"role": SHAREGPT_ROLES[speaker], "content": value}


def require_text(value: Any, field: str) -> str:
    """Return `value`, which must be text.

    Raises:
        DataError: it is missing or something else.
    """
    if value is None:
        raise DataError("missing", code="E4069", field=field)
    if not isinstance(value, str):
        raise DataError(f"expected text, got {json_kind(value)}", code="E4070", field=field)
    return value


def parse_json_value(value: Any, field: str) -> Any:
    """Return `value`, parsed if it is JSON text, as in CSV files and many hub data sets.

    Raises:
        DataError: it is a text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return strict_json(value)
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}", code="E4071", field=field, help=_json_help(value)) from None


def _json_help(value: str) -> str | None:
    """Return help for a text that is a Python literal: `str(list)`, or pandas' text for a list."""
    if not value.lstrip().startswith(("[", "{")) or len(value) > PYTHON_TEXT:
        return None
    try:
        ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return "this is Python notation, as str() writes it: write the column with json.dumps()"


def parse_json_list(value: Any, field: str) -> Sequence[Any]:
    """Return a list, parsed if it is JSON text."""
    if value is None:
        raise DataError("missing", code="E4072", field=field)
    if isinstance(value, bytes):
        problem = "the column has bytes, not text"
        raise DataError(
            problem, code="E4600", field=field, help="write it as strings: pyarrow's type string, not binary"
        )
    parsed = parse_json_value(value, field)
    if not isinstance(parsed, (list, tuple)):
        raise DataError(f"expected a list, got {json_kind(parsed)}", code="E4073", field=field)
    return parsed
