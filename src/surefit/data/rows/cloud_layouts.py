"""Rows as Google's Vertex AI (Gemini) and Amazon Bedrock take them for fine-tuning, as OpenAI's messages.

Vertex AI: cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare. Bedrock (Converse):
docs.aws.amazon.com/nova/latest/userguide/fine-tune-prepare-data-understanding.html.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.metrics.strict_json import json_kind

MEDIA_PARTS = ("fileData", "file_data", "inlineData", "inline_data", "image", "video", "document", "audio")
TEXT_ALONE = "use rows with text only: SureFit does not train on images, audio or video"
_ROLES = {"user": "user", "model": "assistant", "function": "tool", "tool": "tool", "system": "system"}
"""Roles of Vertex AI's contents → roles of messages."""


def messages_from_contents(contents: Sequence[Any], field: str = "contents") -> list[dict[str, Any]]:
    """Return Vertex AI's `contents` as messages, not yet checked.

    Raises:
        DataError: a turn without parts, or with parts that are not text, calls or their results.
    """
    return [
        message for i, turn in enumerate(contents) for message in _messages_from_parts(turn, f"{field}[{i}]")
    ]  # fmt: skip


def _messages_from_parts(turn: Any, field: str) -> Iterator[dict[str, Any]]:
    """Yield one message, or one for every function response of a turn."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("parts"), (list, tuple, Mapping)):
        raise DataError(
            f"expected an object with role and parts, not {json_kind(turn)}"
            if not isinstance(turn, Mapping)
            else "the turn has no parts",
            code="E4144",
            field=field,
            help='a turn of contents is {"role": "user" or "model", "parts": [{"text": …}]}',
        )
    if turn.get("role") not in tuple(_ROLES):  # a tuple: a list as role has no hash
        raise DataError(
            f"unknown role {turn.get('role')!r}",
            code="E4145",
            field=f"{field}.role",
            help="contents have user and model",
        )
    parts = turn["parts"] if not isinstance(turn["parts"], Mapping) else [turn["parts"]]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for n, part in enumerate(parts):
        place = f"{field}.parts[{n}]"
        kind, value = _kind_of_part(part, place)
        if kind == "text":
            (thoughts if part.get("thought") else texts).append(_text(value, place))
        elif kind == "call":
            calls.append({"name": value.get("name"), "arguments": value.get("args") or {}})
        else:
            content = json.dumps(value.get("response"), ensure_ascii=False)
            results.append({"role": "tool", "name": value.get("name"), "content": content})
    yield from results
    if not results or texts:
        message: dict[str, Any] = {"role": _ROLES[turn["role"]], "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        yield message | {key: value for key, value in turn.items() if key not in ("role", "parts")}


def _kind_of_part(part: Any, field: str) -> tuple[str, Any]:
    """Return what a part of Vertex AI's is, text, call or result, and its value."""
    if isinstance(part, Mapping):
        names = {"text": "text", "functionCall": "call", "function_call": "call"}
        names |= {"functionResponse": "result", "function_response": "result"}
        for name, kind in names.items():
            if part.get(name) is not None and (kind == "text" or isinstance(part[name], Mapping)):
                return kind, part[name]
        if media := next((name for name in MEDIA_PARTS if part.get(name)), None):
            raise DataError(
                f"the part has {media}, but only text is trained on", code="E4146", field=field, help=TEXT_ALONE
            )
    raise DataError(
        f"expected a part with text, functionCall or functionResponse, got {_keys(part)}", code="E4147", field=field
    )


def is_bedrock_turn(item: Mapping[str, Any]) -> bool:
    """Return whether a message has content blocks that only Bedrock's Converse format has; its texts need no change."""
    content = item.get("content")
    return isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping)
        and "type" not in part
        and any(part.get(name) is not None for name in (*_BEDROCK_BLOCKS, *MEDIA_PARTS))
        for part in content
    )


_BEDROCK_BLOCKS = ("toolUse", "toolResult", "reasoningContent")


def messages_from_bedrock(item: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return a message of Bedrock's as messages: calls as `tool_calls`, each tool result as a message of its own.

    Raises:
        DataError: it has blocks that are not text, calls, their results or reasoning.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for n, part in enumerate(item["content"]):
        place = f"{field}.content[{n}]"
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, Mapping) and isinstance(call := part.get("toolUse"), Mapping):
            call_id = {"id": call["toolUseId"]} if call.get("toolUseId") else {}
            function = {"name": call.get("name"), "arguments": call.get("input") or {}}
            calls.append({**call_id, "type": "function", "function": function})
        elif isinstance(part, Mapping) and isinstance(result := part.get("toolResult"), Mapping):
            call_id = {"tool_call_id": result["toolUseId"]} if result.get("toolUseId") else {}
            results.append({"role": "tool", **call_id, "content": _result_text(result.get("content"), place)})
        elif isinstance(part, Mapping) and isinstance(thought := part.get("reasoningContent"), Mapping):
            inner = thought.get("reasoningText")
            thoughts.append(_text(inner.get("text") if isinstance(inner, Mapping) else inner, place))
        elif isinstance(part, Mapping) and any(part.get(name) for name in MEDIA_PARTS):
            raise DataError(
                "the row has media, but only text is trained on", code="E4148", field=place, help=TEXT_ALONE
            )
        else:
            raise DataError(
                f"expected a block with text, toolUse or toolResult, got {_keys(part)}", code="E4149", field=place
            )
    messages = results
    if not results or texts:
        message: dict[str, Any] = {"role": item.get("role"), "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        others = {key: value for key, value in item.items() if key not in ("role", "content")}
        messages = [*results, message | others]
    return messages


def _result_text(content: Any, field: str) -> str:
    """Return the text of a tool's result: its texts, and its objects as JSON."""
    if not isinstance(content, (list, tuple)):
        return _text(content, field)
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    if unread := next((part for part in parts if part.get("text") is None and "json" not in part), None):
        raise DataError(f"expected text or json, got {_keys(unread)}", code="E4150", field=field, help=TEXT_ALONE)
    return "".join(
        str(part["text"]) if part.get("text") is not None else json.dumps(part.get("json"), ensure_ascii=False)
        for part in parts
    )


def tools_from_clouds(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that a row declares as Vertex AI (`functionDeclarations`) or Bedrock (`toolConfig`) do; None if
    it has none of either.
    """
    config = row.get("toolConfig")
    if isinstance(config, Mapping) and isinstance(config.get("tools"), (list, tuple)):
        specs = [tool.get("toolSpec") for tool in config["tools"] if isinstance(tool, Mapping)]
        return [_bedrock_tool(spec) for spec in specs if isinstance(spec, Mapping)]
    tools = row.get("tools")
    if not isinstance(tools, (list, tuple)):
        return None
    declared = [
        tool.get("functionDeclarations", tool.get("function_declarations"))
        for tool in tools
        if isinstance(tool, Mapping)
    ]
    if not any(isinstance(declarations, (list, tuple)) for declarations in declared):
        return None
    return [
        {key: _lower_types(value) if key == "parameters" else value for key, value in declaration.items()}
        for declarations in declared
        for declaration in declarations or ()
        if isinstance(declaration, Mapping)
    ]


def _bedrock_tool(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `toolSpec` with its schema under `parameters`."""
    schema = spec.get("inputSchema")
    schema = schema.get("json", schema) if isinstance(schema, Mapping) else schema
    others = {key: value for key, value in spec.items() if key != "inputSchema"}
    return others | ({"parameters": schema} if schema is not None else {})


def _lower_types(schema: Any) -> Any:
    """Return a schema with JSON Schema's lower-case types: Google writes OBJECT and STRING."""
    if isinstance(schema, Mapping):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _lower_types(value)
            for key, value in schema.items()
        }
    return [_lower_types(item) for item in schema] if isinstance(schema, (list, tuple)) else schema


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"expected text, got {json_kind(value)}", code="E4151", field=field)
    return value


def _keys(part: Any) -> str:
    return ", ".join(map(str, part)) or "nothing" if isinstance(part, Mapping) else json_kind(part)
