"""The languages of texts: of sentences that are known in all of them, and of what is none."""

# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from surefit.data.audit.languages import READ, UNKNOWN, detect_language

# The first article of the Universal Declaration of Human Rights (United Nations, OHCHR).
ARTICLE = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de "
    "consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di "
    "coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd met verstand en "
    "geweten, en behoren zich jegens elkander in een geest van broederschap te gedragen.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter. De har utrustats med förnuft och "
    "samvete och bör handla gentemot varandra i en anda av gemenskap.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni "
    "rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и "
    "совестью и должны поступать в отношении друг друга в духе братства.",
    "ja": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "he": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
}


@pytest.mark.parametrize("language", ARTICLE)
def test_the_article_is_in_its_language(language: str) -> None:
    assert detect_language(ARTICLE[language]) == language
    assert detect_language(ARTICLE[language] + "\nGPT-4, NVIDIA H100") == language


@pytest.mark.parametrize("text", ["", "x = [3, 4]", "GPT-4", "for i in", "1 + 1 = 2", "🙂🙂"])
def test_what_says_too_little_is_unknown(text: str) -> None:
    assert detect_language(text) == UNKNOWN


def test_only_the_beginning_is_read() -> None:
    assert detect_language("= " * READ + ARTICLE["en"]) == UNKNOWN
