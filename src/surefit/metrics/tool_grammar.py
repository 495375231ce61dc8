"""Grammar of the answers that a row's tools allow: an array of calls with arguments of the right names and types.

Where a schema contains something unknown, or that a grammar cannot express, more is allowed, never less: the scorer
checks the answer anyway. Spacing is as in `json.dumps`, and arguments come in the tool's order, because no grammar of
reasonable size expresses "any order, each at most once".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from surefit.metrics.ebnf import JSON_RULES, either, literal, repeated

MOST_REPEATS = 4096
"""Largest length or number of items that is enforced: a grammar spells out repetitions."""
ANY_DEPTH = 5
"""Largest nesting depth of arrays and objects where a schema leaves the value open."""
SCHEMA_DEPTH = 24
"""Levels of a schema that are read; below them any value is allowed."""

_SCALARS = {
    "string": ("string", "str", "text"),
    "integer": ("integer", "int", "long", "short", "byte", "bigint"),
    "number": ("number", "float", "double"),
    "boolean": ("boolean", "bool"),
    "null": ("null", "none", "nonetype"),
}
_TYPES = {name: rule for rule, names in _SCALARS.items() for name in names} | {
    name: kind
    for kind, names in {"array": ("array", "list", "tuple", "set", "sequence"), "object": ("object", "dict")}.items()
    for name in names
}


def calls_grammar(tools: Sequence[Any]) -> str:
    """Return the EBNF of `[]` and every array of calls of these tools.

    Args:
        tools: tools in any format of `metrics.tool_schema`; others are left out.
    """
    rules = _Rules()
    calls = [call for tool in tools if (call := _call(rules, tool))]
    if not calls:
        return "\n".join(['root ::= "[]"', ""])
    rules.named["call"] = " | ".join(dict.fromkeys(calls))
    call_list = repeated("call", '", "', 1)
    return rules.text(f'"[" ({call_list})? "]"')


def _call(rules: _Rules, tool: Any) -> str | None:
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        tool = tool["function"]
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        return None
    arguments = rules.value(_parameters(tool.get("parameters")), SCHEMA_DEPTH)
    start = '{"name": ' + json.dumps(tool["name"], ensure_ascii=False) + ', "arguments": '
    return f'{literal(start)} {arguments} "}}"'


def _parameters(parameters: Any) -> dict[str, Any]:
    """Return a tool's parameters as a JSON schema of an object.

    In xLAM's format they are the properties themselves, and required unless they are marked optional or have a default.
    """
    if not isinstance(parameters, Mapping):
        return {"type": "object", "properties": {}}
    if parameters.get("type") in ("object", "dict"):
        return {"properties": {}, **parameters, "type": "object"}
    required = [
        name
        for name, spec in parameters.items()
        if isinstance(spec, Mapping) and "default" not in spec and not _optional(spec.get("type"))
    ]
    return {"type": "object", "properties": dict(parameters), "required": required}


def _optional(written: Any) -> bool:
    return isinstance(written, str) and (
        written.rstrip().endswith("optional") or written.strip().lower().startswith("optional[")
    )


class _Rules:
    """Grammar rules by name; equal schemas share one rule."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self.known: dict[str, str] = {}

    def text(self, root: str) -> str:
        """Return the whole grammar."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self.named.items())]
        return "\n".join(lines) + "\n" + _open_values() + JSON_RULES

    def value(self, schema: Any, depth: int) -> str:
        """Return the name of the rule for a schema's values."""
        return self._rule(self._body(schema, depth))

    def _rule(self, body: str) -> str:
        if not body or body.isidentifier():
            return body
        if body not in self.known:
            self.known[body] = f"v{len(self.known)}"
            self.named[self.known[body]] = body
        return self.known[body]

    def _body(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth == 0:
            return _any(ANY_DEPTH)
        alternatives = next((v for key in ("anyOf", "oneOf") if (v := _list(schema.get(key)))), None)
        options = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else None)
        kinds = [] if alternatives or "$ref" in schema or "allOf" in schema else _kinds(schema.get("type"))
        if options and not _names_items(options, kinds):
            bodies = [_constant(option) for option in options]
        elif alternatives:
            bodies = [self.value(alternative, depth - 1) for alternative in alternatives]
        else:
            bodies = [self._of_kind(kind, inner, schema, options, depth) for kind, inner in kinds]
            bodies = bodies or [_any(ANY_DEPTH)]
        if schema.get("nullable") is True or ("default" in schema and schema["default"] is None):
            bodies.append("null")
        return either(list(dict.fromkeys(bodies)))

    def _of_kind(self, kind: str, inner: str, schema: Mapping[str, Any], options: Any, depth: int) -> str:
        if kind == "array":
            return self._array(schema, inner, options, depth)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "string":
            return _string(schema)
        return kind

    def _array(self, schema: Mapping[str, Any], inner: str, options: Any, depth: int) -> str:
        items = schema.get("items")
        if options:
            items = {"enum": options}
        elif not isinstance(items, Mapping) or not items:
            items = {"type": inner} if inner else {}
        min_items, max_items = _bounds(schema, "minItems", "maxItems")
        return f'"[" {repeated(self.value(items, depth - 1), literal(", "), min_items, max_items)} "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        extra = schema.get("additionalProperties")
        if not isinstance(properties, Mapping) or (not properties and "properties" not in schema):
            return f"object{ANY_DEPTH}"
        if extra is True or isinstance(extra, Mapping) or "patternProperties" in schema:
            return f"object{ANY_DEPTH}"
        required = _list(schema.get("required")) or []
        pairs = [
            (f"{literal(json.dumps(name, ensure_ascii=False) + ': ')} {self.value(spec, depth - 1)}", name in required)
            for name, spec in properties.items()
        ]
        return " ".join(['"{"', self._members(pairs), '"}"'])

    def _members(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return the rule for properties in order, with any of the optional ones left out: `first` matches what may
        come first, `after` what may follow a property. Each level is a rule of its own, so that the grammar grows
        linearly.
        """
        first, after = "", ""
        for pair, required in reversed(pairs):
            tail = f" {after}" if after else ""
            leading, following = f"{pair}{tail}", f"{literal(', ')} {pair}{tail}"
            first = self._rule(leading if required else f"{leading} | {first}" if first else f"({leading})?")
            after = self._rule(following if required else f"{following} | {after}" if after else f"({following})?")
        return first


def _kinds(written: Any) -> list[tuple[str, str]]:
    """Parse a written type into grammar types, each with its written item type, if any; empty where any value is
    allowed.

    >>> _kinds("List[int], optional"), _kinds(["string", "null"]), _kinds("Union[int, str]"), _kinds("Callable")
    ([('array', 'int')], [('string', ''), ('null', '')], [('integer', ''), ('string', '')], [])
    """
    if isinstance(written, str):
        name = written.strip().removesuffix("optional").rstrip(" ,")
        outer, _, inner = name.partition("[")
        outer, inner = outer.strip().lower(), inner.removesuffix("]").strip()
        if outer == "optional":
            return [*_kinds(inner), ("null", "")] if _kinds(inner) else []
        if outer == "union" and "[" not in inner:
            return _kinds(inner.split(","))
        kind = _TYPES.get(outer)
        homogeneous = kind == "array" and "," not in inner
        return [(kind, inner if homogeneous else "")] if kind else []
    names = _list(written) or []
    all_kinds = [kinds[0] for name in names if isinstance(name, str) and (kinds := _kinds(name))]
    return all_kinds if len(all_kinds) == len(names) else []


def _names_items(options: Sequence[Any], kinds: Sequence[tuple[str, str]]) -> bool:
    """Return whether an enum belongs to the items: single values beside the type array, as in some leaderboard
    tools.
    """
    return [kind for kind, _ in kinds] == ["array"] and not any(isinstance(option, list) for option in options)


def _constant(value: Any) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _string(schema: Mapping[str, Any]) -> str:
    min_length, max_length = _bounds(schema, "minLength", "maxLength")
    if not min_length and max_length is None:
        return "string"
    return f'"\\"" char{{{min_length},{"" if max_length is None else max_length}}} "\\""'


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return two bounds; one that is not a usable number, or too large to be spelled out, is left out."""
    low, high = (
        value if isinstance(value := schema.get(name), int) and 0 <= value <= MOST_REPEATS else None
        for name in (least, most)
    )
    if low is not None and high is not None and low > high:
        return 0, None
    return low or 0, high


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) and value else None


def _any(depth: int) -> str:
    return f"any{depth}"


def _open_values() -> str:
    """Return the rules for any JSON value, nested up to a depth that an answer needs."""
    lines = ["any0 ::= string | number | boolean | null"]
    for depth in range(1, ANY_DEPTH + 1):
        member = f"string {literal(': ')} any{depth - 1}"
        lines += [
            f"any{depth} ::= any0 | array{depth} | object{depth}",
            f'array{depth} ::= "[" {repeated(f"any{depth - 1}", literal(", "))} "]"',
            f'object{depth} ::= "{{" {repeated(f"({member})", literal(", "))} "}}"',
        ]
    return "\n".join(lines)
