"""Splitting of text in any language into words and sentences, without a model, for metrics and baselines of
summaries.
"""

from __future__ import annotations

import re
import unicodedata

_ALONE = ("CJK UNIFIED", "CJK COMPATIBILITY", "HIRAGANA", "KATAKANA")
"""Scripts without spaces between words: each character counts as a word."""
_ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "no", "nos", "sec", "secs", "art", "arts", "para", "fig", "cf", "al"),
    *("inc", "ltd", "co", "corp", "v", "vs", "pub", "stat", "rev", "app", "dist"),
}
_END = re.compile("[.!?\u2026]+[\"'\u201d\u2019)\\]]*\\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_LAST_WORD = re.compile(r"(\w+)\.$")


class _Separated(dict[int, str]):
    """Table for `str.translate`: letters, digits and marks stay, everything else becomes a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.name(character, "").startswith(_ALONE):
            replacement = f" {character} "
        else:
            replacement = character if character.isalnum() or unicodedata.category(character).startswith("M") else " "
        self[code] = replacement
        return replacement


_separated = _Separated()


def split_words(text: str) -> list[str]:
    """Split text into lowercase words: runs of letters, digits and combining marks of any script, canonically composed.

    >>> split_words("Luật số 5, khoản 2(a): the café_bar 日本")
    ['luật', 'số', '5', 'khoản', '2', 'a', 'the', 'café', 'bar', '日', '本']
    """
    return unicodedata.normalize("NFC", text).lower().translate(_separated).split()


def split_sentences(text: str) -> list[str]:
    """Split text into sentences at punctuation and line breaks; a period after an abbreviation or initial ends none.

    >>> split_sentences("Under 12 U.S.C. 5 the Act, see Smith v. Jones, ends. It lapses!\\nNew line")
    ['Under 12 U.S.C. 5 the Act, see Smith v. Jones, ends.', 'It lapses!', 'New line']
    """
    sentences, start = [], 0
    for end in _END.finditer(text):
        sentence = text[start : end.end()].strip()
        if "\n" not in end.group() and not _ends(sentence, text[end.end() : end.end() + 1]):
            continue
        sentences.append(sentence)
        start = end.end()
    return [sentence for sentence in (*sentences, text[start:].strip()) if sentence]


def _ends(piece: str, following: str) -> bool:
    if following.islower():
        return False
    last_word = _LAST_WORD.search(piece)
    return last_word is None or not (
        last_word[1].lower() in _ABBREVIATIONS or (len(last_word[1]) == 1 and last_word[1].isalpha())
    )
