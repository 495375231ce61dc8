"""Advice is tried before it is given: every option that a finding or a plan proposes passes `check` and fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import load_text
from surefit.config.resolve import one_line_yaml
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.find_advice import find_advice
from surefit.stages.checking import run_check
from surefit.stages.planning import build_run_plan
from surefit.stages.run_context import load_checked_run, load_run_context

B7, B70 = "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"
GPUS = ("8GB", "12GB", "24GB", "80GB")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """60 chats."""
    path = tmp_path_factory.mktemp("rows") / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"Where is order {n}?"}, {"role": "assistant", "content": f"Order {n} is sent."}]
        for n in range(60)
    ]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return path


def config(rows: Path, model: str, gpu: str, method: str, share: float = 0.2) -> str:
    rate = "1.0e-5" if method == "full" else "2.0e-4"
    return (
        f"model: {{name_or_path: {model}}}\ndata: {{train: {rows}, eval: {share}}}\n"
        f"train: {{method: {method}, learning_rate: {rate}, global_batch_size: 4}}\nhardware: {{gpu: {gpu}}}\n"
        f"output_dir: {rows.parent / 'run'}\n"
    )


def checked(text: str, changes: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """The findings of a config by code."""
    overrides = [f"{key}={one_line_yaml(value)}" for key, value in (changes or {}).items()]
    report = run_check(load_run_context(load_text(text, Path("run.yaml"), overrides)))
    return {finding["code"]: finding for finding in report["findings"]}


def errors(findings: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{code}: {found['message']}" for code, found in findings.items() if found["severity"] == "error"]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", [B7, B70], ids=["7B", "70B"])
def test_each_option_passes_check_and_fits_when_applied(rows, model, gpu, method) -> None:
    text = config(rows, model, gpu, method)
    plan = build_run_plan(load_checked_run(load_text(text, Path("run.yaml"))), quick=True, advise=True)
    if plan["estimate"]["verdict"] == "fits":
        assert plan["advice"] is None
        return
    options = plan["advice"]["options"]
    assert options, "for these models something always fits"
    for option in options:
        overrides = [f"{key}={one_line_yaml(value)}" for key, value in option["changes"].items()]
        found = checked(text, option["changes"])
        assert not errors(found), (option, errors(found))
        assert "MEM002" not in found
        then = build_run_plan(load_checked_run(load_text(text, Path("run.yaml"), overrides)), quick=True)
        assert then["estimate"]["verdict"] == "fits", (option, then["headline"])
    finding = checked(text).get("MEM001")
    if finding is not None:
        assert all(key in finding["help"] for key in options[0]["changes"] if not key.startswith("hardware."))


def test_what_the_changes_are(rows) -> None:
    def options(model: str, gpu: str, method: str) -> dict[str, dict[str, Any]]:
        loaded = load_text(config(rows, model, gpu, method), Path("run.yaml"))
        advice = find_advice(loaded, model_facts(model), hardware_facts(gpu), longest=91)
        return {option.kind: dict(option.changes) for option in advice.options}

    assert options(B7, "12GB", "lora")["settings"] == {"model.quantization": "nf4"}
    assert options(B7, "24GB", "full")["settings"] == {"train.method": "lora"}
    seventy = options(B70, "24GB", "full")
    assert "settings" not in seventy, "no setting holds 70B on 24 GB"
    assert seventy["card"]["hardware.gpu"] == "rtx-a6000"
    assert seventy["model"]["model.name_or_path"].startswith("Qwen/")
    assert options(B70, "80GB", "lora")["devices"] == {"hardware.count": 4}


def test_another_tools_file_gets_no_key_of_ours(rows) -> None:
    loaded = load_text(config(rows, B70, "24GB", "full"), Path("run.yaml"))
    text = find_advice(loaded, model_facts(B70), hardware_facts("24GB")).text(own_keys=False)
    assert "LoRA and the base in 4 bits" in text
    assert not any(key in text for key in ("train.", "model.", "--gpu"))


def test_where_nothing_fits_that_is_said(rows) -> None:
    loaded = load_text(config(rows, B7, "1GB", "lora").replace("eval", "max_length: 32768, eval"), Path("run.yaml"))
    tiny = hardware_facts("1GB")
    assert all(option.kind != "settings" for option in find_advice(loaded, model_facts(B7), tiny).options)
    assert "nothing that was tried fits" in type(find_advice(loaded, model_facts(B7), tiny))().text()


@pytest.mark.parametrize(("count", "share"), [(60, 0.02), (60, 0.1), (200, 0.02)])
def test_the_share_that_dat006_proposes_is_sensible_and_enough(tmp_path, rows, count, share) -> None:
    some = tmp_path / "some.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    some.write_text("".join(line.replace("order", f"order {n // 60}") for n, line in enumerate(lines * 4) if n < count))
    text = config(some, "surefit/nano", "cpu", "lora", share)
    help_text = checked(text)["DAT006"]["help"]
    proposed = float(help_text.partition("data.eval: ")[2].split(",")[0])
    assert proposed in (0.1, 0.2)
    found = checked(text.replace(f"eval: {share}", f"eval: {proposed}"))
    assert "DAT006" not in found
    assert not errors(found)


def test_too_few_rows_for_any_share_is_said(tmp_path, rows) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:30]))
    help_text = checked(config(few, "surefit/nano", "cpu", "lora", 0.1))["DAT006"]["help"]
    assert "no share of 30 rows is enough" in help_text
    assert "data.eval: 0" not in help_text


def test_scoring_that_does_not_fit_names_ways_that_do(rows) -> None:
    text = config(rows, B7, "12GB", "lora")
    found = checked(text, {"model.quantization": "nf4"})
    assert "16 GB card" in found["MEM009"]["help"]
    assert "--variant base --variant adapter" in found["MEM009"]["help"]
    assert "MEM009" not in checked(text, {"model.quantization": "nf4", "hardware.gpu": "rtx4080"})
    assert "MEM009" not in checked(text), "MEM001 says it all"
