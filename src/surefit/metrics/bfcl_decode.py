"""Calls written in Python syntax, `[f(x=1), g(y="a")]`, read as the Berkeley Function-Calling Leaderboard reads them.

The leaderboard (ShishirPatil/gorilla, commit 6ea5797, Apache-2.0) asks models for this syntax and hands arithmetic in
an argument to `eval`. Here nothing is ever evaluated by Python: the text is parsed to a syntax tree, and the few
operators that make sense on constants are folded by `_Folder` within fixed bounds. An argument whose arithmetic needs
more than that (a function call inside a sum, `9**9**9`) is refused, where the leaderboard would run it.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 100_000
MAX_DEPTH = 100
"""Syntax nodes inside syntax nodes: far above any real call, far below Python's recursion limit."""
MAX_BITS = 1_000
"""Bits of an integer; 1,000 of them still fit a float."""
MAX_FOLDED = 100_000
"""Characters and items that all the folded sums and products of one text may hold together."""


class DecodeError(ValueError):
    """The text is not a call, or a list of calls, in Python syntax within the bounds of this module."""


def decode_calls(text: str) -> list[dict[str, Any]]:
    """The calls in `text`, as `{"name": str, "arguments": {str: value}}`.

    Only keyword arguments are kept. Names without quotes (`true`, `x`) become strings, a call without keywords and a
    subscript become their source text, a call with keywords becomes `{name: arguments}`. The leaderboard's oddities are
    kept, because its scores contain them: any unary operator negates (`+3` is -3, `not True` is -1), `f(x)(y=2)` is a
    call of `""`, and `**kwargs` is a parameter named `null`.

    Raises:
        DecodeError: and nothing else.

    >>> decode_calls("[get_weather(city='Paris', days=1 + 2)]")
    [{'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 3}}]
    """
    if len(text) > MAX_CHARACTERS:
        raise DecodeError(f"{len(text):,} characters, more than the {MAX_CHARACTERS:,} that are read")
    body = _syntax_tree(text.strip().strip("'"))
    elements = [body] if isinstance(body, ast.Call) else getattr(body, "elts", None)
    if elements is None:
        raise DecodeError(f"a {type(body).__name__}, not a call or a list of calls")
    folder = _Folder()
    return [_call(element, folder) for element in elements]


def _syntax_tree(source: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence" and the like concern the model, not the user
            tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DecodeError(f"not Python syntax: {type(error).__name__}") from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree.body
    raise DecodeError(f"nested more than {MAX_DEPTH} deep")


def _call(node: ast.expr, folder: _Folder) -> dict[str, Any]:
    if not isinstance(node, ast.Call):
        raise DecodeError(f"a {type(node).__name__} where a call was expected")
    arguments = {keyword.arg or "null": _value(keyword.value, folder) for keyword in node.keywords}
    return {"name": _dotted_name(node.func), "arguments": arguments}


def _dotted_name(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _value(node: ast.expr | None, folder: _Folder) -> Any:
    match node:
        case ast.Constant():
            return "..." if node.value is ... else _bounded(node.value)
        case ast.Name():
            return node.id
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() | complex() as value)):
            return -_bounded(value)
        case ast.List():
            return [_value(item, folder) for item in node.elts]
        case ast.Tuple():
            return tuple(_value(item, folder) for item in node.elts)
        case ast.Dict():
            return _dict(node, folder)
        case ast.BinOp():
            return folder.fold(node)
        case ast.Call(keywords=[]) | ast.Subscript():
            return _source(node)
        case ast.Call():
            inner = _call(node, folder)
            return {inner["name"]: inner["arguments"]}
    raise DecodeError(f"a {type(node).__name__} as an argument")


def _dict(node: ast.Dict, folder: _Folder) -> dict[Any, Any]:
    try:
        return {_value(key, folder): _value(value, folder) for key, value in zip(node.keys, node.values, strict=True)}
    except TypeError:
        raise DecodeError("a key that is not a constant") from None


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except ValueError:
        raise DecodeError("an integer with too many digits") from None


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise DecodeError(f"an integer of {value.bit_length()} bits; at most {MAX_BITS} are read")
    return value


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise DecodeError("a power with too many digits")
    return base**exponent


def _shift_left(value: Any, places: Any) -> Any:
    if places > MAX_BITS:
        raise DecodeError("a shift by too many places")
    return value << places


_NUMERIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: _shift_left,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}


class _Folder:
    """Arithmetic on constants: numbers with every operator, strings, lists and tuples with `+` and `*` only.

    Every string or sequence it builds is paid for from one allowance, so that neither one product nor many of them can
    fill the memory.
    """

    def __init__(self) -> None:
        self.allowance = MAX_FOLDED

    def fold(self, node: ast.expr) -> Any:
        """The value of an arithmetic expression over constants; raises `DecodeError` on anything else."""
        try:
            return self._fold(node)
        except (TypeError, ArithmeticError, ValueError) as error:
            raise DecodeError(f"arithmetic: {error}") from None

    def _fold(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return _bounded(node.value)
            case ast.List():
                return [self._fold(item) for item in node.elts]
            case ast.Tuple():
                return tuple(self._fold(item) for item in node.elts)
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self._fold(node.operand))
            case ast.BinOp():
                return self._binary(type(node.op), self._fold(node.left), self._fold(node.right))
        raise DecodeError(f"arithmetic with a {type(node).__name__}")

    def _binary(self, op: type[ast.operator], left: Any, right: Any) -> Any:
        if isinstance(left, (int, float, complex)) and isinstance(right, (int, float, complex)):
            if op not in _NUMERIC:
                raise DecodeError(f"the operator {op.__name__}")
            return _bounded(_NUMERIC[op](left, right))
        if op is ast.Add:
            self._pay(_size(left) + _size(right))
            return left + right
        if op is ast.Mult:
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            self._pay(_size(sequence) * max(count, 0))
            return left * right
        raise DecodeError(f"the operator {op.__name__} on a {type(left).__name__}")

    def _pay(self, size: int) -> None:
        self.allowance -= size
        if self.allowance < 0:
            raise DecodeError(f"arithmetic that makes more than {MAX_FOLDED:,} characters or items")


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return 1 + sum(_size(item) for item in value)
    return 1
