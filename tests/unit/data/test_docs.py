"""docs/data.md: every example row is read, and as the layout that it stands for."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.helpers.tokens import tokenize_example

from surefit import recipes
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import LAYOUTS, detect_format, to_examples

PAGE = Path(__file__).parents[3] / "docs/data.md"
SFT = recipes.get_recipe("chat")


def test_the_example_rows(write, tokenizer):
    rows = [
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert list(dict.fromkeys(detect_format(list(row), SFT) for row in rows)) == list(LAYOUTS)
    for row in rows:
        (example,) = to_examples(load_rows(str(write("row.jsonl", [row]))), SFT)
        assert tokenize_example(example, tokenizer).input_ids
