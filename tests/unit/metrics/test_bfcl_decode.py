"""Python-call syntax: what it means, and that no text can run code, fill the memory or raise anything unforeseen."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.metrics.bfcl_decode import MAX_CHARACTERS, DecodeError, decode_calls


def argument(source):
    ((call),) = decode_calls(f"[f(x={source})]")
    return call["arguments"]["x"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1 + 2 * 3", 7),
        ("7 // 2 - 1", 2),
        ("1 << 3 | 1", 9),
        ("+3 + 1", 4),  # inside arithmetic the operators are Python's own
        ("'a' + 'b' * 2", "abb"),
        ("[1] + [2, 3]", [1, 2, 3]),
        ("(1,) * 2", (1, 1)),
        ("2 ** -1", 0.5),
        ("(1, [2, {'k': y}])", (1, [2, {"k": "y"}])),
        ("...", "..."),
        ("g(1)", "g(1)"),
        ("g(a=1)", {"g": {"a": 1}}),
        ("rows[0]", "rows[0]"),
        ("None", None),
        ("+3", -3),
        ("~1", -1),
        ("not True", -1),
    ],
)
def test_values(source, value):
    assert argument(source) == value
    assert type(argument(source)) is type(value)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("'f(x=1)'", [("f", {"x": 1})]),
        ("f(1, 2)", [("f", {})]),
        ("f(x)(y=2)", [("", {"y": 2})]),
        ("f(**{'a': 1})", [("f", {"null": {"a": 1}})]),
        ("f(x=1, y=true), a.b()", [("f", {"x": 1, "y": "true"}), ("a.b", {})]),
        ("[]", []),
    ],
)
def test_calls(text, calls):
    assert [(call["name"], call["arguments"]) for call in decode_calls(text)] == calls


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').getpid() + 1",
        "open('f') + 1",
        "len('ab') + 1",
        "y + 1",
        "f'{1}' + 'a'",
        "lambda: 1",
        "[i for i in (1, 2)]",
        "1 if True else 2",
        "1 < 2",
        "{[]: 1}",
        "{**{}}",
        "1 / 0",
        "'a' + 1",
        "-'a'",
        "-2 ** 2",  # a sign in front of anything but a number
        "not None",
        "'%1000000000d' % 1",
        "1 @ 2",
        "1.0 << 2",
        "1 << -1",
    ],
)
def test_refused_arguments(source):
    with pytest.raises(DecodeError):
        argument(source)


@pytest.mark.parametrize(
    "source",
    [
        "9**9**9",
        "'a' * 10**9",
        "10**9 * 'a'",
        "[0] * 10**9",
        "[[0] * 300] * 400",
        "[" + ", ".join(["[0] * 9000"] * 100) + "]",
        "1 << 10**9",
        "2**900 * 2**900",
        "0x" + "f" * 90_000,
        "9" * 90_000,
        "-" * 90_000 + "1",
        "1+" * 40_000 + "1",
        "[" * 150 + "]" * 150,
        "[" * 49_000 + "]" * 49_000,
        "{1:" * 20_000,
        "lambda:" * 10_000 + "1",
        "a" + "[0]" * 30_000,
        "a" + "()" * 40_000,
        "g(" * 60 + "h(0x" + "f" * 20_000 + ")" + ")" * 60,
        "'" + "a" * MAX_CHARACTERS + "'",
    ],
    ids=lambda source: source[:12],
)
def test_bombs_are_refused(source):
    """Each would take minutes, gigabytes or the interpreter's stack if it were carried out."""
    with pytest.raises(DecodeError):
        argument(source)


def test_a_models_odd_escapes_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert argument(r"'\d'") == r"\d"


TOKENS = """f g. ( ) [ ] { } , : = ** * + - ~ not 1 2.5 1j 0x1f 'a' "b" b'c' f'{d}' True None ... x lambda if else for
in await := @ << // % | < == and \\ # ; é"""
FRAGMENTS = st.sampled_from([*TOKENS.split(), "\n", "\0"])


@settings(max_examples=500, deadline=None)
@given(st.text() | st.lists(FRAGMENTS, max_size=25).map(" ".join) | st.lists(FRAGMENTS, max_size=12).map("".join))
def test_nothing_but_a_decode_error_is_ever_raised(text):
    for candidate in (text, f"[f(x={text})]"):
        try:
            calls = decode_calls(candidate)
        except DecodeError:
            continue
        assert all(call.keys() == {"name", "arguments"} for call in calls)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 2**60) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    )
)
def test_literals_come_back(value):
    assert argument(repr(value)) == value
