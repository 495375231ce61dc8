"""Detectors of damaged text: wrong decoding, stray characters, two Unicode forms of one letter, boilerplate."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from surefit.data.audit.detectors import DetectorMatch
from surefit.data.audit.detectors.parts import answer_text, excerpt_around, find_answer, iterate_texts

_LATER = "€ƒ†‡\u02c6‰ŠŒŽ•\u02dcšœžŸ\x80-\x9f\xa1-\xaa\xac-\xba\xbc-\xbf"
"""The characters that a later byte of a UTF-8 character becomes when it is read as Windows-1252 or Latin-1: without
quotation marks, dashes, ellipses and no-break spaces, which follow a letter in sound text too."""
_LAST = "\xa0«»\u2018\u2019\u201c\u201d\u2013\u2014\u2026"
"""Further characters that the last of three bytes may become."""
_MOJIBAKE = re.compile(
    rf"(?<![A-ZÀ-Þ])[ÂÃ][{_LATER}\xa0]"  # é → Ã©; after a capital it is a word in capitals
    rf"|â[€†\u02c6‰\x80-\x9f]|á[º»][{_LATER}]"  # quotation marks and arrows; Vietnamese
    rf"|ðŸ|ï¿½|ï»¿"  # emoji, U+FFFD, a byte-order mark
    rf"|(?:[Ä-ß][{_LATER}]){{2}}"  # Cyrillic, Greek, Arabic…
    rf"|(?:[ã-ì][{_LATER}][{_LATER}{_LAST}]){{2}}"  # Chinese, Japanese, Korean
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")
"""All control characters but tab, line feed, form feed (page breaks) and carriage return (see `CarriageReturns`)."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|[mn]dash|[lr][sd]quo|hellip|#\d{2,6}|#x[0-9a-fA-F]{2,5});")
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\u202a-\u202e\u2066-\u2069\ufeff\U000e0001-\U000e007f]")
_BREAKS_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
"""Thai, Lao, Burmese, Khmer: scripts in which a zero-width space separates words."""
_DECOMPOSED = re.compile("[A-Za-z\u00c0-\u1eff][\u0300-\u036f]")
_MARK = re.compile("[\u0300-\u036f]")
_COMPOSED = re.compile("[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u01a0-\u01b0\u1e00-\u1eff]")
_SINGLE = {
    "control_characters": _CONTROL,
    "lone_surrogates": _SURROGATE,
    "replacement_characters": re.compile("\ufffd"),
    "composed_letters": _COMPOSED,
}
"""Patterns that match single characters: searching the set of a text's characters is enough to know if they match."""
_PROVENANCE = (
    "as an ai language model",
    "as an ai assistant, i",
    "measure has not been amended since",
    "summary of that version is repeated here",
    "all rights reserved",
    "click here to",
    "subscribe to our newsletter",
    "reprinted with permission",
)
_EDGE = 400
_FIRST_LEAD, _LAST_LEAD = "\xc2", "\xf0"


class Characters:
    """Wrongly decoded, unprintable and invisible characters, and the Unicode form of accents, anywhere in a row.

    One form (NFC) has a letter and its accent in one character, the other (NFD) in two: they look equal and have
    different tokens.
    """

    names = (
        "mojibake",
        "replacement_characters",
        "control_characters",
        "lone_surrogates",
        "html_entities",
        "invisible_characters",
        "decomposed_letters",
        "composed_letters",
    )

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row has texts."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Search the row's joined texts in one pass. Most rows are ASCII, and need only two searches."""
        text = "\n".join(iterate_texts(dict(row)))
        for name, pattern in _patterns(text):
            match = pattern.search(text)
            if match:
                yield DetectorMatch(name, index, f"{_called(match[0])} in {excerpt_around(text, *match.span())}")


def _patterns(text: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the patterns that can match, chosen by the characters that the text contains."""
    if "&" in text and ";" in text:
        yield "html_entities", _ENTITY
    if text.isascii():
        yield "control_characters", _CONTROL
        return
    letters = "".join(set(text))
    for name, pattern in _SINGLE.items():
        if pattern.search(letters):
            yield name, pattern
    if any(_FIRST_LEAD <= letter <= _LAST_LEAD for letter in letters):
        yield "mojibake", _MOJIBAKE
    if _INVISIBLE.search(letters) and not _BREAKS_WITHOUT_SPACES.search(letters):
        yield "invisible_characters", _INVISIBLE
    if _MARK.search(letters) and not unicodedata.is_normalized("NFC", text):
        # Marks that no single character has (phonetics, Yoruba) are not decomposed letters.
        yield "decomposed_letters", _DECOMPOSED


def _called(found: str) -> str:
    """Return U+… for every character where one may not be printable, else the text."""
    return repr(found) if found.isprintable() and len(found) > 2 else " ".join(f"U+{ord(char):04X}" for char in found)


class CarriageReturns:
    """Windows line ends inside an answer: the model learns to write them."""

    names = ("carriage_returns",)

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Count the answer's carriage returns, and its bare line feeds."""
        text = next(iterate_texts(find_answer(row)[1]), "")
        if "\r" in text:
            returns, lines = text.count("\r"), text.count("\n")
            beside = "" if returns >= lines else f" next to {lines - returns} bare line feeds"
            yield DetectorMatch("carriage_returns", index, f"{returns} carriage returns{beside} in the answer")


class Boilerplate:
    """Phrases that come from the text's source, and do not belong to the answer."""

    names = ("boilerplate",)

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return True: every row may have an answer."""
        return True

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Look only at the beginning and the end of the answer: in between, such words may be its subject."""
        text = answer_text(row)
        edges = (text if len(text) <= 2 * _EDGE else f"{text[:_EDGE]}\n{text[-_EDGE:]}").lower()
        phrase = next((phrase for phrase in _PROVENANCE if phrase in edges), None)
        if phrase:
            yield DetectorMatch("boilerplate", index, f"{phrase!r} in the answer")


DETECTORS = (Characters(), CarriageReturns(), Boilerplate())
