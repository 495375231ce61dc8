"""Near-duplicate texts: MinHash signatures in bands, and the exact Jaccard index of the few pairs that share a band
(Broder 1997; Leskovec, Rajaraman, Ullman, *Mining of Massive Datasets*, chapter 3).

A text is the set of its runs of three words, without ASCII case and punctuation. A character of three bytes or more in
UTF-8 is a word by itself, because most scripts so written put no spaces between words. Everything is computed on whole
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
"""Texts of one band that a later text is compared with: unlimited, a set of equal templates takes quadratic time."""
BLOCK, CHARACTERS = 1024, 1_000_000
"""Texts, and characters, that are hashed at a time: the arrays need about a hundred bytes per character."""

Hashes = npt.NDArray[np.uint64]


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits: each bit of the result depends on every bit of the value (MurmurHash3's finalizer, shortened)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return values ^ (values >> np.uint64(32))


def _random_odd(seed: int, count: int) -> Hashes:
    """Return odd pseudo-random 64-bit numbers: numpy's own generators may return others in a later version."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return _mixed(_mixed(numbers)) | np.uint64(1)


_PLACE = _random_odd(1, 64)
"""Multiplier of the byte at each place in a word; longer words reuse the multipliers, for bytes raised by 257 each
time.
"""
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
    """The shingles (runs of three words) of many texts.

    Attributes:
        hashes: hashes of all texts, one after the other; repeated ones are not removed.
        starts: offset of each text, and the end; a text without any word has no hashes.
    """

    hashes: Hashes
    starts: npt.NDArray[np.int64]

    def of(self, index: int) -> frozenset[int]:
        """Return the set of one text."""
        return frozenset(self.hashes[self.starts[index] : self.starts[index + 1]].tolist())


def build_shingles(texts: Sequence[str]) -> Shingles:
    """Hash the word runs of every text; a text shorter than a run is one run."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    data = _LOWER[np.frombuffer(b"\n".join([*encoded, b"\n\n"]), np.uint8)]
    ends = np.cumsum([len(text_bytes) + 1 for text_bytes in encoded], dtype=np.int64)
    is_word = _IS_WORD[data]
    before = np.concatenate([[False], is_word[:-1]])
    first = np.flatnonzero(is_word & (~before | _IS_OWN_WORD[data]))
    words = _word_hashes(data, is_word, first)
    count = np.diff(np.searchsorted(first, np.concatenate([[0], ends])))
    return _runs(words, count)


def _word_hashes(data: npt.NDArray[np.uint8], is_word: npt.NDArray[np.bool_], first: npt.NDArray[np.int64]) -> Hashes:
    """Return one hash for each word: the sum of its bytes, each times the multiplier of its place."""
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
    """Return the runs of each text, from its words; `count` is the number of words per text."""
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
    """Return `band_keys` of texts of any length, computed a portion at a time."""
    parts = [band_keys(build_shingles(texts[part])) for part in split_by_total_size(map(len, texts), CHARACTERS)]
    return np.concatenate([np.zeros((0, BANDS), np.uint64), *parts])


def band_keys(found: Shingles) -> Hashes:
    """Return the MinHash signature of each text by band: uint64 [texts, BANDS]; zeros for a text without words."""
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
    """Return the Jaccard index, intersection over union; 0 where both sets are empty."""
    both = len(a & b)
    either = len(a) + len(b) - both
    return both / either if either else 0.0


@dataclass(frozen=True)
class NearDuplicate:
    """A text, the earlier one that it resembles, and their exact Jaccard index."""

    index: int
    earlier: int
    similarity: float


class PairCollection(Protocol):
    """Pairs of a text's number and a value, added in any order."""

    def add(self, numbers: npt.NDArray[np.int64], values: npt.NDArray[np.int64], /) -> None:
        """Add pairs."""

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield (numbers, values) by number, all pairs of a text together; can be iterated once."""


class BandKeys(Protocol):
    """The bands of many texts, in memory or on disk."""

    def __len__(self) -> int: ...

    def parts(self, band: int) -> Iterator[tuple[npt.NDArray[np.int64], Hashes]]:
        """Yield (numbers, keys) of all texts, equal keys together in one part."""

    def blocks(self, band: int) -> Iterator[tuple[int, Hashes]]:
        """Yield (number of the first, keys) of all texts, in order."""

    def row(self, index: int) -> Hashes:
        """Return the bands of one text."""

    def ordered(self) -> PairCollection:
        """Return an empty collection, in memory or on disk like these keys."""

    def table(self, rows: int, width: int) -> Any:
        """Return zeros [rows, width], read and written by lists of rows, in memory or on disk like these keys."""


class _KeysInMemory:
    """Keys from `band_keys`, in memory."""

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
    """Yield the texts that are near-duplicates of an earlier text which itself is none, in order.

    Memory holds the sets of `HELD` runs in all; whatever else grows with the texts lies where `keys` keeps it.

    Args:
        keys: from `band_keys`, or on disk.
        text: number → text; called for candidates only.
        skip: numbers to leave out (exact duplicates, say).
    """
    band_keys = keys if not isinstance(keys, np.ndarray) else _KeysInMemory(keys)
    pairs, count = _groups(band_keys)
    leaders = band_keys.table(count, LEADERS)  # number + 1 of the first texts of each group, 0 where free
    sets = _Sets(text)
    for numbers, groups in pairs:
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for first in range(0, len(starts), BLOCK):
            block = starts[first : first + BLOCK]
            end = starts[first + BLOCK] if first + BLOCK < len(starts) else len(numbers)
            block_groups, local = np.unique(groups[block[0] : end], return_inverse=True)
            block_leaders = leaders[block_groups]
            text_groups = dict(zip(numbers[block].tolist(), np.split(local, block[1:] - block[0]), strict=True))
            yield from _near_in_block(text_groups, block_leaders, sets, text, skip)
            leaders[block_groups] = block_leaders


def _near_in_block(
    mine: dict[int, npt.NDArray[np.int64]],
    leaders: npt.NDArray[np.int64],
    sets: _Sets,
    text: Callable[[int], str],
    skip: Callable[[int], bool],
) -> Iterator[NearDuplicate]:
    """Yield the texts of a block that are near-duplicates; every other text becomes a leader of its groups."""
    for index, shingles in _sets((index for index in mine if not skip(index)), text):
        candidates = np.unique(leaders[mine[index]])
        near = _first_near(index, shingles, (candidates[candidates > 0] - 1).tolist(), sets)
        if near is not None:
            yield near
            continue
        sets.keep(index, shingles)
        for group in mine[index].tolist():
            free = np.flatnonzero(leaders[group] == 0)
            if len(free):
                leaders[group, free[0]] = index + 1


def _groups(keys: BandKeys) -> tuple[PairCollection, int]:
    """Return (each text with the number of every group that shares a band with it, the number of groups)."""
    total, pairs = 0, keys.ordered()
    for band in range(BANDS):
        for places, values in keys.parts(band):
            unique_keys, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
            crowded = (count > 1) & (unique_keys > 0)
            number = np.cumsum(crowded) + total - 1
            shared = crowded[inverse]
            pairs.add(places[shared], number[inverse][shared])
            total += int(crowded.sum())
    return pairs, total


HELD = 4_000_000
"""Runs of words whose sets are kept for the next comparison: some 300 MB. Other sets are rebuilt from their text."""


class _Sets:
    """The sets of texts that others are compared with, the latest ones in memory."""

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
        shingles = self._sets.pop(index, None)
        if shingles is None:
            self.keep(index, shingles := build_shingles([self._text(index)]).of(0))
        else:
            self._sets[index] = shingles
        return shingles


def _first_near(index: int, own: frozenset[int], candidates: Iterable[int], sets: Any) -> NearDuplicate | None:
    """Return the first candidate with at least the threshold's similarity."""
    for candidate in candidates:
        similarity = jaccard(own, sets[candidate])
        if similarity >= THRESHOLD:
            return NearDuplicate(index, candidate, similarity)
    return None


def match_near_duplicates(
    keys: BandKeys | Hashes, text: Callable[[int], str], known_keys: BandKeys | Hashes, known_text: Callable[[int], str]
) -> list[NearDuplicate]:
    """Return the near-duplicates among the known texts, at most one per text; `earlier` is the known text's number.

    Memory grows with the bands that both sides have; only known texts that share one are read.
    """
    band_keys, known_bands = (
        side if not isinstance(side, np.ndarray) else _KeysInMemory(side) for side in (keys, known_keys)
    )
    numbers, shared = _find_shared_bands(known_bands, band_keys)
    search = _Search(shared)
    for index, shingles in _sets(numbers, known_text):
        search.add(index, known_bands.row(index), shingles)
    matches = (
        search.nearest(index, band_keys.row(index), shingles)
        for index, shingles in _sets(_find_shared_bands(band_keys, known_bands)[0], text)
    )
    return [match for match in matches if match is not None]


def _find_shared_bands(keys: BandKeys, others: BandKeys) -> tuple[Iterator[int], set[int]]:
    """Return (numbers of the texts that share a band with any of the others, in order; the bands that they share)."""
    pairs, shared = keys.ordered(), set[int]()
    for band in range(BANDS):
        for _, values in others.parts(band):
            other_keys = np.unique(values[values > 0])
            for start, block in keys.blocks(band):
                places = np.flatnonzero(np.isin(block, other_keys))
                pairs.add(places + start, places)
                shared.update(block[places].tolist())
    return (number for numbers, _ in pairs for number in np.unique(numbers).tolist()), shared


def _sets(numbers: Iterable[int], text: Callable[[int], str]) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield the texts of these numbers as sets, hashed many at a time."""
    remaining = iter(numbers)
    while block := list(islice(remaining, BLOCK)):
        texts = [text(index) for index in block]
        for part in split_by_total_size(map(len, texts), CHARACTERS):
            shingles = build_shingles(texts[part])
            yield from ((index, shingles.of(k)) for k, index in enumerate(block[part]))


class _Search:
    """Index of texts by their bands, for the shared bands only."""

    def __init__(self, shared: set[int]) -> None:
        self._sets: dict[int, frozenset[int]] = {}
        self._bands: dict[int, list[int]] = {band: [] for band in shared}

    def add(self, index: int, keys: Hashes, own: frozenset[int]) -> None:
        """Add a text as a leader of its bands, up to `LEADERS` per band."""
        for key in keys.tolist():
            leaders = self._bands.get(key)
            if leaders is not None and len(leaders) < LEADERS:
                leaders.append(index)
                self._sets[index] = own

    def nearest(self, index: int, keys: Hashes, own: frozenset[int]) -> NearDuplicate | None:
        """Return the first added text that shares a band and has at least the threshold's similarity."""
        candidates = sorted({leader for key in keys.tolist() for leader in self._bands.get(key, ())})
        return _first_near(index, own, candidates, self._sets)
