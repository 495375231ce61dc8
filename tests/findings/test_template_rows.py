"""benchmarks/template_rows.py on a few templates: nothing is lost silently, and no alarm is false."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SWEEP = spec_from_file_location("template_rows", Path(__file__).parents[2] / "benchmarks" / "template_rows.py")
assert SWEEP is not None
assert SWEEP.loader is not None
sweep = module_from_spec(SWEEP)
SWEEP.loader.exec_module(sweep)
SPEC = find_spec("trl") or pytest.skip("trl is not installed", allow_module_level=True)
FOLDER = Path(next(iter(SPEC.submodule_search_locations)))
NAMES = ("cohere", "qwen3_instruct_2507", "gemma", "glm4moe", "gptoss", "lfm2", "llama3", "phi3", "qwen2_5", "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_leaves_out_is_said(name: str) -> None:
    template = (FOLDER / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    counts = Counter(outcome for _, outcome, _ in sweep.outcomes(template))
    assert counts["agreed"] + counts["stopped"] == counts.total() == 20
    assert counts["agreed"] >= 10
