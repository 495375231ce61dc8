"""docs/data.md: every example row is read, and as the layout that it stands for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from tests.helpers.tokens import tokenize_example

from surefit import recipes
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import LAYOUTS, PAIR_LAYOUTS, detect_format, to_examples

PAGE = Path(__file__).parents[3] / "docs/data.md"
SFT = recipes.get_recipe("chat")
DPO = replace(SFT, pairs=True)
KTO = replace(SFT, labelled=True)
PAIR_COLUMNS = {"chosen", "rejected", "rejected_response", "preferred_output", "completions"}


def test_the_example_rows(write, tokenizer):
    rows = [
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ]
    read = [(row, DPO if PAIR_COLUMNS & row.keys() else KTO if "label" in row else SFT) for row in rows]
    layouts = list(dict.fromkeys(detect_format(list(row), recipe) for row, recipe in read))
    assert layouts == [*LAYOUTS, *PAIR_LAYOUTS]
    for row, recipe in read:
        (example,) = to_examples(load_rows(str(write("row.jsonl", [row]))), recipe)
        assert (example.rejected is not None) == (recipe is DPO)
        assert tokenize_example(example, tokenizer).input_ids
