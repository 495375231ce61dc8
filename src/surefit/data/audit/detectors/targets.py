"""Detectors of unsuitable answers: a placeholder, a summary that is too long, Python instead of JSON, a list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from surefit.core.units import truncate_text
from surefit.data.audit.detectors import DetectorMatch
from surefit.data.audit.detectors.parts import answer_text, find_answer

_PLACEHOLDER = re.compile(
    r"\s*(?:nan|<na>|n/?a|#n/a|null|none|undefined|\[object object\]|tbd|todo|-)\s*", re.IGNORECASE
)
_SUMMARIES = ("summary", "reference_summary", "highlights", "abstract")
_SOURCES = ("text", "document", "article", "report", "original_text", "dialogue", "judgement", "bill")
_QUOTE = re.compile(r"\s*[\[({]+\s*'")
_CONSTANTS = ("True", "False", "None")
_MOST_CHARACTERS = 20_000


class EmptyWords:
    """A placeholder as the answer, such as "None"; the audit itself counts missing and empty answers."""

    names = ("placeholder",)

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Match where the whole answer is a placeholder."""
        text = answer_text(row)
        if 0 < len(text) < 24 and _PLACEHOLDER.fullmatch(text):
            yield DetectorMatch("placeholder", index, f"the answer is the string {text.strip()!r}")


class LongSummaries:
    """A summary that is longer than its source text."""

    names = ("summary_longer_than_source",)

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return whether the rows have a summary column and a source column."""
        return any(name in columns for name in _SUMMARIES) and any(name in columns for name in _SOURCES)

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Compare the lengths in characters."""
        summary = next((row[name] for name in _SUMMARIES if isinstance(row.get(name), str)), "")
        source = next((row[name] for name in _SOURCES if isinstance(row.get(name), str)), "")
        if source and len(summary) > len(source):
            description = f"a summary of {len(summary):,} characters of a text of {len(source):,}"
            yield DetectorMatch("summary_longer_than_source", index, description)


class PythonValues:
    """A Python value where JSON was meant, `{'a': None}`; and answers that are JSON, for comparison."""

    names = ("python_answer", "json_answer", "python_column")

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may hold such a value."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Look at the answer, then at the other columns."""
        column, value = find_answer(row)
        if isinstance(value, str):
            if _is_python(value):
                yield DetectorMatch("python_answer", index, f"{column} is Python, not JSON: {truncate_text(value, 40)}")
            elif _is_json(value):
                yield DetectorMatch("json_answer", index, f"{column} is JSON: {truncate_text(value, 40)}")
        for name, text in row.items():
            if name != column and isinstance(text, str) and _is_python(text):
                yield DetectorMatch("python_column", index, f"{name} is Python, not JSON: {truncate_text(text, 40)}")
                return


def _is_json(text: str) -> bool:
    """Return whether the text begins as a JSON object or a list of objects: Python writes `{'`."""
    return text.lstrip()[:2].startswith(('{"', "[{"))


def _is_python(text: str) -> bool:
    """Return whether the text is a Python literal that is not JSON."""
    if text[:1] not in "[({ \n\t" or len(text) > _MOST_CHARACTERS or not _maybe_python(text):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return False
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
    return isinstance(value, (dict, list, tuple, set))


def _maybe_python(text: str) -> bool:
    return bool(_QUOTE.match(text)) or (text.lstrip()[:1] in ("[", "{") and any(word in text for word in _CONSTANTS))


class ListsOfOne:
    """A text inside a list: converted to text it becomes `['…']`."""

    names = ("list_of_one",)

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Match an answer that is a list of one text; several texts are a list of references and do not match."""
        column, value = find_answer(row)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            yield DetectorMatch(
                "list_of_one", index, f"{column} is a list of one string: [{truncate_text(value[0], 40)!r}]"
            )


DETECTORS = (EmptyWords(), LongSummaries(), PythonValues(), ListsOfOne())
