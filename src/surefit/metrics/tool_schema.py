"""A row's tools, in any data set's format, as the function documents of the checker.

Three formats are known:

- xLAM: `parameters` is `{name: {"description", "type", "default"?}}`, the type a Python annotation (`List[int]`,
  `"str, optional"`);
- OpenAI: `{"type": "function", "function": {"name", "parameters": JSON Schema}}`, or that inner object alone;
- the Berkeley leaderboard: the same with `"type": "dict"` and Gorilla's type names.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from surefit.core.errors import DataError
from surefit.metrics.strict_json import json_kind, strict_json

_LEADERBOARD_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "float",
    "number": "float",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "set": "array",
    "array": "array",
    "tuple": "tuple",
    "dict": "dict",
    "object": "dict",
}
"""Leaderboard type names; everything else (`Any`, `Union[…]`, a missing type) is "any": the checker then uses the gold
value's type.
"""


def function_document(tool: Any, where: str = "tools") -> dict[str, Any]:
    """Return a tool as `{"name", "parameters": {"properties": {name: {"type", "items"?, "default"?}}, "required":
    […]}}`.

    Args:
        tool: the tool from its row.
        where: location for errors, for example `tools[2]`.

    Raises:
        DataError: it has none of the three formats above; `field` is the location.
    """
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        tool, where = tool["function"], f"{where}.function"
    if not isinstance(tool, dict):
        raise DataError(f"a tool is {json_kind(tool)}, not an object", code="E7078", field=where, help=_HELP)
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not name:
        raise DataError("the tool has no name", code="E7079", field=f"{where}.name", help=_HELP)
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise DataError(
            f"the parameters of {name!r} are {json_kind(parameters)}, not an object",
            code="E7080",
            field=f"{where}.parameters",
            help=_HELP,
        )
    properties, required = _properties_and_required(parameters, f"{where}.parameters")
    return {"name": name, "parameters": {"properties": properties, "required": required}}


_HELP = (
    'write a tool as {"name": …, "description": …, "parameters": {…}}, the parameters as in xLAM '
    '({"city": {"type": "str", "description": …}}) or as JSON Schema ({"type": "object", "properties": …}); '
    "a null here usually means that a table schema merged the rows' different tools: store tools as JSON text"
)


def _properties_and_required(parameters: dict[str, Any], where: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    # An xLAM function may have a parameter called "type"; then the value is an object, never a string.
    is_schema = parameters.get("type") in ("object", "dict")
    specs = (parameters.get("properties") or {}) if is_schema else parameters
    required = (parameters.get("required") or []) if is_schema else None
    if not isinstance(specs, dict) or not isinstance(required, (list, type(None))):
        raise DataError(
            "the schema's properties or required have the wrong type", code="E7081", field=where, help=_HELP
        )
    properties: dict[str, dict[str, Any]] = {}
    optional = set()
    for name, spec in specs.items():
        if not isinstance(spec, dict):
            problem = f"the parameter {name!r} is {json_kind(spec)}, not an object"
            raise DataError(problem, code="E7082", field=f"{where}.{name}", help=_HELP)
        properties[name], is_optional = _property(spec)
        if is_optional:
            optional.add(name)
    if required is None:
        required = [name for name in properties if name not in optional]
    return properties, required


def _property(spec: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return one parameter in the leaderboard's format, and whether xLAM's conventions make it optional."""
    kind, item_kind, optional = _read_type(spec.get("type"))
    items = spec.get("items")
    if isinstance(items, dict):
        item_kind = _read_type(items.get("type"))[0]
    parameter: dict[str, Any] = {"type": kind}
    if item_kind != "any":
        parameter["items"] = {"type": item_kind}
    if "default" in spec:
        parameter["default"] = _typed_default(spec["default"], kind)
    return parameter, optional or "default" in spec


def _read_type(written: Any) -> tuple[str, str, bool]:
    """Parse a written type into (leaderboard type, item type, whether it is marked optional).

    >>> _read_type("List[int], optional"), _read_type("Optional[str]"), _read_type(["string", "null"])
    (('array', 'integer', True), ('string', 'any', True), ('string', 'any', False))
    """
    if isinstance(written, list):
        written = next((name for name in written if name != "null"), None)
    if not isinstance(written, str):
        return "any", "any", False
    name = written.removesuffix("optional").rstrip(" ,")
    optional = name != written
    while name.lower().startswith("optional[") and name.endswith("]"):
        name, optional = name[len("optional[") : -1], True
    outer, _, inner = name.partition("[")
    inner = inner.removesuffix("]").partition("[")[0].partition(",")[0]
    kind = _LEADERBOARD_TYPES.get(outer.strip().lower(), "any")
    item_kind = _LEADERBOARD_TYPES.get(inner.strip().lower(), "any") if kind in ("array", "tuple") else "any"
    return kind, item_kind, optional


def _typed_default(default: Any, kind: str) -> Any:
    """Parse a default that xLAM writes as text: `{"type": "int", "default": "10"}` means 10."""
    if isinstance(default, str) and kind not in ("string", "any"):
        with suppress(ValueError):
            return strict_json(default)
    return default


def acceptable_answer(call: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return a gold call in the checker's answer format: its values are the only acceptable ones, except that an
    optional parameter with a default may be left out or have its default where gold leaves it out, and may be left out
    where gold has the default.

    >>> parameters = {"x": {"type": "int"}, "n": {"type": "int", "default": 3}}
    >>> function = function_document({"name": "f", "parameters": parameters})
    >>> acceptable_answer({"name": "f", "arguments": {"x": 1}}, function)
    {'f': {'x': [1], 'n': ['', 3]}}
    """
    properties, required = function["parameters"]["properties"], function["parameters"]["required"]
    arguments = call["arguments"]
    acceptable = {name: [_option(value, properties.get(name, {}))] for name, value in arguments.items()}
    for name, schema in properties.items():
        if name in required or "default" not in schema:
            continue
        if name not in arguments:
            acceptable[name] = ["", _option(schema["default"], schema)]
        elif arguments[name] == schema["default"]:
            acceptable[name].append("")
    return {call["name"]: acceptable}


def _option(value: Any, schema: Mapping[str, Any]) -> Any:
    """Wrap the values of dicts in one-element lists, because the checker lists alternatives for every key of a dict."""
    kind, item_kind = schema.get("type"), schema.get("items", {}).get("type")
    if kind == "dict" and isinstance(value, dict):
        return {key: [inner] for key, inner in value.items()}
    if item_kind == "dict" and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [{key: [inner] for key, inner in item.items()} for item in value]
    return value
