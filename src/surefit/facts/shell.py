"""The parts of a shell script that can be read without running it: its commands, and variables that are constants."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

BROKEN = re.compile(r"\\[ \t]+(#.*)?$")
LONGEST = 4_000
"""Characters of one expanded command; a longer one is cut."""
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_ASSIGNED = re.compile(
    r"\s*(?:(?:export|readonly|local|declare(?:\s+-\w+)?)\s+)?([A-Za-z_]\w*)="
    r"(\"[^\"]*\"|'[^']*'|\$\(\(.*?\)\)|\$\(.*\)|`[^`]*`|[^\s;&|]*)"
)
_CASE = re.compile(r"\s*-[^\s()]*(?:\s*\|\s*-[^\s()]*)*\s*\)")
"""A line of `case` that begins with an option as its pattern: `--model)`."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^{}$]*))?\}|([A-Za-z_]\w*))")
_REPLACED = re.compile(r"\$\{([A-Za-z_]\w*)//([^/{}$*?\[]+)/([^{}$]*)\}")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_INSIDE = r"[^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*"
_SUBSTITUTION = re.compile(rf"\$\({_INSIDE}\)|`[^`]*`")
_QUOTED_VALUE = re.compile(r"""(?<==)(["'])([^"'\s]*)\1""")
_LISTS_GPUS = (
    r"nvidia-smi\b[^|\n]{0,80}?(?:-L\b|--list-gpus|--format=csv,noheader)[^|\n]{0,80}(?:\|\s*grep[^|\n]{0,80})?\|\s*wc"
)
_COUNTS_GPUS = re.compile(rf"{_LISTS_GPUS}\s+-l|torch\.cuda\.device_count\(\)")
MISCOUNTS_GPUS = (
    (re.compile(rf"{_LISTS_GPUS}\s*[)`]"), "wc without -l prints lines, words and characters"),
    (
        re.compile(r"nvidia-smi\b[^|\n]{0,80}--format=csv(?!,noheader)[^|\n]{0,80}\|\s*wc\s+-l"),
        "the header line is counted, too",
    ),
)
"""Commands that are meant to count GPUs and do not → what they print."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Command:
    """One command, its continued lines joined.

    Attributes:
        line: its first line, 1-based.
        text: its text without line breaks and comments.
        pieces: its lines as they are written.
        words: its words without quotes, after `Shell.expand`.
    """

    line: int
    text: str
    pieces: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def line_of(self, flag: str) -> int:
        """Return the line of an option (with underscores, without dashes); the first line if it is not found."""
        for i, piece in enumerate(self.pieces):
            if f"--{flag}" in piece or f"--{flag.replace('_', '-')}" in piece:
                return self.line + i
        return self.line

    def line_of_word(self, word: str) -> int:
        """Return the last line with a word; the first line if it is not found."""
        indices = [i for i, piece in enumerate(self.pieces) if word in piece.split()]
        return self.line + (indices[-1] if indices else 0)


def split_commands(text: str) -> tuple[list[Command], tuple[int, ...]]:
    """Split a script into its commands, and return the lines whose continuation a space or a comment breaks.

    A broken continuation is read as intended. Here-documents are left out: they are another program's text.
    """
    commands: list[Command] = []
    broken: list[int] = []
    pieces: list[str] = []
    heredoc_end: str | None = None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.rstrip("\r")
        if heredoc_end is not None:
            heredoc_end = None if line.strip() == heredoc_end else heredoc_end
            continue
        if line.lstrip().startswith("#") or (not line.strip() and not pieces):
            continue
        pieces.append(line)
        if _is_broken(line):
            broken.append(number)
        if not (line.endswith("\\") or _is_broken(line)):
            commands += _commands(number - len(pieces) + 1, pieces)
            pieces = []
            heredoc = _HEREDOC.search(line)
            heredoc_end = heredoc[2] if heredoc else None
    return commands, tuple(broken)


def options_alone(text: str) -> tuple[tuple[int, str], ...]:
    """Return (line, its first word) of lines that begin with an option and continue no other line.

    Left out are lines inside brackets (an array), inside quotes of several lines, or in a here-document.
    """
    options: list[tuple[int, str]] = []
    quote, depth, continued, heredoc_end = "", 0, False, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip("\r")
        if heredoc_end:
            heredoc_end = "" if line.strip() == heredoc_end else heredoc_end
            continue
        at_top_level = not quote and depth == 0
        if at_top_level and line.lstrip().startswith("#"):
            continued = False  # a comment ends the command that the line above would have continued
            continue
        option = re.match(r"\s*(--?[A-Za-z][\w-]*)", line)
        if option and at_top_level and not continued and not _CASE.match(line):
            options.append((number, option[1]))
        heredoc = _HEREDOC.search(line)
        heredoc_end = heredoc[2] if heredoc and at_top_level else ""
        quote, depth = _open_at_end(line, quote, depth)
        continued = line.endswith("\\") or _is_broken(line)
    return tuple(options)


def _open_at_end(line: str, quote: str, depth: int) -> tuple[str, int]:
    """Return the quote and the number of brackets that are open behind a line."""
    escaped = False
    for position, letter in enumerate(line):
        if escaped or (letter == "\\" and quote != "'"):
            escaped = not escaped
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'`":
            quote = letter
        elif letter == "#" and (position == 0 or line[position - 1].isspace()):
            break
        else:
            depth = max(0, depth + (letter in "({") - (letter in ")}"))
    return quote, depth


def _is_broken(line: str) -> bool:
    """Return whether a space or a comment follows the last backslash, except a space that is assigned (IFS=\\ )."""
    return bool(BROKEN.search(line)) and not re.fullmatch(r"\s*\w+=\\\s+", line)


def _commands(line: int, pieces: list[str]) -> list[Command]:
    """Return the commands on one joined line; the text inside $( ) is never split."""
    pieces = [piece.replace("\0", "") for piece in pieces]  # as the shell does; it is the placeholder below
    joined = " ".join(re.sub(r"\s#.*$", "", BROKEN.sub("", piece).rstrip("\\")) for piece in pieces)
    substitutions: list[str] = []

    def hide(found: re.Match[str]) -> str:
        substitutions.append(found[0])
        return f"\0{len(substitutions) - 1}\0"

    parts = re.split(r"&&|\|\||;|\|", _SUBSTITUTION.sub(hide, _ARITHMETIC.sub(hide, joined)))
    for _ in range(2):  # one inside another
        parts = [re.sub("\0(\\d+)\0", lambda match: substitutions[int(match[1])], part) for part in parts]
    return [Command(line, part.strip(), tuple(pieces)) for part in parts if part.strip()]


class Shell:
    """The variables of a script that are constants.

    Args:
        known: variables that are set from outside.
        gpus: GPUs of a node, the result of commands that count them.
    """

    def __init__(self, known: Mapping[str, str], gpus: int | None = None) -> None:
        self.known = dict(known)
        self.gpus = gpus
        self.assigned: dict[str, tuple[str | None, int]] = {}

    @property
    def constants(self) -> dict[str, tuple[str, int]]:
        """Variable → (its value, the line that sets it), where the script sets it to one constant."""
        values = {name: (value, line) for name, (value, line) in self.assigned.items() if value is not None}
        return {name: pair for name, pair in values.items() if "$" not in pair[0] and "`" not in pair[0]}

    def assign(self, command: Command) -> None:
        """Record a command's assignments; a variable that is set to two different values is no constant."""
        for name, raw in _assignments(command.text)[0]:
            value = self._read(raw)
            if name in self.assigned and self.assigned[name][0] != value:
                value = None
            self.assigned[name] = (value, command.line)

    def expand(self, command: Command) -> Command:
        """Return the command with its constants put in, its own assignments left out, and cut into words."""
        _, remainder = _assignments(command.text)
        text = self.substitute(remainder)
        text = _QUOTED_VALUE.sub(r"\2", _SUBSTITUTION.sub("$()", text))
        return replace(command, text=text, words=tuple(re.sub(r"[\"'(){}]", " ", text.replace("$()", "$")).split()))

    def _read(self, raw: str) -> str | None:
        if _COUNTS_GPUS.search(raw[:LONGEST]):
            return str(self.gpus) if self.gpus else None
        return self.substitute(raw.strip("\"'"))

    def substitute(self, text: str) -> str:
        """Return a text with the constants put in, its quotes kept."""
        for _ in range(4):
            previous = text
            text = _REPLACED.sub(self._replaced, text)
            text = _VARIABLE.sub(self._value, text)[:LONGEST]
            if self.gpus:
                text = _SUBSTITUTION.sub(self._counted, text)
            text = _ARITHMETIC.sub(self._arithmetic, text)
            if text == previous:
                break
        return text

    def _counted(self, found: re.Match[str]) -> str:
        return str(self.gpus) if _COUNTS_GPUS.search(found[0]) else found[0]

    def _replaced(self, found: re.Match[str]) -> str:
        value = self._get(found[1])
        return found[0] if value is None else value.replace(found[2], found[3])

    def _value(self, found: re.Match[str]) -> str:
        name = found[1] or found[3]
        value = self._get(name) if name in self.assigned or name in self.known else found[2]
        return found[0] if value is None else value

    def _get(self, name: str) -> str | None:
        return self.assigned[name][0] if name in self.assigned else self.known.get(name)

    def _arithmetic(self, found: re.Match[str]) -> str:
        names = re.sub(r"[A-Za-z_]\w*", lambda name: self._get(name[0]) or name[0], found[1])
        value = arithmetic(names)
        return found[0] if value is None else str(value)


def _assignments(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the (name, value) pairs before a command, and the command; `export A=1 B=2` is only pairs."""
    pairs = []
    while match := _ASSIGNED.match(text):
        pairs.append((match[1], match[2]))
        text = text[match.end() :]
        if text and not text[0].isspace():
            return pairs, ""
    return pairs, text.strip()


def arithmetic(text: str) -> int | None:
    """Compute whole numbers joined by + - * / %; None for any other text.

    >>> arithmetic("2 * (4 + 1)"), arithmetic("7 / 2"), arithmetic("1 / 0"), arithmetic("GPUS * 2")
    (10, 3, None, None)
    """
    if len(text) > 100 or not re.fullmatch(r"[\d\s+*/%()-]+", text):
        return None
    try:
        return _whole(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
    raise ValueError("not whole-number arithmetic")
