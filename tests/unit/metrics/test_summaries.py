"""Words, sentences, ROUGE and extractiveness: references of their own, and several processes."""

import random

import pytest

from surefit.metrics.extractiveness import coverage_and_density, fragments, novelty
from surefit.metrics.many import map_in_processes
from surefit.metrics.rouge import KINDS, rouge
from surefit.metrics.words import split_sentences, split_words


def published_fragments(document, summary):
    """The pseudo-code of Grusky et al. 2018 (figure 3), word for word."""
    found, i = [], 0
    while i < len(summary):
        longest, j = 0, 0
        while j < len(document):
            if summary[i] != document[j]:
                j += 1
                continue
            k = 0
            while i + k < len(summary) and j + k < len(document) and summary[i + k] == document[j + k]:
                k += 1
            longest, j = max(longest, k), j + k
        if longest:
            found.append(longest)
        i += max(longest, 1)
    return found


def every_start(document, summary):
    """As above, but looking at every start of a match."""
    found, i = [], 0
    while i < len(summary):
        longest = max(k for k in range(len(summary) - i + 1) if k == 0 or _within(summary[i : i + k], document))
        if longest:
            found.append(longest)
        i += max(longest, 1)
    return found


def _within(part, whole):
    return any(whole[j : j + len(part)] == part for j in range(len(whole) - len(part) + 1))


@pytest.mark.parametrize("vocabulary", [2, 4, 40])
def test_fragments_are_the_longest_there_are(vocabulary):
    rng = random.Random(vocabulary)
    differ = 0
    for _ in range(150):
        document = [str(rng.randrange(vocabulary)) for _ in range(rng.randrange(40))]
        summary = [str(rng.randrange(vocabulary + 2)) for _ in range(rng.randrange(15))]
        found = fragments(document, summary)
        assert found == every_start(document, summary)
        differ += found != published_fragments(document, summary)
    assert (differ > 0) == (vocabulary == 2)  # only where passages overlap with themselves


def test_extremes():
    text = split_words("the tax on figs is two percent")
    assert coverage_and_density(text, text) == (1.0, 7.0)
    assert coverage_and_density(text, ["a", "levy"]) == coverage_and_density(text, []) == (0.0, 0.0)
    assert coverage_and_density([], text) == (0.0, 0.0)
    assert [novelty(text, text, n) for n in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert novelty(text, [], 2) == novelty(text, ["one"], 2) == 0.0
    assert novelty([], text, 3) == 1.0


def test_rouge_of_nothing():
    for pair in (("", ""), ("word", ""), ("", "word"), ("…", "—")):
        assert {tuple(value) for value in rouge(*pair).values()} == {(0.0, 0.0, 0.0)}


def test_letters_and_plain_agree_on_plain_text():
    one, other = "The court found, in 2019, for the claimant.", "For the claimant the court found."
    assert rouge(one, other, "letters") == rouge(one, other, "plain")
    assert set(rouge(one, other)) == set(KINDS)


def test_composed_and_decomposed_letters_are_the_same():
    assert split_words("Đồng ý") == split_words("Đồ\u0302ng ý".replace("ồ\u0302", "o\u0302\u0300")) == ["đồng", "ý"]
    assert split_words("क़ानून की धारा") == ["क़ानून", "की", "धारा"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("One", ["One"]),
        ("One. Two? Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("See Roe v. Wade, No. 5, by J. Smith. It stands.", ["See Roe v. Wade, No. 5, by J. Smith.", "It stands."]),
        ("It rose 2.5 percent. so it did", ["It rose 2.5 percent. so it did"]),
        ("He said: “Stop.” She did.", ["He said: “Stop.”", "She did."]),
        ("a heading\n\nA text.", ["a heading", "A text."]),
        ("東京です。大阪です。", ["東京です。", "大阪です。"]),
    ],
)
def test_sentences(text, expected):
    assert split_sentences(text) == expected


def test_processes_give_what_one_gives_in_the_same_order():
    texts = ["Figs are taxed.", "", "Nuts, too", "Figs"] * 3
    expected = [split_words(text) for text in texts]
    assert map_in_processes(split_words, texts, seconds=0, processes=2) == expected
    assert map_in_processes(split_words, texts, seconds=0) == expected
    assert map_in_processes(split_words, [], seconds=1e6) == []
