"""Words and sentences of any language, without a model: what scores and baselines of summaries count in."""

from __future__ import annotations

import re
import unicodedata

_ALONE = ("CJK UNIFIED", "CJK COMPATIBILITY", "HIRAGANA", "KATAKANA")
"""Scripts that put no spaces between words: a character is a word."""
_ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "no", "nos", "sec", "secs", "art", "arts", "para", "fig", "cf", "al"),
    *("inc", "ltd", "co", "corp", "v", "vs", "pub", "stat", "rev", "app", "dist"),
}
_END = re.compile("[.!?\u2026]+[\"'\u201d\u2019)\\]]*\\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_LAST_WORD = re.compile(r"(\w+)\.$")


class _Separated(dict[int, str]):
    """For `str.translate`: letters, digits and marks stay, everything else becomes a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.name(character, "").startswith(_ALONE):
            found = f" {character} "
        else:
            found = character if character.isalnum() or unicodedata.category(character).startswith("M") else " "
        self[code] = found
        return found


_separated = _Separated()


def split_words(text: str) -> list[str]:
    """Lower-case words: runs of letters, digits and combining marks of any script, canonically composed.

    >>> split_words("Luật số 5, khoản 2(a): the café_bar 日本")
    ['luật', 'số', '5', 'khoản', '2', 'a', 'the', 'café', 'bar', '日', '本']
    """
    return unicodedata.normalize("NFC", text).lower().translate(_separated).split()


def split_sentences(text: str) -> list[str]:
    """Sentences in order, by punctuation and line breaks; a full stop after an abbreviation or initial ends none.

    >>> split_sentences("Under 12 U.S.C. 5 the Act, see Smith v. Jones, ends. It lapses!\\nNew line")
    ['Under 12 U.S.C. 5 the Act, see Smith v. Jones, ends.', 'It lapses!', 'New line']
    """
    found, start = [], 0
    for end in _END.finditer(text):
        piece = text[start : end.end()].strip()
        if "\n" not in end.group() and not _ends(piece, text[end.end() : end.end() + 1]):
            continue
        found.append(piece)
        start = end.end()
    return [piece for piece in (*found, text[start:].strip()) if piece]


def _ends(piece: str, following: str) -> bool:
    if following.islower():
        return False
    last = _LAST_WORD.search(piece)
    return last is None or not (last[1].lower() in _ABBREVIATIONS or (len(last[1]) == 1 and last[1].isalpha()))
