"""PENMAN text of models and corpora: the test whether it is well formed, repair, and spelling of concepts.

A repair never guesses at meaning. It closes what is open, quotes what needs quotes, renames a second node of the same
name, and reports which of these it did; a graph that would need more stays broken.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from surefit.core.packaging import require_import

logging.getLogger("penman").setLevel(logging.ERROR)  # it warns of every gap; this module returns gaps instead

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()/]|:[^\s()/":]*|[^\s()/":]+|"')
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
DEEPEST = 200
"""Largest nesting depth of nodes; sentences have fewer than 20."""


def tokenize_penman(text: str) -> list[str]:
    """Split into parentheses, slashes, roles (":ARG0"), strings with their quotation marks, and words.

    >>> tokenize_penman('(b / bé:domain(c / "a b"))')
    ['(', 'b', '/', 'bé', ':domain', '(', 'c', '/', '"a b"', ')', ')']
    """
    return _TOKEN.findall(text)


def one_line(text: str) -> str:
    """Write the graph on one line with single spaces, as the recipe trains on it. Words stay apart as they were.

    >>> one_line("(c / chu tich\\n    :domain(n / người))")
    '(c / chu tich :domain (n / người))'
    """
    return join_tokens(tokenize_penman(text))


def join_tokens(parts: list[str]) -> str:
    """Join tokens to text on one line."""
    text = " ".join(parts)
    return text.replace("( ", "(").replace(" )", ")")


def is_well_formed(text: str) -> bool:
    """Return whether the penman library reads the whole text as one complete graph.

    Two nodes may still share a variable: that is no error of form; `smatch.read_graph` rejects it.

    >>> is_well_formed("(w / want-01 :ARG0 (b / boy))"), is_well_formed("(w / want-01 :ARG0 (b / boy)")
    (True, False)
    >>> is_well_formed("(a / b) (c / d)"), is_well_formed("(c / chu tich)"), is_well_formed("(a / )")
    (False, False, False)
    """
    text = text.strip()
    depth = 0
    tokens = tokenize_penman(text)
    for position, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if depth > DEEPEST or (depth < 1 and position < len(tokens) - 1):
            return False
    if depth or not text.startswith("("):
        return False
    require_import("penman")
    import penman

    try:
        tree = penman.parse(text)
    except penman.PenmanError:
        return False
    nodes = tree.nodes()
    return bool(nodes) and all(_complete(variable, branches) for variable, branches in nodes)


def _complete(variable: str | None, branches: list[tuple[str, object]]) -> bool:
    if not variable or not branches or branches[0][0] != "/" or not branches[0][1]:
        return False
    return all(len(role) > 1 and target is not None for role, target in branches[1:])


class RepairedGraph(NamedTuple):
    """A repaired graph, and the kinds of repair: names of `KINDS`, each once."""

    text: str
    kinds: tuple[str, ...]


KINDS = {
    "around": "text before or after the graph was cut off",
    "parentheses": "parentheses were closed, or extra ones removed",
    "spacing": "joined tokens were separated",
    "words": "words of one concept were joined",
    "quotes": "a string was quoted, or its closing quotation mark added",
    "variables": "a node got a variable, or another one because two nodes had the same",
    "dangling": "a role without a value, or an unfinished node, was dropped",
}
"""Kinds of repair in `repair_graph`."""


@dataclass
class _Node:
    variable: str
    concept: str
    branches: list[tuple[str, _Node | str]] = field(default_factory=list)


class _Broken(Exception):
    """The graph needs more than a repair may do."""


def repair_graph(text: str) -> RepairedGraph | None:
    """Return the graph in `text` made well formed, or None where that would need a guess.

    >>> repair_graph("(b / bi kịch :domain(c / chó")
    RepairedGraph(text='(b / bikịch :domain (c / chó))', kinds=('parentheses', 'spacing', 'words'))
    >>> repair_graph('Here it is: (p / person :name Hà Nội :ARG0 (p / dog))')
    RepairedGraph(text='(p / person :name "Hà Nội" :ARG0 (p2 / dog))', kinds=('around', 'quotes', 'variables'))
    >>> repair_graph("(a / b (c / d))") is None  # which role?
    True
    """
    start = text.find("(")
    if start < 0:
        return None
    body, kinds = _closed_quotes(text[start:])
    tokens = tokenize_penman(body)
    try:
        reader = _Reader(tokens)
        root = reader.node(0)
    except _Broken:
        return None
    if root is None:
        return None
    kinds |= reader.kinds
    unread = tokens[reader.place :]
    if text[:start].strip() or set(unread) - {")"}:
        kinds.add("around")
    elif unread:
        kinds.add("parentheses")
    if re.search(r"[^\s(]:|[^\s(]\((?!\s*\))", _STRING.sub("s", body)):
        kinds.add("spacing")
    repaired = join_tokens(list(_written(root)))
    return RepairedGraph(repaired, tuple(kind for kind in KINDS if kind in kinds)) if is_well_formed(repaired) else None


def _closed_quotes(text: str) -> tuple[str, set[str]]:
    """Close an unpaired quotation mark before the next parenthesis or role."""
    if '"' not in _STRING.sub("", text):
        return text, set()
    closed = re.sub(r'"((?:[^"\\\n()]|\\.)*?)(?="|\s*\)|\s+:|\s*\n|\s*\Z)"?', r'"\1"', text)
    return closed, {"quotes"}


class _Reader:
    """Parser that passes over the tokens once and records what was missing."""

    def __init__(self, found: list[str]) -> None:
        self.tokens, self.place = found, 0
        self.kinds: set[str] = set()
        self.variables: set[str] = {word for word, slash in pairwise(found[1:]) if slash == "/" and word not in "()/"}
        self.defined: set[str] = set()

    def _words(self) -> list[str]:
        start = self.place
        while self.place < len(self.tokens) and self.tokens[self.place] not in "()/" and self._here()[0] != ":":
            self.place += 1
        return self.tokens[start : self.place]

    def _here(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def node(self, depth: int) -> _Node | None:
        """Parse the node at an opening parenthesis; return None where the text ends before there is a concept."""
        if depth > DEEPEST:
            raise _Broken
        self.place += 1
        variable, concept = self._head()
        if not concept:
            if self._here() not in ("", ")") or (variable and self._here() == ")"):
                raise _Broken
            self.place += 1
            self.kinds.add("dangling")
            return None
        node = _Node(self._defined(variable), concept)
        while self._here().startswith(":"):
            self._branch(node, depth)
        if self._here() not in ("", ")"):
            raise _Broken
        if not self._here():
            self.kinds.add("parentheses")
        self.place += 1
        return node

    def _head(self) -> tuple[str, str]:
        variable_words = self._words()
        if self._here() != "/":
            return (variable_words[0], "") if variable_words else ("", "")
        if len(variable_words) > 1:
            raise _Broken
        self.place += 1
        words = self._words()
        if len(words) > 1:
            if any('"' in word for word in words):
                raise _Broken
            self.kinds.add("words")
        return variable_words[0] if variable_words else "", "".join(words)

    def _defined(self, variable: str) -> str:
        """Return the variable, or a free one where it is used already, missing or a string."""
        name, number = variable.strip('"'), 2
        if not name or name in self.defined or name != variable:
            self.kinds.add("variables")
            stem = re.sub(r"\d+$", "", name) or "x"
            while (name := f"{stem}{number}") in self.variables | self.defined:
                number += 1
        self.defined.add(name)
        return name

    def _branch(self, node: _Node, depth: int) -> None:
        role = self._here()
        self.place += 1
        value: _Node | str | None
        if self._here() == "(":
            value = self.node(depth + 1)
        else:
            words = self._words()
            if len(words) > 1:
                self.kinds.add("quotes")
                words = ['"' + " ".join(words).replace('"', "") + '"']
            value = words[0] if words else None
        if value is None or len(role) < 2:
            self.kinds.add("dangling")
        else:
            node.branches.append((role, value))


def _written(node: _Node) -> Iterator[str]:
    yield from ("(", node.variable, "/", node.concept)
    for role, value in node.branches:
        yield role
        if isinstance(value, str):
            yield value
        else:
            yield from _written(value)
    yield ")"


def with_concepts(text: str, joiner: str) -> str:
    """Write the graph with the words of every concept joined by `joiner`: "_", " " or "" (glued).

    Words are separated by spaces and underscores, so glued words stay glued.

    >>> with_concepts("(b / bi_kịch :domain (c / con chó))", "")
    '(b / bikịch :domain (c / conchó))'
    >>> with_concepts("(b / bi_kịch :domain (c / con chó))", "_")
    '(b / bi_kịch :domain (c / con_chó))'
    """
    parts: list[str] = []
    words: list[str] | None = None
    for token in [*tokenize_penman(text), ""]:
        if words is not None and token and token not in "()/" and token[0] not in ':"':
            words += [word for word in token.split("_") if word] or [token]
            continue
        if words:
            parts.append(joiner.join(words))
        words = [] if token == "/" else None
        parts.append(token)
    return join_tokens(parts[:-1])
