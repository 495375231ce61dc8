"""Extraction of a worked solution's final answer: GSM8K's own rule, a lenient one, and the last \\boxed{}."""

from __future__ import annotations

import re

INVALID = "[invalid]"
"""Result of GSM8K's own code for an answer without a final line. It equals nothing, not even itself: comparing two
misses as equal would give 100 % to a model that never answers.
"""

_FINAL = re.compile(r"#### (\-?[0-9\.\,]+)")
_LAST_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")


def final_answer(solution: str, marker: str = "#### ") -> str:
    """Return the number after `#### `, without commas, as openai/grade-school-math extracts it; `INVALID` without one.

    Args:
        marker: text before the answer; GSM8K's published model solutions write "A: ", followed by free text.

    >>> final_answer("4 * 270 = 1,080\\n#### 1,080")
    '1080'
    >>> final_answer("It is 1080.")
    '[invalid]'
    """
    if marker != "#### ":
        _, separator, answer = solution.rpartition(marker)
        return answer.strip().replace(",", "") if separator else INVALID
    match = _FINAL.search(solution)
    return match[1].strip().replace(",", "") if match else INVALID


def same_answer(given: str, gold: str) -> bool:
    """Return whether the texts are equal and not `INVALID`.

    >>> same_answer("18", "18"), same_answer("18.0", "18"), same_answer("[invalid]", "[invalid]")
    (True, False, False)
    """
    return given == gold != INVALID


def last_number(text: str) -> float | None:
    """Return the last number in a text, without dollar sign and thousands separators; a Unicode minus counts.

    >>> last_number("so they have 3 + 4 = $1,007.50 left.")
    1007.5
    >>> last_number("none") is None
    True
    """
    numbers = _LAST_NUMBER.findall(text.replace("\u2212", "-"))
    return float(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…} (or \\boxed 5), with balanced braces; None without one, or if unclosed.

    >>> last_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    >>> last_boxed(r"\\boxed{1") is None
    True
    """
    matches = list(_BOXED.finditer(text))
    if not matches:
        return None
    start = matches[-1].end()
    if matches[-1][1] is None:
        return text[start:].split("$")[0].split("\n")[0].strip() or None
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return None
