"""`import surefit`: what it costs, what it returns, and that it does what the command line does."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import surefit
from surefit.core.rundir import read_jsonl
from surefit.results import TrainingResult

VALUES: dict[str, Any] = {
    "recipe": "function_calling",
    "model": {"name_or_path": "surefit/nano"},
    "lora": {"r": 8},
    "data": {"train": "surefit/function-calling-train", "eval": 0.002, "max_length": 512},
    "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 0.01},
    "evaluate": {"max_examples": 2, "max_new_tokens": 8},
    "output_dir": "runs/python",
}


def config(folder: Path, **changes: Any) -> surefit.Config:
    return surefit.Config.from_dict(VALUES | {"output_dir": str(folder / "run")}, changes)


def files_of(run: Path) -> set[Path]:
    return {path.relative_to(run) for path in run.rglob("*") if path.is_file()}


def test_importing_it_costs_nothing_and_checking_needs_no_torch() -> None:
    script = (
        "import time; before = time.process_time(); import surefit; spent = time.process_time() - before\n"
        "import sys, json; light = sorted({'torch', 'transformers', 'pydantic', 'yaml'} & set(sys.modules))\n"
        f"surefit.check(surefit.Config.from_dict({VALUES!r}))\n"
        "print(json.dumps([spent, light, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spent, light, torch = json.loads(done.stdout)
    assert spent < 0.2
    assert light == []
    assert torch is False


@pytest.mark.slow
def test_a_run_typed_in_python_leaves_what_the_command_line_leaves(tmp_path: Path) -> None:
    made = config(tmp_path / "python")
    run = surefit.train(made, quiet=True)
    surefit.merge(run, quiet=True)
    scores = surefit.evaluate(run, quiet=True)
    surefit.report(run)
    file = tmp_path / "run.yaml"
    file.write_text(str(made.changed({"output_dir": str(tmp_path / "cli/run")})))
    command = [sys.executable, "-m", "surefit", "run", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout.splitlines()[-1])
    one, other = tmp_path / "python/run", tmp_path / "cli/run"
    assert files_of(one) == files_of(other)
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert scores.document["sets"] == said["scores"]["sets"]
    assert [line["loss"] for line in run.metrics() if "grad_norm" in line] == [
        line["loss"] for line in read_jsonl(other / "metrics.jsonl") if "grad_norm" in line
    ]


@pytest.mark.slow
def test_a_callback_sees_every_step_and_ends_the_run_with_its_result(tmp_path: Path) -> None:
    seen = []

    def after_two(state: Any) -> bool:
        seen.append((state.step, state.total_steps, state.loss))
        return state.step == 2

    run = surefit.train(config(tmp_path), callbacks=[lambda state: None, after_two], quiet=True)
    assert [step for step, *_ in seen] == [1, 2]
    assert (run.steps, run.total_steps, run.stopped_early) == (2, 3, True)
    assert run.output is not None
    assert (run.output / "adapter_model.safetensors").is_file()
    assert run.loss == seen[-1][2]
    assert (run.run / "checkpoints" / "step-2").is_dir()
    assert surefit.Config.load(run.run).settings.output_dir == str(run.run)
    shutil.copytree(run.run, tmp_path / "moved")
    assert surefit.Config.load(tmp_path / "moved").settings.output_dir == str(tmp_path / "moved")
    rest = surefit.train(run.run, resume=True, quiet=True)
    whole = surefit.train(config(tmp_path / "whole"), quiet=True)
    assert (rest.steps, rest.loss) == (3, whole.loss), "a resume goes on as if nothing had ended it"


@pytest.mark.parametrize("kind", ["list", "pandas", "datasets"])
def test_rows_may_be_in_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    rows: Any = [{"prompt": f"{n} + {n}", "completion": str(2 * n)} for n in range(12)]
    if kind == "pandas":
        rows = pytest.importorskip("pandas").DataFrame(rows)
    elif kind == "datasets":
        rows = pytest.importorskip("datasets").Dataset.from_list(rows)
    made = surefit.Config.from_dict(VALUES | {"recipe": "chat", "data": {"train": rows, "eval": 0.25}})
    file = Path(made.settings.data.train)
    assert file.parent == tmp_path / "cache" / "rows"
    assert [row["completion"] for row in read_jsonl(file)] == [str(2 * n) for n in range(12)]
    assert made.changed({"data.train": rows}).settings.data.train == str(file), "the same rows, the same file"
    assert surefit.check(made).errors == ()


def test_values_of_a_notebook_are_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    rate, steps = numpy.float64(1e-3), numpy.int64(7)
    made = surefit.Config.from_dict(VALUES | {"train": {"learning_rate": rate}, "output_dir": tmp_path / "a"})
    assert (made.settings.train.learning_rate, made.settings.output_dir) == (1e-3, str(tmp_path / "a"))
    other = made.changed({"train.max_steps": steps, "output_dir": "räume/😀"})
    assert (other.settings.train.max_steps, other.settings.output_dir) == (7, "räume/😀")
    rows = pandas.DataFrame({"prompt": ["1 + 1", "2 + 2"], "completion": ["2", "4"], "n": [1.5, None]})
    also = made.changed({"evaluate.extra_sets": {"sums": rows}}).settings.evaluate.extra_sets["sums"]
    assert [row["n"] for row in read_jsonl(Path(also))] == [1.5, None]
    with pytest.raises(surefit.ConfigError, match="cannot hold object") as caught:
        made.changed({"train.lr_scheduler_type": object()})
    assert caught.value.field == "train.lr_scheduler_type"


def test_a_step_without_a_loss_leaves_a_gap_in_the_curve(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": None if step == 2 else 1 / step, "grad_norm": 1.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<polyline" in TrainingResult(tmp_path, tmp_path, 3, 3, 0.3, None, False, {})._repr_html_()


def test_what_is_wrong_is_said_as_everywhere(tmp_path: Path) -> None:
    with pytest.raises(surefit.ConfigError, match="did you mean 'learning_rate'") as unknown:
        config(tmp_path, **{"train.learning_rat": 1})
    assert unknown.value.field == "train.learning_rat"
    with pytest.raises(surefit.DataError, match="cannot be written as JSON"):
        surefit.Config.from_dict(VALUES | {"data": {"train": [{"prompt": object()}]}})
    with pytest.raises(surefit.ConfigError, match="2 processes, and this is one"):
        surefit.train(config(tmp_path, **{"hardware.count": 2}), quiet=True)
    with pytest.raises(surefit.ConfigError, match="has not been trained yet"):
        surefit.merge(config(tmp_path), quiet=True)
    with pytest.raises(surefit.ConfigError, match="no run is here"):
        surefit.report(config(tmp_path))
    steep = config(tmp_path, **{"train.warmup_steps": 500})
    found = surefit.check(steep)
    assert [finding.code for finding in found.errors] == ["SCH001"]
    assert "SCH001" in str(found.errors[0])
    with pytest.raises(surefit.CheckFailed, match="SCH001"):
        surefit.train(steep, quiet=True)
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_plan_for_another_device(tmp_path: Path) -> None:
    planned = surefit.plan(config(tmp_path), gpu="h100", quick=True)
    assert planned.document["device"]["name"] == "H100 80 GB"
    assert planned.fits
    assert planned.high_bytes is not None


def test_stages_that_are_packages_too() -> None:
    """`surefit.train(…)` and `surefit.train.loop` are one name."""
    from surefit.train import loop

    assert surefit.train.loop is loop  # type: ignore[attr-defined]
    assert list(inspect.signature(surefit.train).parameters)[:2] == ["target", "callbacks"]
    for name in surefit.__all__:
        assert callable(getattr(surefit, name)), name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        surefit.trian  # type: ignore[attr-defined]  # noqa: B018
