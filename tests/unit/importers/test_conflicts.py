"""The table of combinations that other tools reject: every row can be read, and every function is used."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.importers.configs import MODULES, load_tool_schema
from surefit.importers.conflicts import _TERM, CONDITIONS, _tables, holds, read_conflict_rows

ROWS = [(table, *row) for table in _tables() for row in read_conflict_rows(table)]


def test_every_row_can_be_read() -> None:
    """Every term is valid, every key is one of the tool's, and every function is called by a row."""
    called = set()
    for table, condition, keys, expected in ROWS:
        tool = table.split()[0]
        schema = load_tool_schema(tool if tool in MODULES else "trl")
        assert expected, condition
        for term in condition.split():
            parts = _TERM.fullmatch(term)
            assert parts, term
            called |= {parts["keys"]} if parts["call"] else set()
            names = () if parts["call"] else parts["keys"].split("/")
            for name in (*names, *keys.removeprefix("! ").split()):
                section = name.partition(".")[0]
                known = schema.knows(name) or name in schema.deprecated or name in schema.gone
                assert known or section in schema.open_sections or schema.knows(section), (table, name)
    assert called == set(CONDITIONS)


@pytest.mark.parametrize(
    ("condition", "values", "expected"),
    [
        ("a", {"a": 0}, False),
        ("!a", {"a": "none"}, True),
        ("a/b", {"b": 1}, True),
        ("!a !b", {"b": 1}, False),
        ("a=x|null", {}, True),
        ("a!=x|null", {"a": "Y"}, True),
        ("a!=x", {"a": "X"}, False),
        ("a/b=2", {"b": "2"}, True),
        ("a=true", {"a": True}, True),
        ("a=*8bit*", {"a": "paged_adamw_8bit"}, True),
        ("a<1e-6", {}, True),
        ("a>0 a<1", {"a": 0.5}, True),
        ("a>0", {"a": True}, False),
        ("a b", {"a": 1}, False),
    ],
)
def test_holds(condition: str, values: dict[str, Any], expected: bool) -> None:
    assert holds(condition, values) is expected
