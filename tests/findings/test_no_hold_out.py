"""`data.eval: 0`: all rows are trained on, and none is held out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.load import load_config
from surefit.core.errors import ConfigError
from surefit.core.rundir import read_json, read_jsonl
from surefit.importers import read_tool_config
from surefit.importers.write import to_config_yaml

RUN = """recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
lora: {r: 4}
data: {train: rows.jsonl, eval: 0, max_length: 128}
train: {max_steps: 4, learning_rate: 3e-3, global_batch_size: 6}
checkpoint: {save_steps: 2}
evaluate: {max_new_tokens: 4}
hardware: {gpu: cpu}
output_dir: run
"""


def surefit(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """A verb with `--json`: its exit code, its last line, and all that it said."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    last = (result.stdout.strip().splitlines() or [""])[-1]
    return result.exit_code, json.loads(last) if last.startswith("{") else {}, result.output


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pairs(start: int, number: int) -> list[dict[str, object]]:
    return [{"prompt": f"Say the number {n}.", "completion": f"It is {n}."} for n in range(start, start + number)]


def write(place: Path, config: str = RUN) -> Path:
    write_rows(place / "rows.jsonl", pairs(0, 24))
    write_rows(place / "test.jsonl", pairs(100, 12))
    (place / "run.yaml").write_text(config, encoding="utf-8")
    return place


@pytest.fixture
def config(tmp_path: Path) -> str:
    write(tmp_path)
    return "run.yaml"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all six stages."""
    place = write(tmp_path_factory.mktemp("all"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        code, result, text = surefit("run", "run.yaml")
        assert code == 0, text
        assert result["exit_code"] == 0
    return place


def findings(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(found["code"], found["severity"], found["field"]) for found in report["findings"]}


@pytest.mark.parametrize("written", ["0", "0.0", "null", "~"], ids=lambda text: f"FC-{text}")
def test_both_spellings_hold_nothing_out(config: str, written: str) -> None:
    Path(config).write_text(RUN.replace("eval: 0", f"eval: {written}"))
    found = load_config(Path(config)).config.data
    assert (found.eval, found.share, found.holds_nothing_out) == (0.0, None, True)
    code, report, _ = surefit("check", config)
    assert (code, findings(report)) == (0, {("EVL031", "info", "data.eval")})


@pytest.mark.parametrize("written", ["false", "none", "None", '""', "-1", "1"], ids=lambda text: f"FC-{text}")
def test_what_means_nothing_is_an_error(config: str, written: str) -> None:
    Path(config).write_text(RUN.replace("eval: 0", f"eval: {written}"))
    with pytest.raises(ConfigError) as error:
        load_config(Path(config))
    assert (error.value.field, error.value.line) == ("data.eval", 4)
    assert "0" in f"{error.value.message} {error.value.help}"


def test_the_default_holds_rows_out(config: str) -> None:
    Path(config).write_text(RUN.replace("eval: 0, ", ""))
    assert load_config(Path(config)).config.data.share == 0.02


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint.metric_for_best_model", "eval_loss"),
        ("train.early_stopping_patience", "3"),
        ("evaluate.in_training", "true"),
        ("evaluate.gate", "{min: 0.5}"),
    ],
    ids=lambda text: f"FC-{text}",
)
def test_what_needs_held_out_rows_is_an_error(config: str, field: str, value: str) -> None:
    code, report, _ = surefit("check", config, "--set", f"{field}={value}")
    assert (code, findings(report)) == (1, {("EVL032", "error", field)})
    assert surefit("train", config, "--set", f"{field}={value}")[0] == 1
    assert not Path("run/adapter").exists()


def test_a_frequency_of_nothing_is_said(config: str) -> None:
    _, report, _ = surefit("check", config, "--set", "train.eval_steps=1")
    assert findings(report) == {("EVL031", "info", "data.eval"), ("EVL031", "info", "train.eval_steps")}


@pytest.mark.slow
def test_the_plan_counts_all_rows_and_no_evaluation(config: str) -> None:
    code, plan, _ = surefit("plan", config, "--set", "train.max_steps=null", "--set", "train.global_batch_size=12")
    assert (code, plan["steps"]["rows"], plan["steps"]["total_steps"]) == (0, 24, 2)
    assert "eval" not in {phase["name"] for phase in plan["estimate"]["phases"]}
    assert (plan["answering"], plan["scoring"]) == (None, None)
    _, plan, _ = surefit("plan", config, "--set", "evaluate.extra_sets.more=test.jsonl")
    assert plan["answering"] is not None


def test_a_run_ends_with_all_stages(ran: Path) -> None:
    run = ran / "run"
    lines = list(read_jsonl(run / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not any("eval_loss" in line for line in lines)
    certificate = read_json(run / "certificate.json")
    assert (certificate["passed"], certificate["prompts"]) == (True, 24)
    assert not (run / "eval/summary.json").exists()
    assert read_json(run / "dry_pass.json")["eval_batches"] == 0
    assert "nothing held out" in (run / "report.html").read_text()
    assert "eval: 0.0" in (run / "resolved.yaml").read_text()
    events = [(event["stage"], event["event"]) for event in read_jsonl(run / "events.jsonl")]
    assert {stage for stage, event in events if event == "finished"} >= {"train", "merge", "report"}
    assert not [stage for stage, event in events if event == "failed"]


@pytest.mark.parametrize("more", [(), ("--all-checkpoints",), ("--dry-run",)], ids=["FC", "FC-checkpoints", "FC-dry"])
def test_evaluate_names_what_to_set(ran: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    monkeypatch.chdir(ran)
    code, result, _ = surefit("evaluate", "run", *more)
    assert (code, result["code"], result["field"]) == (2, "E8700", "data.eval")
    assert "--set data.eval=" in result["help"]


def test_a_file_and_other_sets_are_scored_afterwards(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ran)
    code, summary, text = surefit("evaluate", "run", "--set", "evaluate.extra_sets.more=test.jsonl")
    assert (code, {name: found["n"] for name, found in summary["sets"].items()}) == (0, {"more": 12}), text
    code, summary, text = surefit("evaluate", "run", "--set", "data.eval=test.jsonl")
    assert (code, {name: found["n"] for name, found in summary["sets"].items()}) == (0, {"eval": 12}), text
    code, result, _ = surefit(
        "evaluate", "run", "--set", "evaluate.extra_sets.more=test.jsonl", "--set", "evaluate.gate.min=0"
    )
    assert (code, result["code"]) == (2, "E8700")


def test_a_resume_goes_on_as_it_was(tmp_path: Path, ran: Path) -> None:
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    before = (Path("run/adapter/adapter_model.safetensors")).read_bytes()
    shutil.rmtree("run/adapter")
    shutil.rmtree("run/checkpoints/step-4")
    code, result, text = surefit("train", "run", "--resume")
    assert (code, result["steps"], result["eval_loss"]) == (0, 4, None), text
    assert Path("run/adapter/adapter_model.safetensors").read_bytes() == before
    shutil.rmtree("run/checkpoints/step-4")
    code, result, _ = surefit("train", "run", "--resume", "--set", "data.eval=0.1")
    assert (code, result["code"]) == (2, "E5104"), "rows that were trained on would be scored on"


@pytest.mark.slow
def test_shards_have_all_rows(config: str) -> None:
    code, result, text = surefit("prepare", config, "--set", "data.tokenized=shards")
    assert (code, result["rows"], result["held_out"]) == (0, 24, 0), text
    code, result, text = surefit(
        "run", config, "--set", "data.tokenized=shards", "--set", "evaluate.extra_sets.more=test.jsonl"
    )
    assert code == 0, text
    assert read_json(Path("run/certificate.json"))["passed"]
    assert list(read_json(Path("run/eval/summary.json"))["sets"]) == ["more"]
    code, result, _ = surefit("check", config, "--set", "data.tokenized=shards", "--set", "data.eval=0.2")
    assert (code, {found["error"] for found in result["findings"]}) == (1, {"E4082"})


AXOLOTL = """base_model: surefit/nano
datasets:
  - path: rows.jsonl
    type: alpaca
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 0.0002
"""
FACTORY = """model_name_or_path: surefit/nano
dataset: alpaca_en_demo
template: qwen
stage: sft
do_train: true
finetuning_type: lora
output_dir: out
"""
TRL = """model_name_or_path: surefit/nano
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
use_peft: true
output_dir: out
"""


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        pytest.param(AXOLOTL, 0.0, id="FC-axolotl"),
        pytest.param(AXOLOTL + "val_set_size: 0\n", 0.0, id="FC-axolotl-0"),
        pytest.param(AXOLOTL + "val_set_size: 0.1\n", 0.1, id="FC-axolotl-share"),
        pytest.param(FACTORY, 0.0, id="FC-llamafactory"),
        pytest.param(FACTORY + "val_size: 0.1\n", 0.1, id="FC-llamafactory-share"),
        pytest.param(FACTORY + "eval_dataset: test.jsonl\n", "test.jsonl", id="FC-llamafactory-file"),
        pytest.param(FACTORY + "val_size: 100\n", 0.02, id="FC-llamafactory-rows"),
        pytest.param(TRL, 0.0, id="FC-trl"),
        pytest.param(TRL + "eval_strategy: 'no'\n", 0.0, id="FC-trl-no"),
        pytest.param(TRL + "eval_strategy: steps\n", "trl-lib/Capybara@test", id="FC-trl-test"),
        pytest.param(
            TRL + "eval_strategy: steps\ndataset_test_split: dev\n", "trl-lib/Capybara@dev", id="FC-trl-split"
        ),
    ],
)  # fmt: skip
def test_import_holds_out_what_the_source_did(tmp_path: Path, text: str, held_out: float | str) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"instruction": f"a{n}", "input": "", "output": "b"} for n in range(9)])
    Path("source.yaml").write_text(text)
    found = read_tool_config(Path("source.yaml"))
    assert found.loaded is not None
    assert found.loaded.config.data.eval == held_out
    written = yaml.safe_load(to_config_yaml(found))
    assert written["data"].get("eval", 0.02) == held_out
    assert surefit("import", "source.yaml", "--output", "ours.yaml")[0] == 0
    assert load_config(Path("ours.yaml")).config.data.eval == held_out
