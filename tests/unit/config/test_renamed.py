"""Keys by the names that they had before: said with the new name, and written by `check --fix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.edit import rename_text
from surefit.config.load import expected_text, load_config, parse_yaml
from surefit.config.renamed import KEYS, VALUES, with_new_names
from surefit.core.errors import ConfigError

OLD = """\
recipe: function_calling + sft  # two tasks
model: {name_or_path: surefit/nano}
# beside frozen weights
adapter:
  kind: lora
  alpha: 16   # twice r
  r: 8
data: {train: rows.jsonl, eval: 0.1}
train:
  epochs: 2   # as published
  schedule: constant
  optimizer: adamw
  seed: 3
checkpoint: {every: 10, keep_best: eval_loss}
evaluate:
  also: {old: other.jsonl}
output_dir: runs/x
"""
NEW = """\
recipe: function_calling + chat  # two tasks
model: {name_or_path: surefit/nano}
# beside frozen weights
lora:
  lora_alpha: 16   # twice r
  r: 8
data: {train: rows.jsonl, eval: 0.1}
train:
  num_train_epochs: 2   # as published
  lr_scheduler_type: constant_with_warmup
  optim: adamw_torch
  seed: 3
  method: lora
checkpoint: {save_steps: 10, metric_for_best_model: eval_loss}
evaluate:
  extra_sets: {old: other.jsonl}
output_dir: runs/x
"""


def test_every_new_key_is_one() -> None:
    assert {expected_text(new) for new in KEYS.values()} - {"text"}
    for old, values in VALUES.items():
        for value in values.values():
            assert f"'{value}'" in expected_text(KEYS[old])


def test_each_old_key_is_said_with_its_new_name_beside_every_other_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OLD.replace("seed: 3", "seed: x"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    problems = [caught.value, *caught.value.also]
    old = {problem.field: problem for problem in problems if problem.code == "E2103"}
    assert old.keys() == {
        "recipe", "adapter.kind", "adapter.alpha", "adapter.r", "train.epochs", "train.schedule", "train.optimizer",
        "checkpoint.every", "checkpoint.keep_best", "evaluate.also",
    }  # fmt: skip
    assert [problem.field for problem in problems if problem.code != "E2103"] == ["train.seed"]
    assert old["adapter.alpha"].line == 6
    for key, problem in old.items():
        assert KEYS.get(key, "chat") in problem.message
    assert "constant_with_warmup" in old["train.schedule"].message


def test_of_two_names_for_one_key_one_goes_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(NEW.replace("seed: 3", "optimizer: adamw"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert (caught.value.code, caught.value.field) == ("E2103", "train.optimizer")
    assert "--fix" not in str(caught.value.help)


def test_an_old_key_on_the_command_line_is_said_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(NEW)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["train.optimizer=paged_adamw"])
    assert (caught.value.code, caught.value.field, caught.value.path) == ("E2102", "train.optimizer", "--set")
    assert "--set train.optim=paged_adamw_32bit" in str(caught.value.help)


def test_the_new_names_are_written_where_the_old_ones_stood() -> None:
    edited = rename_text(OLD, Path("run.yaml"))
    assert (edited.text, edited.refused) == (NEW, {})
    assert rename_text(NEW, Path("run.yaml")).done == []
    assert parse_yaml(NEW, Path("run.yaml"))[0] == with_new_names(yaml.safe_load(OLD))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter: {kind: full}\noutput_dir: x\n", {"train": {"method": "full"}, "output_dir": "x"}),
        ("adapter: {r: 4}\nlora: {use_dora: true}\n", {"lora": {"use_dora": True, "r": 4}}),
        ("adapter: {r: 4, rank: 8}\n", {"lora": {"r": 4, "rank": 8}}),
        ("train: {warmup: 0.1}\n", {"train": {"warmup_steps": 0.1}}),
        # Nobody can say which of two is meant.
        ("train: {warmup: 0.1, warmup_steps: 3}\n", {"train": {"warmup": 0.1, "warmup_steps": 3}}),
    ],
    ids=["a section that is empty then", "two sections", "an unknown key", "flow", "both"],
)
def test_other_places(text: str, expected: dict[str, Any]) -> None:
    assert yaml.safe_load(rename_text(text, Path("run.yaml")).text) == expected


def test_the_record_of_a_run_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(OLD)
    (tmp_path / "events.jsonl").write_text("")
    done = CliRunner().invoke(app, ["check", str(tmp_path), "--fix"])
    assert done.exit_code == 2
    assert (tmp_path / "resolved.yaml").read_text() == OLD


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["written", "dry run"])
def test_check_fix_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    text = OLD.replace("function_calling + sft", "sft")
    Path("run.yaml").write_text(text)
    Path("rows.jsonl").write_text('{"prompt": "One?", "completion": "Two."}\n' * 20)
    done = CliRunner().invoke(app, ["check", "run.yaml", "--fix", *dry])
    assert (done.exit_code == 2) == bool(dry), "with --dry-run the old names are still there"
    written = Path("run.yaml").read_text()
    assert (written == text) == bool(dry)
    if not dry:
        config = load_config(Path("run.yaml")).config
        assert (config.recipe, config.lora.lora_alpha, config.train.num_train_epochs) == ("chat", 16, 2)
        assert "# as published" in written
