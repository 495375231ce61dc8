"""`surefit runs`: looked into, compared, pruned and reproduced, as its user meets it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefit.cli.runs.reproduce import compare_curves
from surefit.cli.runs.summary import disk_usage, summarize_run
from surefit.core.rundir import RunDir


@pytest.fixture
def made(surefit: Any, config: Path) -> RunDir:
    """A run of three steps, with a checkpoint after each."""
    answer = surefit("train", config, "--set", "checkpoint.save_total_limit=3")
    assert answer.code == 0, answer.text
    return RunDir(Path("runs/one"))


def test_a_run_is_shown_compared_and_reproduced(surefit: Any, made: RunDir, config: Path) -> None:
    for arguments in (("runs",), ("list",), ("list", "runs"), ()):
        assert [one["run"] for one in surefit("runs", *arguments, "--json").json["runs"]] == ["runs/one"]
    shown = surefit("runs", "show", made.path, "--json").json
    assert shown["settings"]["train.max_steps"] == "3"
    assert [stage["outcome"] for stage in shown["stages"]] == ["finished"]
    assert shown["disk"]["checkpoints"] > shown["disk"]["adapter"] > 0
    assert any("surefit merge" in line for line in shown["resumable"])
    assert "train.max_steps" in surefit("runs", "show", made.path).stdout

    before = made.metrics.read_bytes()
    same = surefit("runs", "reproduce", made.path, "--steps", "2", "--json")
    assert (same.code, same.json["reproduced"], same.json["identical"], same.json["steps"]) == (0, True, True, 2)
    assert made.metrics.read_bytes() == before

    rows = Path("rows.jsonl").read_text().replace("person 1", "nobody 1")
    Path("rows.jsonl").write_text(rows)
    other = surefit("runs", "reproduce", made.path, "--steps", "1", "--json")
    assert (other.code, other.json["reproduced"]) == (1, False)
    assert "hash" in other.json["data_changed"]

    again = Path("runs/two")
    shutil.copytree(made.path, again)
    text = (again / "resolved.yaml").read_text().replace("seed: 0", "seed: 5")
    (again / "resolved.yaml").write_text(text)
    found = surefit("runs", "diff", made.path, again, "--json").json
    assert found["settings"] == {"train.seed": [0, 5]}
    assert (found["data"], found["environment"], found["scores"]) == ({}, {}, {})


def test_prune_deletes_only_what_nothing_needs(surefit: Any, made: RunDir) -> None:
    kept = {"adapter", "checkpoints", "resolved.yaml", "metrics.jsonl"}
    for name in ("merged", "eval", "export"):
        (made.path / name).mkdir()
        (made.path / name / "precious").write_text("x")
    (made.path / ".merged.77.tmp").mkdir()
    (made.path / ".adapter.77.old").mkdir()
    (made.path / ".model.77.old").mkdir()  # the only copy: killed between two renames
    uploaded, offline, synced = ("run-1-a", "offline-run-2-b", "offline-run-3-c")
    for name in (uploaded, offline, synced):
        (made.path / "wandb" / name).mkdir(parents=True)
    (made.path / "wandb" / synced / "run-c.wandb.synced").touch()
    steps = {path.name for path in made.checkpoints.iterdir()}
    assert steps == {"step-1", "step-2", "step-3"}

    dry = surefit("runs", "prune", "runs", "--json").json
    listed = {Path(row["path"]).name for row in dry["surplus"]}
    assert not dry["deleted"]
    assert {path.name for path in made.checkpoints.iterdir()} == steps
    assert {".merged.77.tmp", ".adapter.77.old", uploaded, synced} <= listed
    assert not {"step-3", ".model.77.old", offline} & listed

    done = surefit("runs", "prune", made.path, "--yes", "--json").json
    assert done["deleted"]
    assert done["freed"] == dry["could_free"] > 0
    there = {path.name for path in made.path.iterdir()}
    assert kept | {"merged", "eval", "export", ".model.77.old"} <= there
    assert not {".merged.77.tmp", ".adapter.77.old"} & there
    assert {path.name for path in (made.path / "wandb").iterdir()} == {offline}
    left = {path.name for path in made.checkpoints.iterdir()}
    assert "step-3" in left
    assert left == steps - listed
    assert surefit("runs", "prune", made.path).stdout.startswith("Nothing to prune")


def test_a_run_that_is_at_work_is_left_alone(surefit: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/busy")
    run.checkpoints.mkdir(parents=True)
    run.resolved.write_text("recipe: function_calling\ndata: {train: rows.jsonl}\n")
    (run.path / ".merged.77.tmp").mkdir()
    script = (
        "import sys, pathlib\nfrom surefit.core.lock import hold_lock\n"
        "with hold_lock(pathlib.Path(sys.argv[1]), 'train'):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(run.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        answer = surefit("runs", "prune", "runs", "--yes", "--json").json
        assert "surefit train" in answer["skipped"]["runs/busy"]
        assert (run.path / ".merged.77.tmp").exists()
        assert other.stdin is not None
        other.stdin.close()
    assert surefit("runs", "prune", "runs", "--yes", "--json").json["skipped"] == {}
    assert not (run.path / ".merged.77.tmp").exists()


def test_no_run_no_answer(surefit: Any) -> None:
    Path("empty").mkdir()
    for arguments in (("show", "empty"), ("reproduce", "empty"), ("diff", "empty", "empty")):
        answer = surefit("runs", *arguments)
        assert (answer.code, "no run is here" in answer.text) == (2, True)
    assert surefit("runs", "prune", "empty", "--json").json["could_free"] == 0
    answer = surefit("runs", "prune", "nowhere")
    assert answer.code == 2
    assert re.search(r"nowhere: error\[E\d+\] there is no such directory", answer.text)


def test_a_line_that_no_reader_takes_does_not_hide_the_other_runs(surefit: Any) -> None:
    for name in ("sound", "deep"):
        run = RunDir(Path("runs") / name)
        run.create()
        run.resolved.write_text("recipe: chat\n")
        run.metrics.write_text('{"step": 7, "loss": 1.0}\n' if name == "sound" else "[" * 100_000 + "\n")
    answer = surefit("runs", "runs", "--json")
    assert answer.code == 0, answer.text
    assert {Path(one["run"]).name for one in answer.json["runs"]} == {"sound", "deep"}
    assert surefit("runs", "runs").code == 0


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 8} | values


def test_list_and_show_count_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links count as nothing, except for a directory of the run on another disk; nor does a file that vanishes."""
    run, elsewhere = RunDir(tmp_path / "run"), tmp_path / "scratch"
    for folder in (run.path / "adapter", elsewhere):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"0" * 100)
    (run.path / "checkpoints").symlink_to(elsewhere)
    (run.path / "adapter" / "linked").symlink_to(elsewhere / "weights")
    (run.path / "linked").symlink_to(elsewhere / "weights")
    run.events.write_text("\n" * 7)
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((*found[:2], [*found[2], "vanished"]) for found in walk(top)))
    assert disk_usage(run) == {"adapter": 100, "checkpoints": 100, "files": 7}
    assert summarize_run(run)["bytes"] == 207


def test_curves_are_compared_bit_for_bit() -> None:
    before = [line(1), line(2, loss=1.0)]
    assert compare_curves(before, json.loads(json.dumps(before))).identical
    near = compare_curves(before, [line(1), line(2, loss=1.0 + 1e-9)])
    assert not near.identical
    assert near.largest == pytest.approx(1e-9, rel=1e-6)
    assert near.first is not None
    assert near.first.startswith("step 2: loss 1.0 then")
    assert compare_curves(before, [line(1, tokens=9), line(2, loss=1.0)]).largest == float("inf")
    assert compare_curves(before, [line(1, loss=None), line(2, loss=1.0)]).largest == float("inf")
    assert compare_curves(before, before[:1]).largest == float("inf")
