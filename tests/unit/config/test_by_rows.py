"""Epochs and batch that the rows decide: the numbers of the rule, their reasons, and that numbers stay as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from surefit.config.by_rows import choose_epochs, choose_global_batch_size
from surefit.config.load import load_config
from surefit.core.errors import ConfigError
from surefit.stages.checking import run_check
from surefit.stages.run_context import RunContext, load_run_context

RUN = (
    "recipe: chat\nmodel: {{name_or_path: surefit/nano}}\ndata: {{train: {rows}, eval: 0}}\ntrain: {train}\n"
    "output_dir: runs/x\n"
)


def context(tmp_path: Path, train: str, rows: int = 240, source: str = "rows.jsonl", more: str = "") -> RunContext:
    text = "".join(json.dumps({"prompt": f"a {n}", "completion": "b"}) + "\n" for n in range(rows))
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    name = source if "/" in source else tmp_path / source
    (tmp_path / "run.yaml").write_text(RUN.format(rows=name, train=train) + more, encoding="utf-8")
    return load_run_context(tmp_path / "run.yaml")


@pytest.mark.parametrize("rows", [1, 10, 49, 240, 999, 3_000, 20_000, 10**6])
def test_the_rule_gives_a_batch_of_a_fiftieth_and_enough_steps(rows):
    batch = choose_global_batch_size(rows)
    epochs = choose_epochs(rows, batch)
    assert 4 <= batch <= 64
    assert batch == 4 or batch <= rows / 50
    assert 1 <= epochs <= 10
    assert rows * epochs >= 100 * batch or epochs in (10, 1) or rows * epochs >= 20_000


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 48])
def test_a_batch_is_shared_evenly_by_the_devices(devices):
    for rows in (20, 240, 3_000, 10**6):
        batch = choose_global_batch_size(rows, devices)
        assert batch % devices == 0
        assert batch >= choose_global_batch_size(rows)


def test_auto_is_decided_with_its_reason(tmp_path):
    resolved = context(tmp_path, "{num_train_epochs: auto, global_batch_size: auto}").resolved
    assert resolved is not None
    train = resolved.config.train
    assert (train.num_train_epochs, train.global_batch_size, resolved.total_steps) == (3.0, 4, 180)
    for name in ("num_train_epochs", "global_batch_size"):
        origin = resolved.provenance[f"train.{name}"]
        assert origin.kind == "auto"
        assert "240 rows" in origin.detail


@pytest.mark.parametrize(
    ("train", "epochs", "batch"),
    [
        ("{num_train_epochs: 2, global_batch_size: 8}", 2.0, 8),
        ("{num_train_epochs: 2, global_batch_size: auto}", 2.0, 4),
        ("{num_train_epochs: auto, global_batch_size: 24}", 10.0, 24),
        ("{}", 1.0, 64),
    ],
)
def test_numbers_stay_as_they_are_written(tmp_path, train, epochs, batch):
    resolved = context(tmp_path, train).resolved
    assert resolved is not None
    assert (resolved.config.train.num_train_epochs, resolved.config.train.global_batch_size) == (epochs, batch)


def test_mixed_rows_count_and_held_out_rows_do_not(tmp_path):
    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"prompt": f"m {n}", "completion": "b"}) + "\n" for n in range(400)), encoding="utf-8"
    )
    context(tmp_path, "{}")
    text = (tmp_path / "run.yaml").read_text().replace("eval: 0", f"eval: 0.5, mix: {{{tmp_path}/more.jsonl: 2}}")
    (tmp_path / "run.yaml").write_text(text.replace("train: {}", "train: {global_batch_size: auto}"))
    resolved = load_run_context(tmp_path / "run.yaml").resolved
    assert resolved is not None
    assert resolved.config.train.global_batch_size == choose_global_batch_size(120 + 800) == 16


def test_the_devices_share_an_automatic_batch(tmp_path):
    more = "hardware: {count: 6, gpu: h100}\n"
    resolved = context(tmp_path, "{global_batch_size: auto}", more=more).resolved
    assert resolved is not None
    assert resolved.config.train.global_batch_size == 6


def test_rows_that_are_not_counted_decide_nothing(tmp_path):
    found = context(tmp_path, "{global_batch_size: auto}", source="owner/name")
    (problem,) = found.problems
    assert isinstance(problem, ConfigError)
    assert (problem.field, problem.line) == ("train.global_batch_size", 4)
    found = context(tmp_path, "{num_train_epochs: auto}", source="missing.jsonl")
    (problem,) = found.problems
    assert problem.field != "train.num_train_epochs", "the missing file alone is reported"
    assert context(tmp_path, "{}", source="owner/name").problems == ()


@pytest.mark.parametrize("value", ["Auto", "0", "-1", "2.5", "'64'", "[4]", "null"])
def test_other_words_are_errors(tmp_path, value):
    (tmp_path / "run.yaml").write_text(
        RUN.format(rows="rows.jsonl", train=f"{{global_batch_size: {value}}}"), encoding="utf-8"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "run.yaml")
    assert raised.value.field == "train.global_batch_size"


def test_the_resolved_config_holds_numbers(tmp_path):
    from surefit.config.resolve import write_resolved

    resolved = context(tmp_path, "{num_train_epochs: auto, global_batch_size: auto}").resolved
    assert resolved is not None
    write_resolved(resolved, tmp_path / "resolved.yaml")
    train = yaml.safe_load((tmp_path / "resolved.yaml").read_text(encoding="utf-8"))["train"]
    assert (train["num_train_epochs"], train["global_batch_size"]) == (3.0, 4)


def test_an_auto_batch_is_a_multiple_of_the_micro_batch(tmp_path):
    found = context(tmp_path, "{global_batch_size: auto, per_device_train_batch_size: 3}", rows=120)
    assert not found.problems
    assert found.resolved is not None
    assert found.resolved.config.train.global_batch_size == 6


def test_pairs_are_seen_once_and_no_advice_says_more(tmp_path):
    rows = "".join(
        json.dumps({"prompt": f"a {n}", "chosen": f"b {n}", "rejected": f"c {n}"}) + "\n" for n in range(240)
    )
    (tmp_path / "pairs.jsonl").write_text(rows, encoding="utf-8")
    train = "{num_train_epochs: auto, global_batch_size: 16}"
    config = RUN.format(rows=tmp_path / "pairs.jsonl", train=train) + "objective: dpo\n"
    (tmp_path / "pairs.yaml").write_text(config, encoding="utf-8")
    found = load_run_context(tmp_path / "pairs.yaml")
    assert found.resolved.config.train.num_train_epochs == 1
    (few,) = [finding for finding in run_check(found)["findings"] if finding["code"] == "SCH011"]
    assert few["help"] == "write train.global_batch_size: 4 (60 steps)"
