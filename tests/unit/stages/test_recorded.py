"""A resumed run takes what it decided at its start, whatever "auto" would decide now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.config.resolve import write_resolved
from surefit.core.rundir import RunDir
from surefit.stages.run_context import RunContext, load_run_context

TEXT = (
    "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl, eval: 0}\n"
    "train: {num_train_epochs: auto, global_batch_size: auto}\nhardware: {gpu: GPU}\noutput_dir: runs/x\n"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of 240 rows, started with one device on a T4, with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"a {n}", "completion": "b"}) + "\n" for n in range(240))
    Path("rows.jsonl").write_text(rows)
    Path("run.yaml").write_text(TEXT.replace("GPU", "t4"))
    run = RunDir(Path("runs/x"))
    (run.checkpoints / "step-1").mkdir(parents=True)
    resolved = load_run_context(Path("run.yaml")).resolved
    assert resolved is not None
    write_resolved(resolved, run.resolved)
    return run


def values(context: RunContext) -> tuple[object, ...]:
    assert context.resolved is not None
    config = context.resolved.config
    train = config.train
    return train.global_batch_size, train.num_train_epochs, config.model.dtype, config.parallel.mode


def test_devices_and_card_may_be_others(run: RunDir) -> None:
    assert values(load_run_context(Path("run.yaml"))) == (4, 3.0, "float16", "single")
    Path("run.yaml").write_text(TEXT.replace("GPU", "h100"))
    more = ["hardware.count=8"]
    assert values(load_run_context(Path("run.yaml"), more)) == (8, 4.0, "bfloat16", "ddp"), "what auto decides now"
    resumed = load_run_context(Path("run.yaml"), more, resume=True)
    assert not resumed.problems
    assert values(resumed) == (4, 3.0, "float16", "ddp")
    assert resumed.resolved is not None
    assert resumed.resolved.provenance["train.global_batch_size"].kind == "auto"
    assert "240 rows" in resumed.resolved.provenance["train.global_batch_size"].detail


def test_with_the_same_devices_nothing_is_decided_again(run: RunDir) -> None:
    text = run.resolved.read_text()
    assert "per_device_train_batch_size: 4 " in text
    run.resolved.write_text(text.replace("per_device_train_batch_size: 4 ", "per_device_train_batch_size: 2 "))
    resumed = load_run_context(Path("run.yaml"), resume=True).resolved
    assert resumed is not None
    assert resumed.config.train.per_device_train_batch_size == 2, "a run that adapted to its memory stays adapted"
    write_resolved(resumed, Path("again.yaml"))
    assert Path("again.yaml").read_text() == run.resolved.read_text()


def test_another_card_gets_a_micro_batch_of_its_own(run: RunDir) -> None:
    text = run.resolved.read_text()
    run.resolved.write_text(text.replace("per_device_train_batch_size: 4 ", "per_device_train_batch_size: 2 "))
    Path("run.yaml").write_text(TEXT.replace("GPU", "h100"))
    resumed = load_run_context(Path("run.yaml"), resume=True).resolved
    assert resumed is not None
    assert resumed.config.train.per_device_train_batch_size == 4
    assert resumed.config.model.dtype == "float16", "the rest stays as it was decided"


def test_values_that_the_file_has_count(run: RunDir) -> None:
    Path("run.yaml").write_text(TEXT.replace("GPU", "t4").replace("global_batch_size: auto", "global_batch_size: 16"))
    resumed = load_run_context(Path("run.yaml"), resume=True)
    assert values(resumed)[:2] == (16, 3.0), "the comparison with the checkpoint reports it"


@pytest.mark.parametrize("damage", ["no checkpoint", "no record", "an unreadable record"])
def test_without_a_run_to_resume_all_is_decided(run: RunDir, damage: str) -> None:
    if damage == "no checkpoint":
        (run.checkpoints / "step-1").rmdir()
    elif damage == "no record":
        run.resolved.unlink()
    else:
        run.resolved.write_text("train: [")
    assert values(load_run_context(Path("run.yaml"), ["hardware.count=8"], resume=True))[0] == 8
