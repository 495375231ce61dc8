"""Detectors of things that can be written in several ways, each valid by itself, and of which way a row uses.

A mix of two ways in one data set is the fault; the rule AUD033 compares the shares.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from surefit.core.units import truncate_text
from surefit.data.audit.detectors import DetectorMatch
from surefit.data.audit.detectors.parts import answer_text, find_answer

_GRAPH = re.compile(r"\s*\(\s*[^\s()/\"]+\s*/\s*[^\s()]")
_ROLE = re.compile(r"\s:[A-Za-z]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()/]|:[^\s()/"]*|[^\s()/":][^\s()/"]*|"')
_FINALS = {
    "final_hashes": re.compile(r"(?:^|\n)#### *(\S[^\n]*?)\s*\Z"),
    "final_letter_a": re.compile(r"(?:^|\n)A: *(\S[^\n]*?)\s*\Z"),
    "final_boxed": re.compile(r"\\boxed\s*\{([^{}]*)\}[^\n]{0,20}\Z"),
    "final_sentence": re.compile(r"[Tt]he (?:final )?answer is:?\s*(\S[^\n]*?)\s*\Z"),
}
_SEPARATED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_PLAIN = re.compile(r"(?<![\d.,])\d{4,}(?![\d,])")
_KEY = re.compile(r'"(?:[^"\\]|\\.)*":(\s?)')
_CODE_COLUMNS = ("code", "canonical_solution", "solution")
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_LONGEST_JSON = 100_000


class Graphs:
    """PENMAN graphs: whether they parse, and how a concept of several words is written."""

    names = ("graph", "graph_unparseable", "graph_spaced_concepts", "graph_underscored_concepts")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Match a graph, and its faults. A concept with a space is an error for one reader and joined by another; here
        it counts as a way of writing.
        """
        text = answer_text(row)
        if not _GRAPH.match(text) or not _ROLE.search(text):  # without a role it may be a fraction, (a / b)
            return
        graph = text[text.index("(") :]
        yield DetectorMatch("graph", index, truncate_text(" ".join(graph.split()), 40))
        tokens = _TOKEN.findall(graph)
        spaced, underscored = _concepts(tokens)
        if spaced:
            yield DetectorMatch("graph_spaced_concepts", index, f"the concept {spaced!r}")
        if underscored:
            yield DetectorMatch("graph_underscored_concepts", index, f"the concept {underscored!r}")
        problem = graph_problem(tokens)
        if problem:
            yield DetectorMatch("graph_unparseable", index, problem)


def _concepts(tokens: list[str]) -> tuple[str, str]:
    """Return (first concept of several words, first concept with an underscore); "" for none."""
    spaced = underscored = ""
    for place, token in enumerate(tokens):
        if token != "/":
            continue
        words = []
        for word in tokens[place + 1 :]:
            if word in "()/" or word[0] in ':"':
                break
            words.append(word)
        if len(words) > 1:
            spaced = spaced or " ".join(words)
        elif words and "_" in words[0]:
            underscored = underscored or words[0]
    return spaced, underscored


def graph_problem(tokens: list[str]) -> str:
    """Return what is wrong with these PENMAN tokens, apart from concepts of several words; "" where nothing is.

    A light check of common faults: parentheses, quotation marks, roles and nodes without their part.
    """
    depth = 0
    for place, token in enumerate(tokens):
        following = tokens[place + 1] if place + 1 < len(tokens) else ""
        if token == "(":
            depth += 1
            if following in ("", "(", ")", "/") or following[0] in ':"':
                return "a node without a variable"
        elif token == ")":
            depth -= 1
            if depth < 0:
                return "an extra closing parenthesis"
            if depth == 0 and following:
                return f"text after the graph: {truncate_text(following, 20)}"
        elif token == '"':
            return "an unclosed quotation mark"
        elif token == "/" and (following in ("", "(", ")", "/") or following[0] == ":"):
            return "a node without a concept"
        elif token[0] == ":" and (following in ("", ")", "/") or following[0] == ":"):
            return f"the role {token} without a value"
    return f"{depth} unclosed parentheses" if depth else ""


class FinalAnswers:
    """The ending of a worked solution, and whether its final number has thousands separators."""

    names = (*_FINALS, "thousands_separated", "thousands_plain")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Look only at the last 200 characters."""
        tail = answer_text(row)[-200:]
        for name, pattern in _FINALS.items():
            match = pattern.search(tail)
            if match:
                yield DetectorMatch(name, index, f"ends with {truncate_text(match[0].strip(), 40)!r}")
                yield from _thousands(index, match[1])
                return


def _thousands(index: int, final: str) -> Iterator[DetectorMatch]:
    for name, pattern in (("thousands_separated", _SEPARATED), ("thousands_plain", _PLAIN)):
        match = pattern.search(final)
        if match:
            yield DetectorMatch(name, index, f"the final answer is written {match[0]}")


class JsonStyle:
    """JSON answers with and without a space after the colon. Does not apply where the recipe writes the JSON itself."""

    names = ("json_spaced", "json_compact")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return whether the answers are trained on as they are written."""
        return "function_calling" not in (recipe or "") and "answers" not in columns

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Match the style of the first key."""
        text = find_answer(row)[1]
        if not isinstance(text, str) or len(text) > _LONGEST_JSON or not text.lstrip().startswith(("{", "[{")):
            return
        match = _KEY.search(text)
        if match:
            yield DetectorMatch("json_spaced" if match[1] else "json_compact", index, truncate_text(text.strip(), 40))


class CodeStyle:
    """Indentation of code, by tabs or by spaces."""

    names = ("code_tabs", "code_spaces")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may hold code."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Look at a column of code, or at the first fenced block of the answer."""
        text = next((row[name] for name in _CODE_COLUMNS if isinstance(row.get(name), str)), "")
        if not text and "```" in (answer := answer_text(row)):
            block = _FENCE.search(answer)
            text = block[1] if block else ""
        if "\n\t" in text:
            yield DetectorMatch("code_tabs", index, "a line begins with a tab")
        elif "\n  " in text:
            yield DetectorMatch("code_spaces", index, "lines are indented by spaces")


DETECTORS = (Graphs(), FinalAnswers(), JsonStyle(), CodeStyle())
NAMES = frozenset(name for detector in DETECTORS for name in detector.names) | {"name_first", "arguments_first"}
"""The ways of writing that are compared, including the ways of writing tool calls, which `tools` detects."""
