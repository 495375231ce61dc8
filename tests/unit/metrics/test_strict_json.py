"""JSON from untrusted text: what the standard allows, within bounds."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.metrics.strict_json import MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS, strict_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[1,]", "JSON|Expecting|Illegal"),
        ("[1] x", "Extra data"),
        ("\ufeff[]", "BOM"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[1e999]", "out of a float's range"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        ('["\\ud800"]', "surrogate"),
        ("['a']", "Expecting value"),
        ('["a\nb"]', "control character"),
        ("1" * (MAX_DIGITS + 1), f"{MAX_DIGITS + 1} digits"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ("[" * 400_000, "deep|Expecting"),
        ('{"a":' * 100_000, "deep|Expecting"),
        (" " * MAX_CHARACTERS + "1", "1,000,001 characters"),
    ],
    ids=lambda text: text[:16],
)
def test_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        strict_json(text)


@pytest.mark.parametrize(
    "text",
    [
        " \n[] ",
        "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH,
        "9" * MAX_DIGITS,
        '"\\ud83d\\ude00"',
        '{"a": {"a": 1}}',
        "1e-999",
    ],
    ids=lambda text: text[:16],
)
def test_accepted_as_json_reads_it(text):
    assert strict_json(text) == json.loads(text)


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet='[]{}",:0123456789.eE-+ntrufalse\\ ', max_size=40))
def test_only_value_errors(text):
    try:
        value = strict_json(text)
    except ValueError:
        return
    assert strict_json(json.dumps(value)) == value
