"""The text of a `.env` file as names and values, as the package python-dotenv reads it without filling in variables."""

from __future__ import annotations

import re

_BINDING = re.compile(
    r"""\s*+(?:export[^\S\n]++)?+
    (?:'(?P<quoted_name>[^']+)'|(?P<name>(?!')[^=\#\s]++))
    [^\S\n]*+(?:=(?P<gap>[^\S\n]*+)
        (?:'(?P<single>(?:\\.|[^'\\])*+)'|"(?P<double>(?:\\.|[^"\\])*+)"|(?P<plain>(?!['"])[^\n]*+)))?+
    (?:[^\S\n]*\#[^\n]*)?[^\S\n]*$""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def parse_dotenv(text: str) -> dict[str, str | None]:
    """Return name → value, None for a name alone; other lines are left out, and a later value replaces an earlier one.

    >>> parse_dotenv("# keys\\nexport A=1 # one\\nB='it is #2'\\nC=\\"a\\\\tb\\"\\nD\\nE=")
    {'A': '1', 'B': 'it is #2', 'C': 'a\\tb', 'D': None, 'E': ''}
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    values: dict[str, str | None] = {}
    position = 0
    while position < len(text):
        binding = _BINDING.match(text, position)
        if binding is None:
            blank = len(text) - position - len(text[position:].lstrip())
            position = (text.find("\n", position + blank) + 1) or len(text)
            continue
        position = binding.end()
        values[binding["quoted_name"] or binding["name"]] = _value(binding)
    return values


def _value(binding: re.Match[str]) -> str | None:
    """Return the value of an assignment; None for a name alone."""
    if binding["single"] is not None:
        return re.sub(r"\\([\\'])", r"\1", binding["single"])
    if binding["double"] is not None:
        return re.sub(r"\\([\\'\"abfnrtv])", lambda found: _ESCAPES.get(found[1], found[1]), binding["double"])
    plain = binding["plain"]
    if plain is None:
        return None
    if binding["gap"] and plain.startswith("#"):
        return ""
    return re.sub(r"\s+#.*", "", plain).rstrip()
