"""Language detection, as an ISO 639-1 code: py3langid's classifier of byte n-grams (Lui & Baldwin 2012).

The passport names the languages of a data set. docs/audit.md says how often that is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from surefit.core.packaging import is_installed

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

READ = 1_000
"""Characters of a text that are classified."""
UNKNOWN = "unknown"
MIN_PROBABILITY = 0.7
"""The probability that a language must exceed. Code and single words stay below it."""
LANGUAGES = (
    "af am ar az be bg bn ca cs cy da de el en es et eu fa fi fr ga gu he hi hr hu hy id is it ja ka kk km kn ko "
    "lo lt lv mk ml mn mr mt ne nl no pa pl ps pt ro ru si sk sl sq sr sv sw ta te th tl tr uk ur vi zh"
)
"""The languages used out of the classifier's 139. A language too close to a more common one would take part of its
probability: Cantonese of Chinese's, Malay of Indonesian's, Galician of Spanish's."""


def count_languages(texts: Iterable[str]) -> Counter[str]:
    """Count texts by language; empty where the classifier is not installed."""
    return Counter(detect_language(text) for text in texts if text) if is_installed("py3langid") else Counter()


def detect_language(text: str) -> str:
    """Return the language of a text, or `UNKNOWN`.

    >>> [detect_language(text) for text in ("Die Katze sitzt nicht auf dem Dach", "猫は屋根の上にいる", "x = 3")]
    ['de', 'ja', 'unknown']
    """
    language, probability = _classifier().classify(text[:READ])
    return language if probability > MIN_PROBABILITY else UNKNOWN


@cache
def _classifier() -> LanguageIdentifier:
    """Load the classifier, once per process: 0.8 s of CPU time."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    classifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    classifier.set_languages(LANGUAGES.split())
    return classifier
