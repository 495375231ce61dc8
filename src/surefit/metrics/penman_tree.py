"""A sound graph with something left out: its skeleton, one role, the identity of what is mentioned twice."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.metrics.penman_text import join_tokens, tokenize_penman


def concept_skeleton(text: str) -> str:
    """The tree of concepts, roles and constants without variables; what is mentioned again is its concept again.

    >>> concept_skeleton("(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b :polarity -))")
    '(want-01 :ARG0 (boy) :ARG1 (go-02 :ARG0 (boy) :polarity -))'
    """
    concepts = _concepts(tokenize_penman(text))
    parts: list[str] = []
    for before, token, after in _neighbours(tokenize_penman(text)):
        if before.startswith(":") and token in concepts:
            parts += ["(", *concepts[token], ")"]
        elif token != "/" and not (before == "(" and after == "/"):
            parts.append(token)
    return join_tokens(parts)


def without_coreference(text: str) -> str:
    """The same graph with a node of its own wherever one is mentioned again: all that a skeleton can say.

    >>> without_coreference("(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b))")
    '(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 (b2 / boy)))'
    """
    found = tokenize_penman(text)
    concepts = _concepts(found)
    taken = set(concepts)
    parts: list[str] = []
    for before, token, _ in _neighbours(found):
        if before.startswith(":") and token in concepts:
            name = next(name for n in range(2, len(found) + 2) if (name := f"{token}{n}") not in taken)
            taken.add(name)
            parts += ["(", name, "/", *concepts[token], ")"]
        else:
            parts.append(token)
    return join_tokens(parts)


def without_role(text: str, role: str) -> str:
    """The same graph without a role and what it leads to.

    >>> without_role('(c / city :wiki "Q1858" :name (n / name :op1 "Hà" :op2 "Nội"))', ":wiki")
    '(c / city :name (n / name :op1 "Hà" :op2 "Nội"))'
    """
    parts: list[str] = []
    depth, dropping_at = 0, -1
    for token in tokenize_penman(text):
        if dropping_at == depth and (token == ")" or token.startswith(":")):
            dropping_at = -1
        depth += (token == "(") - (token == ")")
        if dropping_at < 0 and token.lower() == role:
            dropping_at = depth
        if dropping_at < 0:
            parts.append(token)
    return join_tokens(parts)


def _concepts(found: list[str]) -> dict[str, list[str]]:
    """Variable → the words of its concept."""
    concepts: dict[str, list[str]] = {}
    for place, token in enumerate(found):
        if token == "/" and place:
            words = concepts[found[place - 1]] = []
            for word in found[place + 1 :]:
                if word in "()/" or word.startswith(":"):
                    break
                words.append(word)
    return concepts


def _neighbours(found: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each token with the one before and the one after it."""
    return zip(["", *found], found, [*found[1:], ""], strict=False)
