"""What a newcomer who followed the pages found on 2026-11-26 (U1 to U13 in the log)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.data.read.load import FEWEST, Rows, load_rows
from surefit.facts.hardware import hardware_facts
from surefit.importers.reasons import unmapped_reason
from surefit.importers.requirements import is_requirements
from surefit.lint.rules.labels import length_limit_loses_rows

RUN = """recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
data: {train: rows.jsonl, eval: held.jsonl, max_length: 128}
train: {max_steps: 1, global_batch_size: 4, learning_rate: 1e-3}
hardware: {gpu: cpu}
output_dir: run
"""


def write(path: str, answers: list[str]) -> None:
    rows = [{"prompt": f"Number {n} of {path}?", "completion": answer} for n, answer in enumerate(answers)]
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    Path("run.yaml").write_text(RUN)
    write("rows.jsonl", [f"It is {n}." for n in range(20)])


def surefit(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a verb with `--json`, and the object on its last line."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("long", [2, 4], ids=["U1-some", "U1-all"])
def test_held_out_rows_that_are_left_out_are_said(long: int) -> None:
    write("held.jsonl", ["It is so. " * (200 if n < long else 1) for n in range(4)])
    ran = CliRunner().invoke(app, ["train", "run.yaml", "--json"])
    if long == 4:
        assert ran.exit_code == 2
        error = json.loads(ran.stdout.splitlines()[-1])
        assert (error["code"], error["field"]) == ("E4008", "data.max_length")
        assert "held-out rows" in error["message"]
    else:
        assert ran.exit_code == 0
        assert "of the held-out rows, 2 of 4" in Path("run/log.txt").read_text()


@pytest.mark.usefixtures("here")
def test_u5_a_way_to_combine_that_does_not_exist_is_named(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    words = [
        "merge",
        "adapter",
        "--base",
        "surefit/nano",
        "--with",
        "adapter",
        "--combine",
        "tiez",
        "-o",
        "out",
        "--json",
    ]
    ran = CliRunner().invoke(app, words)
    error = json.loads(ran.stdout.splitlines()[-1])
    assert (ran.exit_code, error["code"], error["field"]) == (2, "E8043", "--combine")
    assert "'ties'" in error["message"]


def test_u4_a_count_that_is_not_exact_is_no_lower_bound() -> None:
    assert "at least" not in (length_limit_loses_rows.__doc__ or "").partition("## Why")[0]


def test_u8_why_the_loss_on_prompts_is_not_carried() -> None:
    assert unmapped_reason("train_on_inputs") == unmapped_reason("train_on_prompt") != unmapped_reason("eos_token")


@pytest.mark.parametrize(
    "name", ["requirements2.txt", "requirements.txt", "requirements-dev.txt", "dev_constraints.txt"]
)
def test_u11_names_of_requirements(name: str) -> None:
    assert is_requirements(Path(name))


@pytest.mark.usefixtures("here")
def test_a_sample_of_long_rows_is_bounded_by_its_text() -> None:
    write("held.jsonl", ["word " * 1_000] * 100)
    rows: Rows = load_rows("held.jsonl")
    assert len(rows.sample(50)) == 50
    assert len(rows.sample(50, 100_000)) == 19
    assert len(rows.sample(50, 10)) == FEWEST
    assert rows.sample(50, 100_000).place(18)[1] == 95


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("template", "code"), [("chatml", "E2029"), ("chatlm", "E2033")], ids=["U10-tokens", "U10-mistyped"]
)
def test_a_template_that_cannot_be_used_is_said_once(template: str, code: str) -> None:
    write("held.jsonl", [f"It was {n}." for n in range(20)])
    Path("run.yaml").write_text(RUN.replace("dtype: float32", f"chat_template: {template}"))
    findings = json.loads(CliRunner().invoke(app, ["check", "run.yaml", "--json"]).stdout.splitlines()[-1])["findings"]
    said = [each for each in findings if each["severity"] == "error"]
    assert [(each["field"], each.get("error")) for each in said] == [("model.chat_template", code)]
    assert ("'chatml'" in said[0]["message"]) == (template == "chatlm")


@pytest.mark.usefixtures("here")
def test_u2_a_failed_merge_leaves_the_certified_model_of_another_adapter() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    from surefit.config.schema import ModelSection
    from surefit.model.load import load_model

    base = load_model(ModelSection(name_or_path="surefit/nano", dtype="float32"), hardware_facts())
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    for folder in ("sound", "broken"):
        model.save_pretrained(folder)
    tensors = load_file("broken/adapter_model.safetensors")
    save_file(
        {name: tensor * 0 for name, tensor in tensors.items()}, "broken/adapter_model.safetensors", {"format": "pt"}
    )
    Path("prompts.txt").write_text("".join(f"Say {n}.\n" for n in range(8)))
    options = ("-o", "out", "--base", "surefit/nano", "--prompts", "prompts.txt")
    code, certificate = surefit("merge", "sound", *options)
    assert code == 0, certificate
    kept = {path: path.read_bytes() for path in Path("out").rglob("[!.]*") if path.is_file()}
    code, error = surefit("merge", "broken", *options)
    assert (code, error["code"]) == (1, "E6019")
    assert "another adapter" in error["help"]
    now = {path: path.read_bytes() for path in Path("out").rglob("[!.]*") if path.is_file()}
    assert json.loads(now.pop(Path("out/certificate.failed.json")))["passed"] is False
    assert now == kept
    assert surefit("merge", "sound", *options)[0] == 0, "the same adapter again"
