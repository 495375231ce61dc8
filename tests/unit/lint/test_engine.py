"""The engine: all findings at once, in order, with their places; rules that lack facts or fail stop nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, DataError, MachineError, ModelError
from surefit.facts.dataset import DatasetFacts, dataset_facts
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.lint.engine import all_rules, choose_rules, explain_rule, find_rule, run_rules
from surefit.lint.rule import ConfigFix, Finding, LintContext, Rule, rule

CONFIG = SureFitConfig.model_validate(
    {"model": {"name_or_path": "surefit/nano"}, "data": {"train": "rows.jsonl"}, "output_dir": "runs/x"}
)
LINES = {"model": 1, "model.name_or_path": 1, "data": 2, "data.train": 3, "output_dir": 4}
CONTEXT = LintContext(CONFIG, Path("run.yaml"), LINES)


@rule("TST001", "always-two", severity="warning")
def always_two(context: LintContext) -> Iterator[Finding]:
    """Two findings."""
    yield Finding("output_dir", "second", "help")
    yield Finding("data.train", "first", "help")


@rule("TST002", "always-fails", severity="error")
def always_fails(context: LintContext) -> Iterator[Finding]:
    """A bug."""
    yield Finding("data.train", "lost")
    raise KeyError("token hf_" + "a" * 20)


@rule("TST003", "needs-a-model", severity="error")
def needs_a_model(context: LintContext, model: ModelFacts, hardware: HardwareFacts) -> Iterator[Finding]:
    """Facts come in the order of the parameters."""
    yield Finding("model.name_or_path", f"{model.name} on {hardware.kind}", "help")


@rule("TST004", "elsewhere", severity="info")
def elsewhere(context: LintContext) -> Iterator[Finding]:
    """A finding in another file."""
    yield Finding("tools", "broken", "help", path="rows.jsonl", line=7)


def run(context: LintContext, *rules: Rule) -> list[tuple[str, str, int | None]]:
    return [(f.code, f.message, f.line) for f in run_rules(context, rules).findings]


def test_findings_carry_the_rule_and_the_place() -> None:
    result = run_rules(CONTEXT, [elsewhere, always_two])
    assert [(f.code, f.name, f.severity, f.path, f.line, f.message) for f in result.findings] == [
        ("TST001", "always-two", "warning", "run.yaml", 3, "first"),
        ("TST001", "always-two", "warning", "run.yaml", 4, "second"),
        ("TST004", "elsewhere", "info", "rows.jsonl", 7, "broken"),
    ]
    assert result.rules == 2
    assert result.errors == []
    assert list(result.as_dict()["findings"][0]) == [
        "code", "name", "severity", "path", "line", "field", "message", "help", "evidence", "fix", "error",
    ]  # fmt: skip


def test_a_rule_that_raises_is_a_finding_and_tells_no_secret() -> None:
    (failed, *others) = run_rules(CONTEXT, [always_fails, always_two]).findings
    assert (failed.code, failed.severity) == ("INT001", "warning")
    assert "TST002" in failed.message
    assert "KeyError" in failed.message
    assert "aaaa" not in failed.message
    assert len(others) == 2


def test_a_rule_without_its_facts_is_skipped_and_listed() -> None:
    result = run_rules(CONTEXT, [needs_a_model, always_two])
    assert result.skipped == {"TST003": ["ModelFacts", "HardwareFacts"]}
    assert result.rules == 1
    whole = replace(CONTEXT, model=model_facts("surefit/nano"), hardware=hardware_facts("cpu"))
    assert run(whole, needs_a_model) == [("TST003", "surefit/nano on cpu", 1)]


def test_a_key_set_on_the_command_line_has_no_line() -> None:
    (second, _) = run_rules(replace(CONTEXT, overridden=frozenset({"output_dir"})), [always_two]).findings
    assert (second.path, second.line, second.message) == ("--set", None, "second")


def test_a_default_points_to_its_section() -> None:
    assert CONTEXT.place("data.max_length") == ("run.yaml", 2)
    assert CONTEXT.place("train.num_train_epochs") == ("run.yaml", None)


def test_problems_of_gathering_become_findings() -> None:
    problems = (
        DataError("broken", path="rows.jsonl", line=9, also=[DataError("also broken", path="rows.jsonl", line=11)]),
        ModelError("gone", help="look elsewhere"),
        MachineError("no network"),
        ConfigError("no such recipe", field="recipe"),
        ConfigError("does not divide", field="train.per_device_train_batch_size", code="E2019"),
    )
    found = run_rules(replace(CONTEXT, problems=problems)).findings
    assert [(f.code, f.message, f.path, f.line) for f in found] == [
        ("CFG004", "no such recipe", "run.yaml", None),
        ("MOD001", "gone", "run.yaml", 1),
        ("DAT001", "broken", "rows.jsonl", 9),
        ("DAT001", "also broken", "rows.jsonl", 11),
        ("ENV003", "no network", "run.yaml", None),
    ]


def test_a_micro_batch_that_does_not_divide_an_automatic_batch_is_reported() -> None:
    """BAT001 compares two numbers, and reports nothing while the batch is "auto"."""
    problem = ConfigError("does not divide", field="train.per_device_train_batch_size", code="E2019")
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"global_batch_size": "auto"})})
    found = run_rules(replace(CONTEXT, config=config, problems=(problem,))).findings
    assert [(f.code, f.error) for f in found] == [("CFG004", "E2019")]


def test_find_and_explain() -> None:
    assert find_rule("sch001").name == "warmup-never-ends"
    assert explain_rule("SCH001").startswith("# SCH001: warmup-never-ends (error)\n\nThe warmup is")
    for wrong in ("SCH999", "XYZ001", "", "SCH"):
        with pytest.raises(ConfigError, match="there is no rule"):
            find_rule(wrong)
    with pytest.raises(ConfigError, match="did you mean 'CFG001'"):
        find_rule("CFG01")


def ignoring(*codes: str) -> SureFitConfig:
    return CONFIG.model_validate({**CONFIG.model_dump(), "lint": {"ignore": dict.fromkeys(codes, "it is meant")}})


def test_a_suppressed_finding_is_kept_apart_with_its_reason() -> None:
    result = run_rules(replace(CONTEXT, config=ignoring("TST001")), [always_two, elsewhere])
    assert [finding.code for finding in result.findings] == ["TST004"]
    assert [(one.finding.message, one.reason) for one in result.suppressed] == [
        ("first", "it is meant"), ("second", "it is meant"),
    ]  # fmt: skip
    assert [one["reason"] for one in result.as_dict()["suppressed"]] == ["it is meant"] * 2


@rule("TST005", "unusable", severity="error", suppressible=False)
def unusable(context: LintContext) -> Iterator[Finding]:
    """Stands for an input that no stage can use."""
    yield Finding("data.train", "broken", "help")


def test_an_unusable_input_is_never_suppressed() -> None:
    result = run_rules(replace(CONTEXT, config=ignoring("TST005")), [unusable, find_rule("CFG005")])
    assert [finding.code for finding in result.errors] == ["TST005"]
    (useless,) = [finding for finding in result.findings if finding.code == "CFG005"]
    assert "cannot be ignored" in useless.message
    for code in ("DAT001", "MOD001", "CFG004", "INT001", "BAT001", "CFG005", "CFG006"):
        assert not find_rule(code).suppressible


@rule("TST006", "finds-nothing-here", severity="error")
def finds_nothing_here(context: LintContext, hardware: HardwareFacts) -> Iterator[Finding]:
    """Another machine may have what it looks for."""
    yield from ()


@rule("TST007", "finds-nothing", severity="error")
def finds_nothing(context: LintContext) -> Iterator[Finding]:
    """Nothing at all."""
    yield from ()


def test_a_suppression_is_only_judged_where_its_rule_could_look() -> None:
    context = replace(CONTEXT, config=ignoring("TST003", "TST006", "TST007"), hardware=hardware_facts("cpu"))
    judge = find_rule("CFG005")
    (useless,) = run_rules(context, [needs_a_model, finds_nothing_here, finds_nothing, judge]).findings
    assert useless.message.startswith("TST007")
    assert useless.fix == ConfigFix("lint.ignore.TST007", None)
    assert run_rules(context, [finds_nothing]).findings == [], "CFG005 was not chosen"


def test_rules_are_chosen_by_code_or_beginning() -> None:
    assert choose_rules() == all_rules()
    chosen = [rule.code for rule in choose_rules("mem, SCH001", "MEM002")]
    assert {"MEM001", "SCH001"} <= set(chosen)
    assert {code[:3] for code in chosen} == {"MEM", "SCH"}
    assert "MEM002" not in chosen
    assert not [rule for rule in choose_rules(ignore="SCH,DAT0") if rule.code.startswith(("SCH", "DAT0"))]
    for select, ignore, needle in (
        ("SHC", None, "no rule begins with SHC"),
        (None, "CFG01", "did you mean 'CFG001'"),
        (",", None, "names no rule"),
        ("SCH", "SCH", "leave no rule"),
    ):
        with pytest.raises(ConfigError, match=needle):
            choose_rules(select, ignore)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from surefit.lint.engine import all_rules; all_rules(); import surefit.plan.build_plan, "
        "surefit.doctor.probes; print({'torch', 'transformers', 'datasets', 'numpy', 'huggingface_hub', 'rich'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def findings(code: str, facts: DatasetFacts, **changes: Any) -> list[Finding]:
    context = replace(CONTEXT, dataset=facts, **changes)
    return run_rules(context, [find_rule(code)]).findings


def few_rows(count: int, share: float) -> list[Finding]:
    rows = [{"prompt": str(n), "completion": str(n)} for n in range(count)]
    config = CONTEXT.config.model_copy(update={"data": CONTEXT.config.data.model_copy(update={"eval": share})})
    return findings("DAT006", dataset_facts("d", rows), config=config)


def test_advice_on_held_out_rows_is_never_what_is_set_already() -> None:
    (found,) = few_rows(300, 0.02)
    assert "holds out about 6" in found.message
    assert "data.eval: 0.1," in (found.help or "")
    (found,) = few_rows(15, 0.5)
    assert (found.help or "").startswith("no share of 15 rows is enough: collect 48 or more")
    assert few_rows(300, 0.1) == []


def test_one_malformed_row_is_one_finding() -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]
    facts = dataset_facts("d.jsonl", rows, lambda index: f"d.jsonl:{index + 1}")
    assert [f.code for f in findings("DAT003", facts)] == ["DAT003"]
    problem = DataError("missing", path="d.jsonl", line=2, field="completion")
    assert findings("DAT003", facts, problems=(problem,)) == []
    assert [f.code for f in findings("DAT001", facts, problems=(problem,))] == ["DAT001"]
    elsewhere = DataError("missing", path="d.jsonl", line=1, field="prompt")
    assert [f.code for f in findings("DAT003", facts, problems=(elsewhere,))] == ["DAT003"]
