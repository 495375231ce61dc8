"""Rows as Google's Vertex AI (Gemini) and Amazon Bedrock take them for fine-tuning, as OpenAI's messages.

Vertex AI: cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare. Bedrock (Converse):
docs.aws.amazon.com/nova/latest/userguide/fine-tune-prepare-data-understanding.html.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
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
    read = _TurnParts()
    for n, part in enumerate(parts):
        place = f"{field}.parts[{n}]"
        for kind, value in _values_of_part(part, place):
            if kind == "text":
                (read.thoughts if part.get("thought") else read.texts).append(_text(value, place))
            elif kind == "call":
                read.calls.append({"name": value.get("name"), "arguments": value.get("args") or {}})
            else:
                content = json.dumps(value.get("response"), ensure_ascii=False)
                read.results.append({"role": "tool", "name": value.get("name"), "content": content})
    others = {key: value for key, value in turn.items() if key not in ("role", "parts")}
    yield from read.messages(_ROLES[turn["role"]], others)


@dataclass(frozen=True)
class _TurnParts:
    """What the parts of one turn say: a turn may hold results of tools, reasoning, text and calls at once."""

    texts: list[str] = dataclass_field(default_factory=list)
    thoughts: list[str] = dataclass_field(default_factory=list)
    calls: list[dict[str, Any]] = dataclass_field(default_factory=list)
    results: list[dict[str, Any]] = dataclass_field(default_factory=list)

    def messages(self, role: Any, others: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every result as a message of its own, and then one of the rest, if there is any."""
        if self.results and not (self.texts or self.calls or self.thoughts):
            return self.results
        message: dict[str, Any] = {"role": role, "content": "".join(self.texts)}
        message |= {"tool_calls": self.calls} if self.calls else {}
        message |= {"reasoning_content": "".join(self.thoughts)} if self.thoughts else {}
        return [*self.results, {**message, **others}]


_PART_KINDS = {
    "text": "text", "functionCall": "call", "function_call": "call", "functionResponse": "result",
    "function_response": "result",
}  # fmt: skip


def _values_of_part(part: Any, field: str) -> list[tuple[str, Any]]:
    """Return everything that a part of Vertex AI's says, as (text, call or result, its value).

    Raises:
        DataError: it has media, which would be lost, or nothing that can be read.
    """
    said = part if isinstance(part, Mapping) else {}
    if media := _media_of(said):
        raise DataError(
            f"the part has {media}, but only text is trained on", code="E4146", field=field, help=TEXT_ALONE
        )
    values = [
        (kind, said[name])
        for name, kind in _PART_KINDS.items()
        if said.get(name) is not None and (kind == "text" or isinstance(said[name], Mapping))
    ]
    if not values:
        raise DataError(
            f"expected a part with text, functionCall or functionResponse, got {_keys(part)}",
            code="E4147",
            field=field,
        )
    return values


def _media_of(part: Mapping[str, Any]) -> str | None:
    return next((name for name in MEDIA_PARTS if part.get(name)), None)


def is_bedrock_turn(item: Mapping[str, Any]) -> bool:
    """Return whether a message has content blocks that only Bedrock's Converse format has; its texts need no change."""
    content = item.get("content")
    return isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping)
        and "type" not in part
        and any(part.get(name) is not None for name in (*_BEDROCK_BLOCKS, *MEDIA_PARTS))
        for part in content
    )


_BEDROCK_BLOCKS = ("toolUse", "toolResult", "reasoningContent", "cachePoint")


def messages_from_bedrock(item: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return a message of Bedrock's as messages: calls as `tool_calls`, each tool result as a message of its own.

    Raises:
        DataError: it has blocks that are not text, calls, their results or reasoning.
    """
    read = _TurnParts()
    for n, part in enumerate(item["content"]):
        _read_block(part, read, f"{field}.content[{n}]")
    others = {key: value for key, value in item.items() if key not in ("role", "content")}
    return read.messages(item.get("role"), others)


def _read_block(part: Any, read: _TurnParts, place: str) -> None:
    """Add everything that a block of Bedrock's says."""
    block = part if isinstance(part, Mapping) else {}
    if _media_of(block):
        raise DataError("the row has media, but only text is trained on", code="E4148", field=place, help=TEXT_ALONE)
    known = block.get("cachePoint") is not None  # where Bedrock's server keeps its cache: no text
    if isinstance(block.get("text"), str):
        known = True
        read.texts.append(block["text"])
    if isinstance(call := block.get("toolUse"), Mapping):
        known = True
        call_id = {"id": call["toolUseId"]} if call.get("toolUseId") else {}
        function = {"name": call.get("name"), "arguments": call.get("input") or {}}
        read.calls.append({**call_id, "type": "function", "function": function})
    if isinstance(result := block.get("toolResult"), Mapping):
        known = True
        call_id = {"tool_call_id": result["toolUseId"]} if result.get("toolUseId") else {}
        read.results.append({"role": "tool", **call_id, "content": _result_text(result.get("content"), place)})
    if isinstance(thought := block.get("reasoningContent"), Mapping):
        known = True
        inner = thought.get("reasoningText")
        read.thoughts.append(_text(inner.get("text") if isinstance(inner, Mapping) else inner, place))
    if not known:
        raise DataError(
            f"expected a block with text, toolUse or toolResult, got {_keys(part)}", code="E4149", field=place
        )


def _result_text(content: Any, field: str) -> str:
    """Return the text of a tool's result: its texts, and its objects as JSON."""
    if not isinstance(content, (list, tuple)):
        return _text(content, field)
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    unread = (part for part in parts if _media_of(part) or (part.get("text") is None and "json" not in part))
    if found := next(unread, None):
        raise DataError(f"expected text or json, got {_keys(found)}", code="E4150", field=field, help=TEXT_ALONE)
    return "".join(text for part in parts for text in _result_texts(part))


def _result_texts(part: Mapping[str, Any]) -> Iterator[str]:
    if part.get("text") is not None:
        yield str(part["text"])
    if part.get("json") is not None or part.get("text") is None:
        yield json.dumps(part.get("json"), ensure_ascii=False)


def tools_from_clouds(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that a row declares as Vertex AI (`functionDeclarations`) or Bedrock (`toolConfig`) do; None if
    it has none of either.

    Raises:
        DataError: Vertex AI runs a tool itself, such as its search: the model writes no call of it.
    """
    config = row.get("toolConfig")
    if isinstance(config, Mapping) and isinstance(config.get("tools"), (list, tuple)):
        specs = [tool.get("toolSpec") for tool in config["tools"] if isinstance(tool, Mapping)]
        return [_bedrock_tool(spec) for spec in specs if isinstance(spec, Mapping)]
    tools = row.get("tools")
    if not isinstance(tools, (list, tuple)):
        return None
    tools = [tool for tool in tools if isinstance(tool, Mapping)]
    if not any(name in tool for tool in tools for name in (*_DECLARATIONS, *_VERTEX_TOOLS)):
        return None
    if own := next((name for tool in tools for name in _VERTEX_TOOLS if tool.get(name) is not None), None):
        raise DataError(
            f"{own} is run by Vertex AI itself, and no other server has it",
            code="E4970",
            field="tools",
            help="leave it out of tools, and rows whose answers rest on it; functionDeclarations are trained on",
        )
    return [
        {key: _lower_types(value) if key == "parameters" else value for key, value in declaration.items()}
        for tool in tools
        for name in _DECLARATIONS
        for declaration in tool.get(name) or ()
        if isinstance(declaration, Mapping)
    ]


_DECLARATIONS = ("functionDeclarations", "function_declarations")
_VERTEX_TOOLS = (
    "googleSearch", "google_search", "googleSearchRetrieval", "google_search_retrieval", "googleMaps", "google_maps",
    "retrieval", "codeExecution", "code_execution", "urlContext", "url_context",
)  # fmt: skip
"""Tools that Vertex AI runs itself; the null of a column beside functions says nothing."""


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
