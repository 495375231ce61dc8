"""The reference pages say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from surefit.config.modes import MODES

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/reference.py"))


@pytest.mark.parametrize("name", sorted(SCRIPT["PAGES"]))
def test_page_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
    assert written == SCRIPT["PAGES"][name](), "run `make reference`"


def test_every_key_is_on_the_page() -> None:
    page = SCRIPT["config_page"]()
    for key in ("per_device_train_batch_size", "not_worse_than", "output_dir", "trust_remote_code"):
        assert f"| `{key}` |" in page


@pytest.mark.parametrize("mode", MODES)
def test_the_guide_says_when_to_take_a_mode(mode: str) -> None:
    guide = (ROOT / "docs/parallel.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("|") and f"`{mode}`" in line.split("|")[1] for line in guide)
