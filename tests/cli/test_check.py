"""`surefit check`: which rules look, in which format they speak, what is accepted, what is fixed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.cli.conftest import Surefit

from surefit.cli.annotations import to_github_annotations, to_sarif
from surefit.core.rundir import read_json
from surefit.core.units import GIB
from surefit.facts import hardware, stack


@pytest.fixture
def faulty(config: Path) -> Path:
    """One error and two warnings: a warmup of 100 in 3 steps, checkpoints that never come, an alpha without LoRA."""
    text = config.read_text().replace("max_steps: 3,", "max_steps: 3, method: full, warmup_steps: 100,")
    config.write_text(text.replace("save_steps: 1}", "save_steps: 200}  # too wide") + "lora: {lora_alpha: 8}\n")
    return config


def codes(answer: Any) -> list[str]:
    return [finding["code"] for finding in answer.json["findings"]]


def accept(config: Path, code: str = "SCH001", reason: str = "only the speed of three steps is measured") -> None:
    config.write_text(config.read_text() + f"lint: {{ignore: {{{code}: {reason}}}}}\n")


def test_an_error_stops_train_and_run_and_an_accepted_one_does_not(surefit: Surefit, config: Path) -> None:
    config.write_text(config.read_text().replace("max_steps: 3,", "max_steps: 3, warmup_steps: 100,"))
    for verb in ("train", "run"):
        stopped = surefit(verb, config)
        assert stopped.code == 1, stopped.text
        assert "error[SCH001]" in stopped.text
        assert not Path("runs").exists()
    accept(config)
    trained = surefit("run", config, "--json")
    assert trained.code == 0, trained.text
    check = read_json(Path("runs/one/check.json"))
    assert [(one["code"], one["reason"]) for one in check["suppressed"]] == [
        ("SCH001", "only the speed of three steps is measured")
    ]
    page = Path("runs/one/report.html").read_text(encoding="utf-8")
    assert "only the speed of three steps is measured" in page
    again = surefit("check", "runs/one")
    assert (again.code, "not counted, by lint.ignore: SCH001 (only the speed" in again.stdout) == (0, True), again.text


def test_rows_of_another_recipe_are_told_which(surefit: Surefit) -> None:
    row = {"query": "Boil water.", "tools": "[]", "answers": "[]"}  # as xLAM's rows are
    Path("xlam.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    Path("run.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: xlam.jsonl}\noutput_dir: out\n",
        encoding="utf-8",
    )
    answer = surefit("check", "run.yaml", "--select", "DAT001", "--json")
    (finding,) = answer.json["findings"]
    assert "write recipe: function_calling" in finding["help"]


def test_rows_that_cannot_be_used_are_under_the_key_that_names_them(surefit: Surefit) -> None:
    graph = "(r / run-02 :ARG0 (d / dog))"
    Path("bare.txt").write_text(f"# ::snt A dog runs.\n{graph}\n\n{graph}\n", encoding="utf-8")
    Path("cut.txt").write_text(
        f"# ::snt A dog runs.\n{graph[:-1]}\n\n# ::snt It runs.\n{graph[:-1]}\n", encoding="utf-8"
    )
    Path("run.yaml").write_text(
        "recipe: amr_parsing\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: surefit/amr-train, eval: surefit/amr-eval}\n"
        "output_dir: out\n",
        encoding="utf-8",
    )
    for key in ("data.eval", "evaluate.extra_sets.more", "data.mix", "data.train"):
        for file, line in (("bare.txt", 4), ("cut.txt", None)):
            value = f"{{{file}: 1}}" if key == "data.mix" else file
            answer = surefit("check", "run.yaml", "--select", "DAT001", "--set", f"{key}={value}", "--json")
            first = answer.json["findings"][0]
            own = f"data.mix.{file}" if key == "data.mix" else key
            assert (first["path"], first["line"], first["field"]) == (file, line, own), answer.text


def test_a_misspelt_metric_is_found_before_anything_is_trained(surefit: Surefit, config: Path) -> None:
    answer = surefit("check", config, "--set", "evaluate.gate={metric: exact_macht, min: 0.5}", "--json")
    assert answer.code == 1
    (finding,) = (one for one in answer.json["findings"] if one["code"] == "EVL007")
    assert "did you mean 'exact_match'" in finding["message"]
    assert "name_accuracy" in finding["help"]


def test_what_cannot_be_used_cannot_be_accepted(surefit: Surefit, config: Path) -> None:
    Path("rows.jsonl").unlink()
    accept(config, "DAT001", "it will come")
    answer = surefit("check", config, "--json")
    assert answer.code == 1
    assert codes(answer) == ["DAT001", "CFG005"]
    assert surefit("train", config).code in (1, 2)
    assert not Path("runs").exists()


def test_select_and_ignore(surefit: Surefit, faulty: Path) -> None:
    assert codes(surefit("check", faulty, "--json")) == ["SCH001", "SCH002", "CFG003"]
    warned = surefit("check", faulty, "--select", "CFG, SCH002", "--json")
    assert (warned.code, codes(warned)) == (0, ["SCH002", "CFG003"])
    assert codes(surefit("check", faulty, "--ignore", "sch", "--format", "json")) == ["CFG003"]
    for option in ("--select", "--ignore"):
        wrong = surefit("check", faulty, option, "SCHH001")
        assert wrong.code == 2
        assert "no rule begins with SCHH001; did you mean 'SCH001'?" in wrong.text


def test_formats_that_contradict_each_other(surefit: Surefit, config: Path) -> None:
    assert surefit("check", config, "--json", "--format", "json").json["findings"] == []
    assert surefit("check", config, "--json", "--format", "sarif").code == 2
    assert surefit("check", config, "--format", "xml").code == 2
    assert surefit("check", config, "--dry-run").code == 2


def require(value: Any, *names: str) -> None:
    """What the SARIF 2.1.0 schema requires of an object."""
    assert isinstance(value, dict)
    assert set(names) <= set(value), (names, value)


def require_sarif(log: dict[str, Any]) -> list[dict[str, Any]]:
    """The required members of the objects used here, by the OASIS schema; its results."""
    require(log, "version", "runs")
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    require(run, "tool")
    require(run["tool"], "driver")
    require(run["tool"]["driver"], "name")
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        require(rule, "id")
        require(rule["shortDescription"], "text")
        require(rule["help"], "text")
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        require(result, "message")
        require(result["message"], "text")
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        for location in result["locations"]:
            place = location["physicalLocation"]
            require(place["artifactLocation"], "uri")
            assert re.fullmatch(r"[\w.~%/:-]+", place["artifactLocation"]["uri"]), "a URI reference"
            assert place.get("region", {"startLine": 1})["startLine"] >= 1
        for suppression in result.get("suppressions", []):
            require(suppression, "kind")
            assert suppression["kind"] in ("inSource", "external")
    return run["results"]


def test_sarif(surefit: Surefit, faulty: Path) -> None:
    accept(faulty, "CFG003", "it will be LoRA again tomorrow")
    answer = surefit("check", faulty, "--format", "sarif")
    assert answer.code == 1
    results = require_sarif(json.loads(answer.stdout))
    assert [(r["ruleId"], r["level"], "suppressions" in r) for r in results] == [
        ("SCH001", "error", False), ("SCH002", "warning", False), ("CFG003", "warning", True),
    ]  # fmt: skip
    place = results[0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "run.yaml"}, "region": {"startLine": 4}}
    assert results[2]["suppressions"][0]["justification"] == "it will be LoRA again tomorrow"


def test_github(surefit: Surefit, faulty: Path) -> None:
    answer = surefit("check", faulty, "--format", "github", "--set", "train.warmup_steps=50")
    assert answer.code == 1
    first, *rest = answer.stdout.splitlines()
    assert first.startswith(
        "::error file=run.yaml,title=SCH001 warmup-never-ends::train.warmup_steps: the warmup has 50"
    )
    assert "%0Ahelp: " in first
    assert rest[0].startswith("::warning file=run.yaml,line=5,title=SCH002 checkpoint-never-comes::")


@pytest.mark.parametrize("style", ["sarif", "github"])
def test_a_config_that_cannot_be_read_is_annotated_too(surefit: Surefit, config: Path, style: str) -> None:
    config.write_text(config.read_text() + "trian: {}\n")
    answer = surefit("check", config, "--format", style)
    assert answer.code == 2
    if style == "sarif":
        (result,) = require_sarif(json.loads(answer.stdout))
        assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 8
    else:
        assert answer.stdout.startswith("::error file=run.yaml,line=8,title=CFG004 config-unusable::trian: unknown key")


FINDING = {
    "code": "SCH001", "name": "warmup-never-ends", "severity": "error", "field": None, "help": None, "line": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "file", "uri"),
    [
        ("a,b: 100%.json row 7", "file=a%2Cb%3A 100%25.json", "a%2Cb%3A%20100%25.json"),
        ("/elsewhere/räume.yaml", "file=/elsewhere/räume.yaml", "file:///elsewhere/r%C3%A4ume.yaml"),
        (None, "file=run.yaml", "run.yaml"),
        ("--set", "file=run.yaml", "run.yaml"),
    ],
)
def test_places_are_escaped(path: str | None, file: str, uri: str) -> None:
    report = {"findings": [FINDING | {"path": path, "message": "100 %\r\n::error::no"}]}
    assert to_github_annotations(report, Path("run.yaml")) == (
        f"::error {file},title=SCH001 warmup-never-ends::100 %25%0D%0A::error::no"
    )
    (result,) = require_sarif(json.loads(to_sarif(report, Path("run.yaml"))))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri
    assert unquote(uri)


def test_nothing_found_is_an_empty_list(surefit: Surefit, config: Path) -> None:
    assert surefit("check", config, "--format", "github").stdout == ""
    assert require_sarif(json.loads(surefit("check", config, "--format", "sarif").stdout)) == []


def test_fix_writes_what_has_one_right_answer(surefit: Surefit, faulty: Path) -> None:
    before = faulty.read_text()
    tried = surefit("check", faulty, "--fix", "--dry-run")
    assert (tried.code, faulty.read_text()) == (1, before)
    for line in ("\n-checkpoint: {save_steps: 200}  # too wide\n", "\n+checkpoint: {save_steps: auto}  # too wide\n"):
        assert line in tried.stdout
    for needle in ("would fix SCH001: train.warmup_steps: 0.03", "3 changes, nothing was written", "error[SCH001]"):
        assert needle in tried.stdout
    answer = surefit("check", faulty, "--fix")
    assert answer.code == 0, answer.text
    for needle in (
        "fixed SCH001: train.warmup_steps: 0.03",
        "fixed CFG003: lora.lora_alpha: removed",
        "no problem found",
    ):
        assert needle in answer.stdout
    after = before.replace("warmup_steps: 100", "warmup_steps: 0.03").replace("200", "auto")
    assert faulty.read_text() == after.replace("lora: {lora_alpha: 8}\n", "")
    assert "nothing to fix" in surefit("check", faulty, "--fix").stdout


def test_fix_leaves_the_command_line_and_shared_values_alone(surefit: Surefit, faulty: Path) -> None:
    text = faulty.read_text().replace("warmup_steps: 100", "warmup_steps: &w 100").replace("tokens: 24", "tokens: *w")
    faulty.write_text(text)
    answer = surefit("check", faulty, "--fix", "--set", "checkpoint.save_steps=300", "--json")
    assert answer.code == 1
    assert [each["field"] for each in answer.json["fixed"]] == ["lora.lora_alpha"]
    reasons = {each["field"]: each["reason"] for each in answer.json["not_fixed"]}
    assert "by hand" in reasons["train.warmup_steps"]
    assert "command line" in reasons["checkpoint.save_steps"]
    assert codes(answer) == ["SCH001", "SCH002"], "what remains after the fix"
    assert faulty.read_text() == text.replace("lora: {lora_alpha: 8}\n", "")


def test_fix_takes_out_a_suppression_without_effect(surefit: Surefit, config: Path) -> None:
    before = config.read_text()
    accept(config)
    assert codes(surefit("check", config, "--json")) == ["CFG005"]
    assert surefit("check", config, "--fix").code == 0
    assert config.read_text() == before


def test_fix_does_not_touch_the_record_of_a_run(surefit: Surefit, config: Path) -> None:
    Path("runs/one").mkdir(parents=True)
    config.rename("runs/one/resolved.yaml")
    Path("runs/one/events.jsonl").write_text("")
    answer = surefit("check", "runs/one", "--fix")
    assert (answer.code, "the record of a run" in answer.text) == (2, True)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "fused kernels need liger-kernel>=0.8.5,<0.9, but it is not installed"),
        ({"liger-kernel": "0.7.0"}, "fused kernels need liger-kernel>=0.8.5,<0.9, but liger-kernel 0.7.0 is installed"),
        ({"liger-kernel": "0.8.7", "triton": "3.2.0"}, "fused kernels need triton>=3.6, but triton 3.2.0 is installed"),
        ({"liger-kernel": "0.8.7", "triton": "3.6.0"}, None),
        ({"liger-kernel": "0.8.7"}, None),  # a nightly torch brings Triton under another name
    ],
)
def test_fused_kernels_without_their_extra_stop_a_run_before_it_starts(
    surefit: Surefit, config: Path, installed: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stack.stack_facts()
    others = {name: each for name, each in here.versions.items() if name not in ("liger-kernel", "triton")}
    monkeypatch.setattr(stack, "stack_facts", lambda: replace(here, versions=others | installed))
    card = hardware.DetectedGpu("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), "580.00")
    monkeypatch.setattr(hardware, "detect_gpus", lambda: [card])
    monkeypatch.setattr(hardware, "torch_is_cpu_build", lambda: False)
    config.write_text(config.read_text() + "speed: {kernels: true}\n")
    found = [each for each in surefit("check", config, "--json").json["findings"] if each["code"] == "CFG008"]
    assert [each["message"] for each in found] == ([said] if said else [])
    if said:
        stopped = surefit("train", config)
        assert (stopped.code, f"error[CFG008] speed.kernels: {said}" in stopped.text) == (1, True), stopped.text
        assert ".[kernels]" in stopped.text
        assert not Path("runs").exists()


@pytest.mark.parametrize(("gpu", "older"), [("t4", True), ("l4", False)])
def test_fused_kernels_are_refused_on_a_gpu_that_triton_does_not_compile_for(
    surefit: Surefit, config: Path, gpu: str, older: bool
) -> None:
    config.write_text(config.read_text() + f"hardware: {{gpu: {gpu}}}\nspeed: {{kernels: true}}\n")
    found = [each for each in surefit("check", config, "--json").json["findings"] if each["code"] == "CFG008"]
    assert ["T4 is older" in each["message"] for each in found] == [True] * older
    if older:
        assert surefit("check", config, "--fix").code == 0
        assert "kernels: auto" in config.read_text()
