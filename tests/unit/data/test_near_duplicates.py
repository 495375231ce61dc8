"""MinHash and bands against Jaccard indices counted out on sets of words."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from surefit.data.audit.near_duplicates import (
    THRESHOLD,
    band_keys,
    build_shingles,
    find_near_duplicates,
    jaccard,
    match_near_duplicates,
)

WORDS = [f"{a}{b}" for a in "bcdfgklmnprst" for b in ("a", "e9", "orange", "ü", "x" * 70)]


def runs(text: str) -> set[tuple[str, ...]]:
    """The reference: runs of three words as a set."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))} if words else set()


def exact(a: str, b: str) -> float:
    return len(runs(a) & runs(b)) / len(runs(a) | runs(b))


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """Texts and copies of them in which up to four words are others."""
    draw, found = random.Random(0), []
    for _ in range(300):
        words = draw.choices(WORDS, k=draw.randint(1, 60))
        copy = list(words)
        for _ in range(draw.randint(0, 4)):
            copy[draw.randrange(len(copy))] = draw.choice(WORDS)
        found.append((" ".join(words), "  ".join(copy).replace("orange", "ORANGE") + " !"))
    return found


def test_jaccard_of_shingles_is_that_of_the_sets_of_words(pairs: list[tuple[str, str]]) -> None:
    found = build_shingles([text for pair in pairs for text in pair])
    for n, (a, b) in enumerate(pairs):
        assert jaccard(found.of(2 * n), found.of(2 * n + 1)) == pytest.approx(exact(a, b), abs=1e-12)


def test_near_duplicates_are_those_over_the_threshold_and_only_they(pairs: list[tuple[str, str]]) -> None:
    texts = [text for pair in pairs for text in pair]
    found = list(find_near_duplicates(band_keys(build_shingles(texts)), texts.__getitem__, lambda index: False))
    for near in found:
        assert near.similarity == pytest.approx(exact(texts[near.index], texts[near.earlier]))
        assert near.similarity >= THRESHOLD
    due = {2 * n + 1 for n, (a, b) in enumerate(pairs) if exact(a, b) >= THRESHOLD}
    assert len(due) > 50
    # A pair at the threshold is missed twice in a thousand times, one at 0.9 never.
    assert len(due - {near.index for near in found}) <= 1


def test_bands_agree_as_often_as_the_theory_says() -> None:
    draw = random.Random(1)
    together, total = 0, 400
    for _ in range(total):
        words = [f"w{draw.randrange(10**9)}" for _ in range(52)]
        a, b = " ".join(words), " ".join([*words[:39], *(f"v{draw.randrange(10**9)}" for _ in range(13))])
        keys = band_keys(build_shingles([a, b]))
        together += bool((keys[0] == keys[1]).any())
    similarity = 37 / 63
    due = 1 - (1 - similarity**5) ** 16
    assert together / total == pytest.approx(due, abs=3.5 * (due * (1 - due) / total) ** 0.5)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Where is the old harbour?", "where  is the OLD harbour", True),
        ("Where is the old harbour?", "Where is the new harbour?", False),
        ("東京の天気を教えてください今日", "東京の天気を教えてください今日。", True),
        ("東京の天気を教えてください今日", "大阪の電話番号を調べて", False),
        ("yes", "YES!", True),
        ("yes", "no", False),
    ],
)
def test_what_counts_as_nearly_the_same(a: str, b: str, same: bool) -> None:
    found = list(find_near_duplicates(band_keys(build_shingles([a, b])), [a, b].__getitem__, lambda index: False))
    assert bool(found) == same


def test_texts_without_words_resemble_nothing() -> None:
    texts = ["", "...", "\n", "?!"]
    keys = band_keys(build_shingles(texts))
    assert not keys.any()
    assert list(find_near_duplicates(keys, texts.__getitem__, lambda index: False)) == []
    assert list(find_near_duplicates(band_keys(build_shingles([])), texts.__getitem__, lambda index: False)) == []


def test_a_thousand_copies_of_a_template_stay_quick_and_each_is_found() -> None:
    base = " ".join(f"w{n}" for n in range(40))
    texts = [f"{base} end{n}" for n in range(1000)]
    found = list(find_near_duplicates(band_keys(build_shingles(texts)), texts.__getitem__, lambda index: False))
    assert [near.index for near in found] == list(range(1, 1000))
    assert {near.earlier for near in found} == {0}


def test_matches_between_two_sets_and_skipped_rows() -> None:
    known = ["one two three four five six", "seven eight nine ten eleven twelve"]
    asked = ["nothing of the kind is known here", "Seven eight nine, ten eleven twelve!"]
    keys, known_keys = band_keys(build_shingles(asked)), band_keys(build_shingles(known))
    (match,) = match_near_duplicates(keys, asked.__getitem__, known_keys, known.__getitem__)
    assert (match.index, match.earlier, match.similarity) == (1, 1, 1.0)
    both = band_keys(build_shingles([known[0], known[0]]))
    assert list(find_near_duplicates(both, lambda index: known[0], lambda index: index == 1)) == []


def test_the_hashes_are_the_same_on_every_machine() -> None:
    keys = band_keys(build_shingles(["the quick brown fox jumps over the lazy dog"]))
    assert keys.dtype == np.uint64
    assert [hex(int(key)) for key in keys[0, :2]] == ["0x870d698f5b7f288d", "0x6cc6095a7364c4e4"]
