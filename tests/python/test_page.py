"""docs/python.md and the notebook, typed as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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
def test_the_notebook_shows_what_it_returns(tmp_path: Path) -> None:
    """In a kernel of Jupyter's, which asks what the last line of a cell gives for its picture."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output.data.get("text/html", output.data["text/plain"])
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    findings, memory, loss, certificate, scores = shown[:5]
    assert "no problem found by" in findings
    assert memory.startswith("<svg")
    assert "<polyline" in loss
    assert "certificate passed" in certificate
    assert "<td>merged</td>" in scores
