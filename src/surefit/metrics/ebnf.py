"""Building blocks of grammars in the EBNF of xgrammar, vLLM and SGLang (GGML's BNF)."""

from __future__ import annotations

from collections.abc import Sequence

JSON_RULES = r"""
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f\x7f] | "\\" ["\\/bfnrt]
integer ::= "-"? ("0" | [1-9] [0-9]{0,18})
number ::= integer ("." [0-9]{1,18})? ([eE] [+-]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
"""
"""JSON's scalars without those that `strict_json` rejects: no `1e999`, no integer of a thousand digits, and no `\\u`
escape, which can be half of a pair. Every other text can be written as it is.
"""


def literal(text: str) -> str:
    r"""Write a text as a terminal.

    >>> print(literal('say "hé"\n'))
    "say \"hé\"\x0a"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() or ord(c) > 0x9F else f"\\x{ord(c):02x}" for c in escaped) + '"'


def either(parts: Sequence[str]) -> str:
    """Return the alternatives, in parentheses if there are several.

    >>> either(["a", "b"]), either(["a"])
    ('(a | b)', 'a')
    """
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def repeated(item: str, separator: str, least: int = 0, most: int | None = None) -> str:
    """Return `item` repeated `least` to `most` times, with a separator between.

    >>> repeated("x", '","', 0), repeated("x", '","', 2, 3)
    ('(x ("," x)*)?', 'x ("," x){1,2}')
    """
    if most == 0:
        return '""'
    bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    times = "*" if bounds == "{0,}" else bounds
    sequence = f"{item} ({separator} {item}){times}"
    return sequence if least else f"({sequence})?"
