"""Damage to texts: what is damage, and what only looks like it."""

# ruff: noqa: RUF001 (letters of other writing systems are the subject here)

from __future__ import annotations

import unicodedata

import pytest

from surefit.data.audit.detectors.text import Boilerplate, CarriageReturns, Characters


def seen(text: str) -> set[str]:
    return {sighting.name for sighting in Characters().look(0, {"completion": text})}


@pytest.mark.parametrize(
    "text", ["Le café est fermé.", "“Ça va”, dit-il… très bien", "Tiếng Việt", "Привет", "你好，世界", "π ≈ 3"]
)
@pytest.mark.parametrize("wrong", ["cp1252", "latin-1"])
def test_utf8_read_as_something_else_is_mojibake(text: str, wrong: str) -> None:
    damaged = text.encode().decode(wrong, "replace")
    if "\ufffd" in damaged:
        pytest.skip("Windows-1252 has no character for one of the bytes")
    assert "mojibake" in seen(damaged)


@pytest.mark.parametrize(
    "text",
    [
        "Le café “À la Ñandú”, déjà… «está» — MANHÃ… IRMÃ» ÂGE ¡Olé! 20 °C ½ £5 §3",
        "Ich sagte „Ä“ und „Ö“, © 2024 Müller™ naïve façade ‚so‘",
        "Được rồi, «cá» là gì? Ổn định – tốt",
        "né…» été” à” Ø² Ð œuvre ¾ São João, Não! AÇÃO",
        "Привет, мир! Ελληνικά. 日本語です。 العربية עברית हिन्दी",
        "x − y ≤ z, α → β, 5 × 3 ÷ 2, €10, 3′ 5″ \u2713 \U0001f600\U0001f44d\U0001f3fd",
    ],
)
def test_sound_text_of_any_language_is_not_damage(text: str) -> None:
    assert seen(text) <= {"composed_letters"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("caf\ufffd", "replacement_characters"),
        ("a\x00b", "control_characters"),
        ("\x1b[31mred\x1b[0m", "control_characters"),
        ("na\x85ve é", "control_characters"),
        ("cut \ud83d here", "lone_surrogates"),
        ("fish &amp; chips", "html_entities"),
        ("it&#39;s", "html_entities"),
        ("co\u00adop", "invisible_characters"),
        ("in\u200bvisible", "invisible_characters"),
        ("\u202etxt.exe", "invisible_characters"),
        ("hidden\U000e0041\U000e0042", "invisible_characters"),
    ],
)
def test_stray_characters(text: str, name: str) -> None:
    assert name in seen(text)


@pytest.mark.parametrize(
    "text",
    ["a\tb\nc\x0cd\r\n", "R&D; AT&T", "می\u200cخواهم", "\U0001f469\u200d\U0001f4bb", "ภาษา\u200bไทย", "क\u094dष"],
)
def test_characters_that_a_language_needs(text: str) -> None:
    assert seen(text) == set()


def test_both_unicode_forms_are_told_apart() -> None:
    text = "Tiếng Việt"
    assert seen(text) == {"composed_letters"}
    assert seen(unicodedata.normalize("NFD", text)) == {"decomposed_letters"}
    assert seen(unicodedata.normalize("NFD", text) + text) == {"composed_letters", "decomposed_letters"}


def test_marks_that_have_no_composed_letter_are_in_the_usual_form() -> None:
    assert seen("ọ̀rọ̀ Yorùbá, m̥") == {"composed_letters"}


def test_texts_are_found_however_deep_they_are() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "caf\ufffd"}]}]}
    assert [sighting.name for sighting in Characters().look(7, row)] == ["replacement_characters"]


def test_windows_line_ends_of_the_answer_only() -> None:
    row = {"prompt": "a\r\nb", "completion": "x\r\ny\nz"}
    (sighting,) = CarriageReturns().look(3, row)
    assert (sighting.index, sighting.what) == (3, "1 carriage returns next to 1 bare line feeds in the answer")
    assert not list(CarriageReturns().look(3, row | {"completion": "x\ny"}))


def test_boilerplate_stands_at_the_ends() -> None:
    assert list(
        Boilerplate().look(0, {"summary": "A bill. (This measure has not been amended since it was introduced.)"})
    )
    assert not list(Boilerplate().look(0, {"summary": "x" * 500 + "All rights reserved" + "y" * 500}))
