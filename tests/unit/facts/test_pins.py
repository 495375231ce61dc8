"""Whether one release can be what two requirements ask for."""

from __future__ import annotations

import pytest

from surefit.facts.pins import compatible, exact


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("", "", True),
        (">=2", "<2", False),
        (">=2", "<=2", True),
        (">1.26", "<2", True),
        ("==2.1.4", ">=2.2.2", False),
        ("==2.1.*", ">=2.1.9", True),
        ("==2.1.*", ">=2.2", False),
        ("~=4.46", "<5", True),
        ("~=4.46", ">=5", False),
        (">=2,!=2.0", "<=2.0", False),
        ("==2.3.1+cu121", "==2.3.*", True),
        ("<2.0.0", ">=1.99", True),
        ("<0", "", False),
        ("not a specifier", ">=2", True),
    ],
)
def test_both_at_once(one: str, other: str, both: bool) -> None:
    assert compatible(one, other) is both
    assert compatible(other, one) is both


@pytest.mark.parametrize(("text", "version"), [("==2.1.4", "2.1.4"), ("==2.1.*", None), (">=2", None), ("x", None)])
def test_one_version(text: str, version: str | None) -> None:
    assert exact(text) == version
