"""Reductions of a well-formed graph: its skeleton, without coreference, without a role."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.metrics.penman_text import join_tokens, tokenize_penman


def concept_skeleton(text: str) -> str:
    """Write the tree of concepts, roles and constants without variables; a reentrant node repeats its concept.

    >>> concept_skeleton("(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b :polarity -))")
    '(want-01 :ARG0 (boy) :ARG1 (go-02 :ARG0 (boy) :polarity -))'
    """
    concepts = _concepts(tokenize_penman(text))
    parts: list[str] = []
    for previous, token, following in _neighbours(tokenize_penman(text)):
        if previous.startswith(":") and token in concepts:
            parts += ["(", *concepts[token], ")"]
        elif token != "/" and not (previous == "(" and following == "/"):
            parts.append(token)
    return join_tokens(parts)


def without_coreference(text: str) -> str:
    """Write the graph with a new node wherever one is mentioned again, which is all that a skeleton can express.

    >>> without_coreference("(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b))")
    '(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 (b2 / boy)))'
    """
    tokens = tokenize_penman(text)
    concepts = _concepts(tokens)
    variables = set(concepts)
    parts: list[str] = []
    for previous, token, _ in _neighbours(tokens):
        if previous.startswith(":") and token in concepts:
            name = next(name for n in range(2, len(tokens) + 2) if (name := f"{token}{n}") not in variables)
            variables.add(name)
            parts += ["(", name, "/", *concepts[token], ")"]
        else:
            parts.append(token)
    return join_tokens(parts)


def without_role(text: str, role: str) -> str:
    """Write the graph without a role and its values.

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
    """Return variable → the words of its concept."""
    concepts: dict[str, list[str]] = {}
    for position, token in enumerate(found):
        if token == "/" and position:
            words = concepts[found[position - 1]] = []
            for word in found[position + 1 :]:
                if word in "()/" or word.startswith(":"):
                    break
                words.append(word)
    return concepts


def _neighbours(found: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each token with its predecessor and successor."""
    return zip(["", *found], found, [*found[1:], ""], strict=False)
