"""Other tools' configs on the command line: checked as they are, and made into SureFit configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

AXOLOTL = """\
base_model: surefit/nano
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
datasets:
  - path: rows.jsonl
    ds_type: json
    type: chat_template
val_set_size: 0.2
sequence_len: 256
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 2
learning_rate: 5e-3
warmup_ratio: 0.05
optimizer: adamw_torch
output_dir: runs/ax
wandb_project:
logging_steps: 1
"""


@pytest.fixture
def axolotl(tmp_path: Path) -> Path:
    """An Axolotl config that is sound, and its rows."""
    answers = [(f"What is {n} plus {n + 1}?", str(2 * n + 1)) for n in range(300)]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = tmp_path / "axolotl.yml"
    path.write_text(AXOLOTL, encoding="utf-8")
    return path


def test_a_sound_file_has_no_finding(surefit: Surefit, axolotl: Path) -> None:
    answer = surefit("check", axolotl)
    assert answer.code == 0, answer.text
    assert "no problem found" in answer.stdout
    assert "not looked at: logging_steps (line 20)" in answer.stderr


def test_findings_name_the_keys_and_lines_of_the_file(surefit: Surefit, axolotl: Path) -> None:
    text = AXOLOTL.replace("sequence_len: 256", "sequence_len: [256]") + "evaluation_strategy: steps\nlora_rank: 3\n"
    axolotl.write_text(text, encoding="utf-8")
    answer = surefit("check", axolotl)
    assert answer.code == 1
    assert "axolotl.yml:11: error[CFG004] sequence_len: expected a whole number, got [256]" in answer.stdout
    assert "axolotl.yml:21: warning[ARG005] evaluation_strategy" in answer.stdout
    assert "axolotl.yml:22: error[ARG002] lora_rank" in answer.stdout


def test_json_lists_what_was_not_looked_at(surefit: Surefit, axolotl: Path) -> None:
    report = surefit("check", axolotl, "--json").json
    assert report["tool"] == "axolotl"
    assert report["findings"] == []
    (lost,) = report["not_looked_at"]
    assert lost == {"key": "logging_steps", "line": 20, "value": 1, "why": "SureFit logs every step"}


def test_rules_see_the_run_s_length(surefit: Surefit, axolotl: Path) -> None:
    axolotl.write_text(AXOLOTL.replace("warmup_ratio: 0.05", "warmup_steps: 100"), encoding="utf-8")
    answer = surefit("check", axolotl)
    assert answer.code == 1
    assert "SCH001" in answer.stdout
    assert "axolotl.yml:16" in answer.stdout


def test_rows_that_cannot_be_used_are_a_finding(surefit: Surefit, axolotl: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    answer = surefit("check", axolotl)
    assert answer.code == 1
    assert "rows.jsonl:1" in answer.stdout


@pytest.mark.parametrize(("key", "value"), [("base_model", "nobody/has-this"), ("  - path", "nobody/has-these-rows")])
def test_what_is_not_here_is_no_error(surefit: Surefit, axolotl: Path, key: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in AXOLOTL.splitlines()]
    axolotl.write_text("\n".join(lines).replace("    ds_type: json\n", ""), encoding="utf-8")
    answer = surefit("check", axolotl)
    assert answer.code == 0, answer.text
    assert "not looked at" in answer.stderr
    assert value in answer.stderr


@pytest.mark.parametrize("option", [("--set", "train.num_train_epochs=2"), ("--fix",), ("--show", "1")])
def test_options_for_surefit_s_own_configs_are_refused(
    surefit: Surefit, axolotl: Path, option: tuple[str, ...]
) -> None:
    answer = surefit("check", axolotl, *option)
    assert answer.code == 2
    assert option[0] in answer.text
    assert "surefit import" in answer.text


def test_an_import_runs_as_it_is(surefit: Surefit, axolotl: Path, tmp_path: Path) -> None:
    answer = surefit("import", axolotl, "-o", "mine.yaml")
    assert answer.code == 0, answer.text
    text = (tmp_path / "mine.yaml").read_text(encoding="utf-8")
    assert "  r: 16  # axolotl: lora_r\n" in text
    assert "  global_batch_size: 8  # axolotl: micro_batch_size × gradient_accumulation_steps\n" in text
    assert "  seed: 42  # axolotl's default of seed\n" in text
    assert "# logging_steps: 1: SureFit logs every step\n" in text
    checked = surefit("check", "mine.yaml", "--json")
    assert checked.code == 0, checked.text
    assert checked.json["findings"] == []


def test_an_import_goes_to_stdout_without_a_name(surefit: Surefit, axolotl: Path) -> None:
    answer = surefit("import", axolotl)
    assert answer.code == 0
    assert "output_dir: runs/ax  # axolotl: output_dir" in answer.stdout
    assert "1 key could not be carried over" in answer.stderr
    assert surefit("import", axolotl, "--json").json["config"].strip() == answer.stdout.strip()


def test_an_import_overwrites_nothing(surefit: Surefit, axolotl: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine", encoding="utf-8")
    answer = surefit("import", axolotl, "-o", "mine.yaml")
    assert answer.code == 2
    assert "there is a file of that name" in answer.text
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('{"zero_optimization": {"stage": 2}}', "describes no whole run that SureFit trains"),
        ("base_model: a\nrl: grpo\ndatasets: [{path: b}]\n", "rl: grpo"),
        ("foo: 1\n", "not a file of a tool that SureFit knows"),
        ("base_model: [1\n", "not valid YAML"),
        ("model: {name_or_path: a}\ndata: {train: b}\noutput_dir: c\n", "surefit"),
        (None, "no such file"),
    ],
)
def test_what_cannot_be_imported_says_why(surefit: Surefit, tmp_path: Path, text: str | None, needle: str) -> None:
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    answer = surefit("import", path)
    assert answer.code == 2, answer.text
    assert needle in answer.text
    assert "help:" in answer.text


def test_values_with_line_breaks_stay_in_their_comment(surefit: Surefit, axolotl: Path, tmp_path: Path) -> None:
    axolotl.write_text(AXOLOTL + 'default_system_message: "one\\ntrain: {epochs: 99}"\n', encoding="utf-8")
    assert surefit("import", axolotl, "-o", "mine.yaml").code == 0
    assert surefit("check", "mine.yaml").code == 0
    assert "99" in (tmp_path / "mine.yaml").read_text(encoding="utf-8")


def test_a_slurm_script_and_an_accelerate_file_are_checked(surefit: Surefit, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n", encoding="utf-8")
    assert surefit("check", script).code in (0, 1)
    accelerate = tmp_path / "accelerate.yaml"
    accelerate.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nnonsense: 1\n", encoding="utf-8"
    )
    answer = surefit("check", accelerate)
    assert "accelerate.yaml:4: error[ARG002] nonsense" in answer.stdout
