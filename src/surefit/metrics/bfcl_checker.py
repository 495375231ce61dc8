"""Check of function calls: the Berkeley Function-Calling Leaderboard's AST checker, reimplemented from its rules.

Reference: ShishirPatil/gorilla, berkeley-function-call-leaderboard, commit 6ea5797 (2026-03-23), Apache-2.0; its rules
for Python (the Java and JavaScript categories, whose arguments arrive as source text, are left out, and so is the
`underscore_to_dot` renaming for some models). Where the checker is arguably wrong, this one is wrong in the same way:
docs/recipes/function-calling.md lists the cases.

A *call* is `{"name": str, "arguments": {parameter: value}}`. A *function* is the leaderboard's document: `name`, and
`parameters` with `properties` and `required`. An *answer* is `{name: {parameter: [acceptable values]}}`; `""` among the
values means that the parameter may be omitted. Every check returns None if all is correct, else the leaderboard's
`error_type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Call = Mapping[str, Any]
Function = Mapping[str, Any]
Answer = Mapping[str, Mapping[str, Sequence[Any]]]

_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
_IGNORED_IN_STRINGS = str.maketrans("'", '"', " ,./-_*^")


def check_calls(
    functions: Sequence[Function], calls: Sequence[Call], answers: Sequence[Answer], category: str
) -> str | None:
    """Check all calls of one answer.

    Args:
        functions: the documents of the available functions; every function in `answers` is among them.
        calls: the model's calls, values of any type.
        answers: the gold calls, one entry per call.
        category: the leaderboard's category: with "parallel" any number of calls in any order; with "multiple" one call
            of the function in the answer; otherwise one call of `functions[0]`.
    """
    if "parallel" in category:
        return _check_parallel(functions, calls, answers)
    multiple = "multiple" in category
    if len(calls) != 1:
        return f"{'multiple' if multiple else 'simple'}_function_checker:wrong_count"
    function = _named_in(answers[0], functions) if multiple else functions[0]
    return _check_call(function, calls[0], answers[0])


def _check_parallel(functions: Sequence[Function], calls: Sequence[Call], answers: Sequence[Answer]) -> str | None:
    """Match each answer in turn with the first unused call that passes; a match is not revised."""
    if len(calls) != len(answers):
        return "parallel_function_checker_no_order:wrong_count"
    unused = list(calls)
    for answer in answers:
        function = _named_in(answer, functions)
        match = next((n for n, call in enumerate(unused) if _check_call(function, call, answer) is None), None)
        if match is None:
            return "parallel_function_checker_no_order:cannot_find_match"
        del unused[match]
    return None


def _named_in(answer: Answer, functions: Sequence[Function]) -> Function:
    return next(function for function in functions if function["name"] in answer)


def _check_call(function: Function, call: Call, answer: Answer) -> str | None:
    (acceptable,) = answer.values()
    properties, arguments = function["parameters"]["properties"], call["arguments"]
    if call["name"] != function["name"]:
        return "simple_function_checker:wrong_func_name"
    if any(name not in arguments for name in function["parameters"]["required"]):
        return "simple_function_checker:missing_required"
    for name, value in arguments.items():
        if name not in properties or name not in acceptable:
            return "simple_function_checker:unexpected_param"
        error = _check_argument(properties[name], value, acceptable[name])
        if error:
            return error
    if any(name not in arguments and "" not in values for name, values in acceptable.items()):
        return "simple_function_checker:missing_optional"
    return None


def _check_argument(schema: Mapping[str, Any], value: Any, acceptable: Sequence[Any]) -> str | None:
    declared = _TYPES[schema["type"]]
    items = _TYPES.get(schema.get("items", {}).get("type")) if declared is list else None
    if schema["type"] == "tuple" and isinstance(value, tuple):
        value = list(value)
    if declared is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    error = _check_type(declared, items, value, acceptable)
    if error:
        return error
    kind = type(value)
    if kind is not declared or _first_type(acceptable) not in (None, declared):
        return None if value in acceptable else "value_error:others"
    if declared is dict:
        return _check_dict(value, acceptable)
    if declared is list and items is dict:
        return _check_dicts(value, acceptable)
    if declared is list:
        return _check_list(value, acceptable)
    if declared is str:
        strings = [_plain(option) for option in acceptable if isinstance(option, str)]
        return None if _plain(value) in strings else "value_error:string"
    return None if value in acceptable else "value_error:others"


def _check_type(declared: type, items: type | None, value: Any, acceptable: Sequence[Any]) -> str | None:
    """Check for the declared type, or that of the first acceptable value: then the value counts as a variable's
    name.
    """
    kind = type(value)
    if kind is not declared:
        return None if kind is _first_type(acceptable) else "type_error:simple"
    if items is None or any(_items_fit(items, value, option) for option in acceptable):
        return None
    return "type_error:nested" if acceptable else "type_error:simple"


def _items_fit(items: type, value: Sequence[Any], option: Any) -> bool:
    """Return whether every item has the declared type or that of the option's first item; an option that is no list
    fits.
    """
    return not isinstance(option, list) or all(_check_type(items, None, item, option) is None for item in value)


def _first_type(acceptable: Sequence[Any]) -> type | None:
    return next((type(option) for option in acceptable if option != ""), None)


def _check_list(value: list[Any], acceptable: Sequence[Any]) -> str | None:
    plain = [_plain(item) for item in value]
    # A string among the options counts as the list of its characters, so that "" accepts the empty list.
    options = [[_plain(item) for item in option] for option in acceptable if isinstance(option, (list, str))]
    return None if plain in options else "value_error:list/tuple"


def _check_dict(value: Any, acceptable: Sequence[Any]) -> str | None:
    error: str | None = "dict_checker:unclear"
    for option in acceptable:
        if option == "":
            continue
        error = _check_dict_option(value, option)
        if error is None:
            return None
    return error


def _check_dict_option(value: Any, option: Any) -> str | None:
    if not isinstance(value, dict) or not isinstance(option, dict):
        return "value_error:dict_key"
    # An option whose values are no lists accepts nothing; the official checker raises on it.
    option = {key: values if isinstance(values, (list, str)) else [] for key, values in option.items()}
    if any(key not in value and "" not in values for key, values in option.items()):
        return "value_error:dict_key"
    for key, item in value.items():
        if key not in option:
            return "value_error:dict_key"
        if _plain(item) not in [_plain(accepted) for accepted in option[key]]:
            return "value_error:dict_value"
    return None


def _check_dicts(value: list[Any], acceptable: Sequence[Any]) -> str | None:
    error: str | None = "list_dict_checker:unclear"
    for option in acceptable:
        if not isinstance(option, (list, str)) or len(option) != len(value):
            error = "value_error:list_dict_count"
            continue
        errors = (_check_dict(item, [expected]) for item, expected in zip(value, option, strict=True))
        error = next((message for message in errors if message), None)
        if error is None:
            return None
    return error


def _plain(value: Any) -> Any:
    """Normalize a string: no case, spaces or punctuation , . / - _ * ^ (and ' as "); return other values unchanged."""
    return value.translate(_IGNORED_IN_STRINGS).lower() if isinstance(value, str) else value
