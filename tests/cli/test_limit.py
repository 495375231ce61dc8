"""`data.limit`, as it is typed: what is planned, trained and written down is of that many rows."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.rundir import RunDir, read_json

LIMITED = ["--set", "data.limit=40", "--set", "data.eval=0.2"]


def test_the_plan_has_the_steps_of_the_rows_that_are_taken(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\n"
        f"data: {{train: surefit/function-calling-train}}\ntrain: {{global_batch_size: 8}}\noutput_dir: {tmp_path}/run\n"
    )
    said = CliRunner().invoke(app, ["plan", str(config), *LIMITED, "--quick", "--json"])
    assert said.exit_code == 0, said.output
    steps = json.loads(said.stdout)["steps"]
    print(steps)
    trained = CliRunner().invoke(app, ["train", str(config), *LIMITED, "--set", "train.max_steps=1"])
    assert trained.exit_code == 0, trained.output
    print(trained.output)
    again = CliRunner().invoke(app, ["train", str(config), *LIMITED, "--set", "data.limit=48", "--resume"])
    assert again.exit_code != 0
    assert "rows" in again.output, "another number of rows is another run"
    assert read_json(RunDir(tmp_path / "run").resolved.with_name("plan.json")) is not None
