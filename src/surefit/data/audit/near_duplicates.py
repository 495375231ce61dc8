"""Texts that are nearly the same, found among many: MinHash signatures in bands, and the exact Jaccard index of the few
pairs that share a band (Broder 1997; Leskovec, Rajaraman, Ullman, *Mining of Massive Datasets*, chapter 3).

A text is the set of its runs of three words, without ASCII case and punctuation. A character of three bytes or more in
UTF-8 is a word of its own, because most scripts so written put no spaces between words. Everything is computed on whole
arrays of bytes, and is the same in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from surefit.core.sampling import split_by_total_size

THRESHOLD = 0.8
"""Jaccard index from which two texts are near-duplicates."""
WORDS = 3
BANDS, PER_BAND = 16, 5
"""A pair at the threshold shares a band with probability 1 - (1 - 0.8^5)^16 = 0.998, one at 0.4 with 0.15."""
LEADERS = 8
"""Texts of one band that a later one is compared with: without a bound, a set of equal templates takes forever."""
BLOCK, CHARACTERS = 1024, 1_000_000
"""Texts, and characters, that are hashed at a time: the arrays take about a hundred bytes for each character."""

Hashes = npt.NDArray[np.uint64]


def _mixed(values: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the value (the finaliser of MurmurHash3, shortened)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return values ^ (values >> np.uint64(32))


def _random_odd(seed: int, count: int) -> Hashes:
    """Odd 64-bit numbers: numpy's own generators may draw others in its next version."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return _mixed(_mixed(numbers)) | np.uint64(1)


_PLACE = _random_odd(1, 64)
"""Multiplier of the byte at each place in a word; longer words use them again, for bytes raised by 257 each time."""
_IN_SHINGLE = _random_odd(2, WORDS)
_PERMUTE = _random_odd(3, BANDS * PER_BAND)
_IN_BAND = _random_odd(4, PER_BAND)
_BYTES = np.arange(256, dtype=np.uint8)
_LOWER = np.where((_BYTES >= 65) & (_BYTES <= 90), _BYTES + 32, _BYTES).astype(np.uint8)
_IS_WORD = (
    ((_LOWER >= 97) & (_LOWER <= 122)) | ((_BYTES >= 48) & (_BYTES <= 57)) | (_BYTES >= 0x80)
)  # every byte of a character beyond ASCII is part of a word
_IS_OWN_WORD = _BYTES >= 0xE0
"""First bytes of characters that are a word each."""


@dataclass(frozen=True)
class Shingles:
    """The runs of three words of many texts.

    Attributes:
        hashes: of all texts, one after the other; repeated ones are not taken out.
        starts: where each text begins, and the end; a text without any word has none.
    """

    hashes: Hashes
    starts: npt.NDArray[np.int64]

    def of(self, index: int) -> frozenset[int]:
        """The set of one text."""
        return frozenset(self.hashes[self.starts[index] : self.starts[index + 1]].tolist())


def build_shingles(texts: Sequence[str]) -> Shingles:
    """Hash the word runs of every text; one that is shorter than a run is one run."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    data = _LOWER[np.frombuffer(b"\n".join([*encoded, b"\n\n"]), np.uint8)]
    ends = np.cumsum([len(one) + 1 for one in encoded], dtype=np.int64)
    is_word = _IS_WORD[data]
    before = np.concatenate([[False], is_word[:-1]])
    first = np.flatnonzero(is_word & (~before | _IS_OWN_WORD[data]))
    words = _word_hashes(data, is_word, first)
    count = np.diff(np.searchsorted(first, np.concatenate([[0], ends])))
    return _runs(words, count)


def _word_hashes(data: npt.NDArray[np.uint8], is_word: npt.NDArray[np.bool_], first: npt.NDArray[np.int64]) -> Hashes:
    """One hash for each word: the sum of its bytes, each times the multiplier of its place."""
    if not len(first):
        return np.zeros(0, np.uint64)
    number = np.cumsum(np.bincount(first, minlength=len(data))) - 1
    place = np.arange(len(data)) - first[np.maximum(number, 0)]
    terms = (data.astype(np.uint64) + (place >> 6).astype(np.uint64) * np.uint64(257) + np.uint64(1)) * _PLACE[
        place & 63
    ]
    terms[~is_word] = 0
    return _mixed(np.add.reduceat(terms, first))


def _runs(words: Hashes, count: npt.NDArray[np.int64]) -> Shingles:
    """The runs of each text, made of its words; `count` is how many words each has."""
    padded = np.concatenate([words, np.zeros(WORDS - 1, np.uint64)])
    left = np.repeat(np.cumsum(count), count) - np.arange(len(words))
    run = np.zeros(len(words), np.uint64)
    for offset in range(WORDS):
        run += np.where(left > offset, padded[offset : offset + len(words)], np.uint64(0)) * _IN_SHINGLE[offset]
    position = np.repeat(count, count) - left
    keep = (left >= WORDS) | (position == 0)
    runs = np.where(count > 0, np.maximum(count - WORDS + 1, 1), 0)
    return Shingles(_mixed(run[keep]), np.concatenate([[0], np.cumsum(runs)]))


def text_keys(texts: Sequence[str]) -> Hashes:
    """`band_keys` of texts of any length, a portion at a time."""
    parts = [band_keys(build_shingles(texts[part])) for part in split_by_total_size(map(len, texts), CHARACTERS)]
    return np.concatenate([np.zeros((0, BANDS), np.uint64), *parts])


def band_keys(found: Shingles) -> Hashes:
    """The MinHash signature of each text, band by band: uint64 [texts, BANDS]; zeros for a text without words."""
    texts = len(found.starts) - 1
    keys = np.zeros((texts, BANDS), np.uint64)
    filled = np.flatnonzero(np.diff(found.starts))
    if not len(filled):
        return keys
    starts = found.starts[filled]
    for band in range(BANDS):
        key = np.full(len(filled), band + 1, np.uint64)
        for k in range(PER_BAND):
            # Multiply and shift: the high half is the permuted value.
            permuted = (found.hashes * _PERMUTE[band * PER_BAND + k]) >> np.uint64(32)
            key += np.minimum.reduceat(permuted, starts) * _IN_BAND[k]
        keys[filled, band] = np.maximum(_mixed(key), 1)
    return keys


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """What both have over what either has; 0 where both are empty."""
    both = len(a & b)
    either = len(a) + len(b) - both
    return both / either if either else 0.0


@dataclass(frozen=True)
class NearDuplicate:
    """A text, the earlier one it resembles, and their exact Jaccard index."""

    index: int
    earlier: int
    similarity: float


class PairCollection(Protocol):
    """Pairs of a text's number and a value, added in any order."""

    def add(self, numbers: npt.NDArray[np.int64], values: npt.NDArray[np.int64], /) -> None:
        """Add pairs."""

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(numbers, values) by number, those of a text together; to be read once."""


class BandKeys(Protocol):
    """The bands of many texts, in memory or on disk."""

    def __len__(self) -> int: ...

    def parts(self, band: int) -> Iterator[tuple[npt.NDArray[np.int64], Hashes]]:
        """(numbers, keys) of all texts, equal keys together in one part."""

    def blocks(self, band: int) -> Iterator[tuple[int, Hashes]]:
        """(number of the first, keys) of all texts, in order."""

    def row(self, index: int) -> Hashes:
        """The bands of one text."""

    def ordered(self) -> PairCollection:
        """An empty collection, where these keys are kept."""

    def table(self, rows: int, width: int) -> Any:
        """Zeros [rows, width] that are read and written by lists of rows, likewise."""


class _KeysInMemory:
    """Keys as `band_keys` gives them."""

    def __init__(self, keys: Hashes) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def parts(self, band: int) -> Iterator[tuple[npt.NDArray[np.int64], Hashes]]:
        if len(self):
            yield np.arange(len(self)), self._keys[:, band]

    def blocks(self, band: int) -> Iterator[tuple[int, Hashes]]:
        yield 0, self._keys[:, band]

    def row(self, index: int) -> Hashes:
        row: Hashes = self._keys[index]
        return row

    def ordered(self) -> PairCollection:
        return _PairsInMemory()

    def table(self, rows: int, width: int) -> npt.NDArray[np.int64]:
        return np.zeros((rows, width), np.int64)


class _PairsInMemory:
    """Pairs in memory."""

    def __init__(self) -> None:
        self._added: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    def add(self, numbers: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        self._added.append((numbers, values))

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        if self._added:
            numbers, values = map(np.concatenate, zip(*self._added, strict=True))
            order = np.argsort(numbers, kind="stable")
            yield numbers[order], values[order]


def find_near_duplicates(
    keys: BandKeys | Hashes, text: Callable[[int], str], skip: Callable[[int], bool]
) -> Iterator[NearDuplicate]:
    """Texts that are near-duplicates of an earlier one which itself is none, in order.

    Memory holds some sets of `HELD` runs in all; what else grows with the texts lies where `keys` keeps it.

    Args:
        keys: from `band_keys`, or on disk.
        text: number → text; called for candidates only.
        skip: numbers to leave out (exact duplicates, say).
    """
    held = keys if not isinstance(keys, np.ndarray) else _KeysInMemory(keys)
    pairs, count = _groups(held)
    leaders = held.table(count, LEADERS)  # number + 1 of the first texts of each group, 0 where free
    sets = _Sets(text)
    for numbers, groups in pairs:
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for first in range(0, len(starts), BLOCK):
            block = starts[first : first + BLOCK]
            end = starts[first + BLOCK] if first + BLOCK < len(starts) else len(numbers)
            own, local = np.unique(groups[block[0] : end], return_inverse=True)
            here = leaders[own]
            mine = dict(zip(numbers[block].tolist(), np.split(local, block[1:] - block[0]), strict=True))
            yield from _near_in_block(mine, here, sets, text, skip)
            leaders[own] = here


def _near_in_block(
    mine: dict[int, npt.NDArray[np.int64]],
    leaders: npt.NDArray[np.int64],
    sets: _Sets,
    text: Callable[[int], str],
    skip: Callable[[int], bool],
) -> Iterator[NearDuplicate]:
    """Of the texts with their groups those that are near-duplicates; of the others each becomes a leader."""
    for index, own in _sets((index for index in mine if not skip(index)), text):
        known = np.unique(leaders[mine[index]])
        near = _first_near(index, own, (known[known > 0] - 1).tolist(), sets)
        if near is not None:
            yield near
            continue
        sets.keep(index, own)
        for group in mine[index].tolist():
            free = np.flatnonzero(leaders[group] == 0)
            if len(free):
                leaders[group, free[0]] = index + 1


def _groups(keys: BandKeys) -> tuple[PairCollection, int]:
    """(each text with the number of every group that shares a band with it, how many groups)."""
    total, pairs = 0, keys.ordered()
    for band in range(BANDS):
        for places, values in keys.parts(band):
            found, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
            crowded = (count > 1) & (found > 0)
            number = np.cumsum(crowded) + total - 1
            shared = crowded[inverse]
            pairs.add(places[shared], number[inverse][shared])
            total += int(crowded.sum())
    return pairs, total


HELD = 4_000_000
"""Runs of words whose sets are kept for the next comparison: some 300 MB. Others are made again of their text."""


class _Sets:
    """The sets of texts that others are compared with, the latest in memory."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self._sets: dict[int, frozenset[int]] = {}
        self._runs = 0

    def keep(self, index: int, own: frozenset[int]) -> None:
        self._sets[index] = own
        self._runs += len(own)
        while self._runs > HELD and len(self._sets) > 1:
            self._runs -= len(self._sets.pop(next(iter(self._sets))))

    def __getitem__(self, index: int) -> frozenset[int]:
        own = self._sets.pop(index, None)
        if own is None:
            self.keep(index, own := build_shingles([self._text(index)]).of(0))
        else:
            self._sets[index] = own
        return own


def _first_near(index: int, own: frozenset[int], candidates: Iterable[int], sets: Any) -> NearDuplicate | None:
    """The first candidate that is as near as the threshold says."""
    for candidate in candidates:
        similarity = jaccard(own, sets[candidate])
        if similarity >= THRESHOLD:
            return NearDuplicate(index, candidate, similarity)
    return None


def match_near_duplicates(
    keys: BandKeys | Hashes, text: Callable[[int], str], known_keys: BandKeys | Hashes, known_text: Callable[[int], str]
) -> list[NearDuplicate]:
    """Of each text the known one that it is a near-duplicate of, where there is one; `earlier` numbers the known.

    Memory is a matter of the bands that both sides have; of the known, those that share one are read.
    """
    asked, known = (held if not isinstance(held, np.ndarray) else _KeysInMemory(held) for held in (keys, known_keys))
    numbers, shared = _find_shared_bands(known, asked)
    search = _Search(shared)
    for index, own in _sets(numbers, known_text):
        search.add(index, known.row(index), own)
    found = (
        search.nearest(index, asked.row(index), own) for index, own in _sets(_find_shared_bands(asked, known)[0], text)
    )
    return [near for near in found if near is not None]


def _find_shared_bands(keys: BandKeys, others: BandKeys) -> tuple[Iterator[int], set[int]]:
    """(the texts that share a band with any of the others, in order; the bands that they share)."""
    pairs, shared = keys.ordered(), set[int]()
    for band in range(BANDS):
        for _, values in others.parts(band):
            wanted = np.unique(values[values > 0])
            for start, block in keys.blocks(band):
                places = np.flatnonzero(np.isin(block, wanted))
                pairs.add(places + start, places)
                shared.update(block[places].tolist())
    return (number for numbers, _ in pairs for number in np.unique(numbers).tolist()), shared


def _sets(numbers: Iterable[int], text: Callable[[int], str]) -> Iterator[tuple[int, frozenset[int]]]:
    """The texts of these numbers as sets, hashed many at a time."""
    waiting = iter(numbers)
    while block := list(islice(waiting, BLOCK)):
        texts = [text(index) for index in block]
        for part in split_by_total_size(map(len, texts), CHARACTERS):
            found = build_shingles(texts[part])
            yield from ((index, found.of(k)) for k, index in enumerate(block[part]))


class _Search:
    """Texts by those of their bands that are asked for."""

    def __init__(self, shared: set[int]) -> None:
        self._sets: dict[int, frozenset[int]] = {}
        self._bands: dict[int, list[int]] = {band: [] for band in shared}

    def add(self, index: int, keys: Hashes, own: frozenset[int]) -> None:
        """Make a text one that others are compared with, as far as its bands have room."""
        for key in keys.tolist():
            leaders = self._bands.get(key)
            if leaders is not None and len(leaders) < LEADERS:
                leaders.append(index)
                self._sets[index] = own

    def nearest(self, index: int, keys: Hashes, own: frozenset[int]) -> NearDuplicate | None:
        """The first added text that shares a band and is as near as the threshold says."""
        candidates = sorted({leader for key in keys.tolist() for leader in self._bands.get(key, ())})
        return _first_near(index, own, candidates, self._sets)
