"""Errors that other programs print, found by their text: what each one means and what to do (error_texts.yaml)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

GAP = 200
"""The most characters that "…" in a fragment stands for."""
SHORTEST_PART = 8
"""Characters of a message that are enough to look for it by a part."""


@dataclass(frozen=True)
class KnownError:
    """One entry of error_texts.yaml, whose head says what each field holds."""

    id: str
    tool: str
    text: tuple[str, ...]
    example: str
    cause: str
    fix: tuple[str, ...]
    rule: str | None = None

    @property
    def title(self) -> str:
        """Return the first fragment, by which people know the error."""
        return self.text[0]

    def places_in(self, text: str) -> list[list[int]]:
        """Return where each fragment that occurs begins in a text that is in lower case and has single spaces."""
        pieces = ([" ".join(piece.lower().split()) for piece in fragment.split("…")] for fragment in self.text)
        return [places for fragment in pieces if (places := list(_places(text, fragment)))]


class Place(NamedTuple):
    """A known error in a text: its entry, the line where it first stands (from 1), and how often it occurs."""

    error: KnownError
    line: int
    times: int


def _places(text: str, pieces: list[str]) -> Iterator[int]:
    """Yield where the pieces occur one after the other, at most `GAP` characters apart."""
    start = text.find(pieces[0])
    while start >= 0:
        end = start + len(pieces[0])
        for piece in pieces[1:]:
            place = text.find(piece, end, end + GAP + len(piece))
            if place < 0:
                break
            end = place + len(piece)
        else:
            yield start
        start = text.find(pieces[0], end)


@cache
def known_errors() -> tuple[KnownError, ...]:
    """Read error_texts.yaml."""
    import yaml

    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(KnownError(**entry | {key: tuple(entry[key]) for key in ("text", "fix")}) for entry in entries)


def find_known_errors(text: str) -> list[Place]:
    """Return the known errors in a message or a log, in the order in which they first occur.

    A fragment is found over line breaks and runs of spaces, because terminals and loggers wrap long messages.

    >>> [place.error.id for place in find_known_errors("CUDA out of memory.\\n  Tried to allocate 2 GiB")]
    ['cuda-out-of-memory']
    """
    lines = [" ".join(line.lower().split()) for line in text.split("\n")]
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))  # where each line begins in `collapsed`
    collapsed = " ".join(lines)
    places = []
    for error in known_errors():
        if spans := error.places_in(collapsed):
            places.append(Place(error, bisect_right(starts, min(spans)[0]), max(map(len, spans))))
    return sorted(places, key=lambda place: place.line) or _by_a_part(collapsed)


def _by_a_part(text: str) -> list[Place]:
    """Return the known errors of which `text` is a part, for somebody who types the first words of a long message."""
    part = text.casefold().strip(" .:")
    if len(part) < SHORTEST_PART:
        return []
    return [
        Place(error, 1, 1)
        for error in known_errors()
        if any(part in whole.casefold() for whole in (*error.text, error.example))
    ]
