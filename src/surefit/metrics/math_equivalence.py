"""Equivalence of two answers to a mathematics problem, by the two judges behind published scores.

- `is_equivalent`: string normalization alone, as in the MATH paper (hendrycks/math, `is_equiv`): "1,000" is not "1000".
- `same_value`: what PRM800K's `grade_answer` accepts beyond that: "1,000" is "1000", "50%" is "50", "(x+1)^2" is
  "x^2+2x+1"; but an unreduced fraction is wrong, and where one answer is an integer the other must be the same one.

Reimplemented from their behavior; tests/parity/test_math.py has the recorded verdicts. Nothing is evaluated as Python:
the parser below reads expressions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from surefit.core.packaging import require_import

# ---------------------------------------------------------------- string normalization (hendrycks/math)

_DROPPED = ("\n", "\\!")
_REPLACED = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
_MARKS = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def is_equivalent(given: str, gold: str) -> bool:
    """Return whether both are equal after `normalize_answer`; where one cannot be normalized, whether they are equal as
    texts.
    """
    try:
        return normalize_answer(given) == normalize_answer(gold)
    except ValueError:
        return given == gold


def normalize_answer(answer: str) -> str:
    """Return the answer without spaces, units, degree and dollar signs, with fractions and roots in one notation.

    Raises:
        ValueError: two units, or a fraction or a root without an argument.
    """
    text = answer
    for mark in _DROPPED:
        text = text.replace(mark, "")
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for mark in _MARKS:
        text = text.replace(mark, "")
    text = _without_unit(text).replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, sign, value = text.partition("=")
    if sign and "=" not in value and len(name) <= 2:
        text = value
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    return _slash_as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    number_text, *unit_texts = text.split("\\text{ ")
    if len(unit_texts) > 1:
        raise ValueError("two units")
    return number_text


def _braced_roots(text: str) -> str:
    first, *arguments = text.split("\\sqrt")
    if "" in arguments:
        raise ValueError("a root of nothing")
    return first + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in arguments)


def _braced_fractions(text: str) -> str:
    first, *arguments = text.split("\\frac")
    result = first
    for part in arguments:
        if not part:
            raise ValueError("a fraction of nothing")
        if part[0] == "{":
            result += "\\frac" + part
        elif len(part) < 2:
            return text
        else:
            denominator = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            result += f"\\frac{{{part[0]}}}{denominator}"
    return result


def _slash_as_fraction(text: str) -> str:
    """Convert 7/4 to a fraction; not 07/4, not x/4."""
    match = re.fullmatch(r"(-?[0-9]+)/(-?[0-9]+)", text)
    if match is None or any(str(int(part)) != part for part in match.groups() if len(part) < 1000):
        return text
    return f"\\frac{{{match[1]}}}{{{match[2]}}}"


# ---------------------------------------------------------------- equal values (openai/prm800k)

_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month",
    "year", "foot", "feet", "inch", "yard",
)  # fmt: skip
_UNIT = re.compile("|".join(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?" for unit in _UNITS))
_WORDS = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_BRACKETS = "()[]"
_REDUCIBLE = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_TOO_HARD = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+|\*\*")


def same_value(given: str, gold: str) -> bool:
    """Return whether `given` is correct by PRM800K's rules."""
    if is_equivalent_mathd(given, gold):
        return True
    given_text, gold_text = _simplified(given), _simplified(gold)
    if given_text == gold_text:
        return True
    if not given_text or not gold_text:
        return False
    given_elements, gold_elements = _elements(given_text), _elements(gold_text)
    if len(given_elements) != len(gold_elements):
        return False
    if len(gold_elements) > 1 and (given_text[0], given_text[-1]) != (gold_text[0], gold_text[-1]):
        return False
    return all(_same_element(a, b) for a, b in zip(given_elements, gold_elements, strict=True))


def is_equivalent_mathd(given: str, gold: str) -> bool:
    """Return `is_equivalent` of both with one enclosing \\text{…} removed first; never raises."""

    def form(text: str) -> str:
        match = re.fullmatch(r"\\text\{(.+?)\}", text.strip())
        inner = match[1].strip() if match else text.strip()
        try:
            return normalize_answer(inner)
        except ValueError:
            return inner

    return form(given) == form(gold)


def _same_element(given: str, gold: str) -> bool:
    if _REDUCIBLE.fullmatch(given) and _REDUCIBLE.fullmatch(gold):
        return given == gold
    if _is_integer(given) != _is_integer(gold):
        return False
    return _difference_is_zero(gold, given)


def _simplified(answer: str) -> str:
    match = re.search(r"^\\text\{(.+?)\}$", answer)
    text = match[1] if match else answer
    text = text.replace("\\%", "").replace("\\$", "").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in _WORDS:
        text = text.replace(word, power)
    text = _UNIT.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (number := _number(text)) is not None and _whole(number):
        text = str(round(number))
    if "\\" in text:
        text = _plain(text)
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 1 1/2
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(round(float(text.replace(",", "")))) if _is_integer(text) else text


_SYMBOLS = {
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "cdot": "*",
    "times": "*",
    "in": "∈",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
    "ne": "≠",
    "neq": "≠",
    "pm": "±",
    "circ": "∘",
    "quad": "  ",
    "qquad": "    ",
}
_STYLES = frozenset(
    (
        "left",
        "right",
        "text",
        "mbox",
        "textbf",
        "textit",
        "textrm",
        "mathrm",
        "mathbf",
        "mathbb",
        "mathcal",
        "operatorname",
        "boxed",
        "fbox",
        "displaystyle",
        "rm",
        "bf",
        "it",
        "big",
        "Big",
        "bigg",
        "Bigg",
    )
)
_SPACES = {"\\": "\n", ",": " ", ";": " ", ":": " ", " ": " "}
"""Commands that leave a space, which makes two numbers a mixed one: 5\\,000 is 5 + 0 and not 5000."""
_TOKEN = re.compile(r"\\([A-Za-z]+)|\\(.)|(\{)|(\})|(.)", re.DOTALL)


def _plain(latex: str) -> str:
    """Convert LaTeX to plain text: fractions as a/b, roots as sqrt(a), no styles."""
    tokens = list(_TOKEN.finditer(re.sub(r"\\[dt]frac", r"\\frac", latex).replace("\\frac", " \\frac")))
    position = 0

    def read_argument() -> str:
        """Read the next argument: a group in braces, or one token."""
        nonlocal position
        while position < len(tokens) and tokens[position][0].isspace():
            position += 1
        if position >= len(tokens):
            return ""
        return read_token()

    def read_token() -> str:
        nonlocal position
        token = tokens[position]
        position += 1
        if token[3]:
            parts = []
            while position < len(tokens) and not tokens[position][4]:
                parts.append(read_token())
            position += 1
            return "".join(parts)
        return _command(token, read_argument)

    parts = []
    while position < len(tokens):
        parts.append(read_token())
    return "".join(parts).strip()


def _command(token: re.Match[str], argument: Callable[[], str]) -> str:
    if token[1] == "frac":
        return f"{argument()}/{argument()}"
    if token[1] == "sqrt":
        return f"sqrt({argument()})"
    if token[1] in ("begin", "end"):
        argument()
        return ""
    if token[1] is not None:
        return "" if token[1] in _STYLES else _SYMBOLS.get(token[1]) or _letter(token[1])
    if token[2] is not None:
        return token[2] if token[2] in "%$&#_" else _SPACES.get(token[2], "")
    return "" if token[4] else token[0]


def _letter(command: str) -> str:
    """Convert \\theta to θ; a command that is no letter keeps its name, so that it equals only itself."""
    try:
        return unicodedata.lookup(f"GREEK {'SMALL' if command.islower() else 'CAPITAL'} LETTER {command.upper()}")
    except KeyError:
        return command


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e300 else None


def _whole(value: float) -> bool:
    return abs(value - round(value)) <= 1e-7


def _without_separators(text: str) -> str:
    while (joined := re.sub(r"(\d),(\d\d\d)($|\D)", r"\1\2\3", text)) != text:
        text = joined
    return text


def _is_integer(text: str) -> bool:
    value = _number(_without_separators(text))
    return value is not None and _whole(value)


def _elements(text: str) -> list[str]:
    """Split a tuple or an interval into its members; anything else is one element."""
    text = _without_separators(text)
    inner = text[1:-1]
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not set(inner) & set(_BRACKETS):
        return [element.strip() for element in inner.split(",")]
    return [text]


# ---------------------------------------------------------------- expressions

MAX_EXPRESSION = 200
"""Longest expression in characters; longer ones are equal only as text. Simplifying has no bound of its own."""


def _difference_is_zero(gold: str, given: str) -> bool:
    difference = f"({gold})-({given})"
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > 2 or _TOO_HARD.search(difference) or len(difference) > MAX_EXPRESSION:
        return False
    require_import("sympy")
    import sympy  # type: ignore[import-untyped,unused-ignore]  # half a second that most answers do not need

    try:
        return bool(sympy.simplify(_Expression(difference, sympy).read()) == 0)
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
        return False


class _Expression:
    """Parser of sums, products and powers, with the multiplication sign omitted as people do: 2x, 3(x+1), xy."""

    def __init__(self, text: str, sympy: Any) -> None:
        self.sympy = sympy
        self.tokens: list[str] = re.findall(r"\d+\.?\d*|\.\d+|sqrt|pi|[^\W\d_]|[-+*/^()]|\S", text)
        self.place = 0

    def read(self) -> Any:
        value = self.sum()
        if self.place < len(self.tokens):
            raise ValueError(f"unexpected {self.tokens[self.place]!r}")
        return value

    def next_is(self, *tokens: str) -> bool:
        return self.place < len(self.tokens) and self.tokens[self.place] in tokens

    def take(self) -> str:
        if self.place >= len(self.tokens):
            raise ValueError("the expression ends too early")
        self.place += 1
        return self.tokens[self.place - 1]

    def sum(self) -> Any:
        value = self.product()
        while self.next_is("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Any:
        value = self.signed()
        while self.place < len(self.tokens) and not self.next_is("+", "-", ")"):
            if self.next_is("*", "/"):
                value = value * self.signed() if self.take() == "*" else value / self.signed()
            else:
                value = value * self.power()
        return value

    def signed(self) -> Any:
        if self.next_is("+", "-"):
            return self.signed() if self.take() == "+" else -self.signed()
        return self.power()

    def power(self) -> Any:
        base = self.atom()
        return base ** self.signed() if self.next_is("^") and self.take() else base

    def atom(self) -> Any:
        token = self.take()
        if token == "(":
            value = self.sum()
            if self.take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if token == "sqrt":
            return self.sympy.sqrt(self.atom())
        if token == "pi":
            return self.sympy.pi
        if token[0].isdigit() or token[0] == ".":
            return self.sympy.Float(token) if "." in token else self.sympy.Integer(token)
        if token.isalpha():
            return self.sympy.Symbol(token)
        raise ValueError(f"unexpected {token!r}")
