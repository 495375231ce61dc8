"""What every detector promises: declared names, one sighting per name, and no crash whatever the row holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.data.audit.detectors import load_detectors, load_file_detectors

COLUMNS = (
    "prompt", "completion", "messages", "conversations", "text", "summary", "tools", "function", "answers", "question",
    "ground_truth", "code", "gold",
)  # fmt: skip
KEYS = ("role", "from", "content", "value", "name", "arguments", "parameters", "properties", "type", "tool_calls")
TEXTS = ("assistant", "gpt", "user", "function_call", "(a / b :c", "#### 1,0", "[{'", '{"a":', "object", "\ud800Ã©\r\n")
leaves = st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from(TEXTS) | st.text(max_size=20)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(COLUMNS), values, max_size=5))
def test_odd_rows(row: dict[str, Any]) -> None:
    for detector in load_detectors():
        seen = Counter(sighting.name for sighting in detector.look(0, row))
        assert set(seen) <= set(detector.names)
        assert all(count == 1 for count in seen.values())


def test_names_are_used_once() -> None:
    names = [name for detector in (*load_detectors(), *load_file_detectors()) for name in detector.names]
    assert len(names) == len(set(names))
