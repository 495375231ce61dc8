"""`data.limit`, as it is typed: plan and training are of that many rows, and a resume keeps their number."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from surefit.cli.app import app

CONFIG = """\
recipe: function_calling
model: {name_or_path: surefit/nano}
data: {train: surefit/function-calling-train, eval: 0.2, limit: 40}
train: {global_batch_size: 8, max_steps: 1}
"""


def test_rows_are_limited_in_plan_training_and_resume(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"{CONFIG}output_dir: {tmp_path}/run\n")
    planned = CliRunner().invoke(app, ["plan", str(config), "--quick", "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["steps"]["rows"] == 40
    trained = CliRunner().invoke(app, ["train", str(config)])
    assert trained.exit_code == 0, trained.output
    assert "on 31 examples, 9 held out" in trained.output
    again = CliRunner().invoke(app, ["train", str(config), "--set", "data.limit=48", "--resume"])
    assert again.exit_code != 0
    assert "data.train: rows" in again.output
