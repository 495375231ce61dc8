"""docs/python.md and the notebook, typed as they stand."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "python.md", ROOT / "examples" / "from_python.ipynb"


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """In a process of its own: libraries are told to be quiet before they are imported, by whoever is first."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    holds = "assert certificate.passed\nassert len(losses) == run.steps == 2\n"
    (tmp_path / "page.py").write_text("\n".join([*blocks, holds]))
    said = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "runs/from-python/report.html").is_file()
    assert "expected a number (above 0, below 10), got 50" in said.stdout, "the last block's error was caught and said"
    assert "training 188.42k of 1.60M parameters" in said.stderr
    assert "Loading weights" not in said.stderr, "libraries are quiet, as on the command line"


@pytest.mark.slow
def test_the_notebook_shows_what_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, as a kernel does: what the last expression of a cell gives is asked for its picture."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else str(value))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    findings, memory, loss, certificate, scores = shown[:5]
    assert "no problem found by" in findings
    assert memory.startswith("<svg")
    assert "<polyline" in loss
    assert "certificate passed" in certificate
    assert "<td>merged</td>" in scores
