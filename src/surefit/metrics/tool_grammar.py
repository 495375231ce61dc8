"""The answers that a row's tools allow, as a grammar: an array of calls with arguments of the right names and types.

Where a schema says something that is not known here, or that a grammar cannot say, more is allowed, never less: what
comes out is checked by the scorer anyway. Spacing is that of `json.dumps`, and arguments come in the order in which the
tool declares them, because no grammar of reasonable size says "any order, each at most once".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from surefit.metrics.ebnf import JSON_RULES, either, literal, repeated

MOST_REPEATS = 4096
"""A bound on a length or a number of items above this one is not said: a grammar writes repeats out."""
ANY_DEPTH = 5
"""Arrays and objects inside one another where a schema leaves the value open."""
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
    """EBNF of `[]` and every array of calls of these tools.

    Args:
        tools: in any of the shapes of `metrics.tool_schema`; what has none of them is left out.
    """
    rules = _Rules()
    calls = [call for tool in tools if (call := _call(rules, tool))]
    if not calls:
        return "\n".join(['root ::= "[]"', ""])
    rules.named["call"] = " | ".join(dict.fromkeys(calls))
    many = repeated("call", '", "', 1)
    return rules.text(f'"[" ({many})? "]"')


def _call(rules: _Rules, tool: Any) -> str | None:
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        tool = tool["function"]
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        return None
    arguments = rules.value(_parameters(tool.get("parameters")), SCHEMA_DEPTH)
    start = '{"name": ' + json.dumps(tool["name"], ensure_ascii=False) + ', "arguments": '
    return f'{literal(start)} {arguments} "}}"'


def _parameters(parameters: Any) -> dict[str, Any]:
    """A tool's parameters as a JSON schema of an object.

    In xLAM's shape they are the properties themselves, and required where they are neither called optional nor have a
    default.
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
    """Rules by name; a value's rule is made once for equal schemas."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self.known: dict[str, str] = {}

    def text(self, root: str) -> str:
        """The whole grammar."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self.named.items())]
        return "\n".join(lines) + "\n" + _open_values() + JSON_RULES

    def value(self, schema: Any, depth: int) -> str:
        """The name of the rule of a schema's values."""
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
            found = [_constant(option) for option in options]
        elif alternatives:
            found = [self.value(alternative, depth - 1) for alternative in alternatives]
        else:
            found = [self._of_kind(kind, inner, schema, options, depth) for kind, inner in kinds]
            found = found or [_any(ANY_DEPTH)]
        if schema.get("nullable") is True or ("default" in schema and schema["default"] is None):
            found.append("null")
        return either(list(dict.fromkeys(found)))

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
        least, most = _bounds(schema, "minItems", "maxItems")
        return f'"[" {repeated(self.value(items, depth - 1), literal(", "), least, most)} "]"'

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
        """Properties in order, any of the optional ones left out: `first` is what may follow nothing, `after` what may
        follow a property. Each level is a rule of its own, so that the grammar grows with their number only."""
        first, after = "", ""
        for pair, required in reversed(pairs):
            behind = f" {after}" if after else ""
            here, later = f"{pair}{behind}", f"{literal(', ')} {pair}{behind}"
            first = self._rule(here if required else f"{here} | {first}" if first else f"({here})?")
            after = self._rule(later if required else f"{later} | {after}" if after else f"({later})?")
        return first


def _kinds(written: Any) -> list[tuple[str, str]]:
    """A type as written → what it means here, each with the type of its items where that is written too; empty where
    any value is meant.

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
        alone = kind == "array" and "," not in inner
        return [(kind, inner if alone else "")] if kind else []
    names = _list(written) or []
    found = [kinds[0] for name in names if isinstance(name, str) and (kinds := _kinds(name))]
    return found if len(found) == len(names) else []


def _names_items(options: Sequence[Any], kinds: Sequence[tuple[str, str]]) -> bool:
    """An enum of single items beside the type array, as some of the leaderboard's tools have it, is for the items."""
    return [kind for kind, _ in kinds] == ["array"] and not any(isinstance(option, list) for option in options)


def _constant(value: Any) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _string(schema: Mapping[str, Any]) -> str:
    least, most = _bounds(schema, "minLength", "maxLength")
    if not least and most is None:
        return "string"
    return f'"\\"" char{{{least},{"" if most is None else most}}} "\\""'


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Two bounds; one that is not a usable number, or too large to be written out, is left out."""
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
    """Any JSON value, brackets inside brackets up to a depth that an answer needs."""
    lines = ["any0 ::= string | number | boolean | null"]
    for depth in range(1, ANY_DEPTH + 1):
        member = f"string {literal(': ')} any{depth - 1}"
        lines += [
            f"any{depth} ::= any0 | array{depth} | object{depth}",
            f'array{depth} ::= "[" {repeated(f"any{depth - 1}", literal(", "))} "]"',
            f'object{depth} ::= "{{" {repeated(f"({member})", literal(", "))} "}}"',
        ]
    return "\n".join(lines)
