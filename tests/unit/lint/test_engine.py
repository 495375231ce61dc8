"""The engine: all findings at once, in order, with their places; rules that lack facts or fail stop nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.config.load import Loaded
from surefit.config.resolve import resolve
from surefit.config.schema import Config
from surefit.core.errors import ConfigError, DataError, MachineError, ModelError
from surefit.facts.dataset import DatasetFacts, dataset_facts
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.lint.engine import all_rules, explain, find_rule, run_rules
from surefit.lint.rule import Finding, LintContext, Rule, rule

CONFIG = Config.model_validate(
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


@rule("TST003", "needs-a-model", severity="error", needs=(ModelFacts, HardwareFacts))
def needs_a_model(context: LintContext, model: ModelFacts, hardware: HardwareFacts) -> Iterator[Finding]:
    """Facts come in the order of `needs`."""
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
        "code", "name", "severity", "path", "line", "field", "message", "help", "evidence", "fix",
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
    assert CONTEXT.place("train.epochs") == ("run.yaml", None)


def test_problems_of_gathering_become_findings() -> None:
    problems = (
        DataError("broken", path="rows.jsonl", line=9, also=[DataError("also broken", path="rows.jsonl", line=11)]),
        ModelError("gone", help="look elsewhere"),
        MachineError("no network"),
        ConfigError("no such recipe", field="recipe"),
        ConfigError("does not divide", field="train.per_device_train_batch_size"),
    )
    found = run_rules(replace(CONTEXT, problems=problems)).findings
    assert [(f.code, f.message, f.path, f.line) for f in found] == [
        ("CFG004", "no such recipe", "run.yaml", None),
        ("MOD001", "gone", "run.yaml", 1),
        ("DAT001", "broken", "rows.jsonl", 9),
        ("DAT001", "also broken", "rows.jsonl", 11),
        ("ENV003", "no network", "run.yaml", None),
    ]


def test_find_and_explain() -> None:
    assert find_rule("sch001").name == "warmup-never-ends"
    assert explain("SCH001").startswith("# SCH001: warmup-never-ends (error)\n\nThe warmup is")
    for wrong in ("SCH999", "XYZ001", "", "SCH"):
        with pytest.raises(ConfigError, match="there is no rule"):
            find_rule(wrong)
    with pytest.raises(ConfigError, match="did you mean 'SCH001'"):
        find_rule("SCH01")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from surefit.lint.engine import all_rules; all_rules(); import surefit.plan.static, "
        "surefit.doctor.probes; print({'torch', 'transformers', 'datasets', 'numpy', 'huggingface_hub', 'rich'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


NANO, CPU = model_facts("surefit/nano"), hardware_facts("cpu")
SECTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "model": st.fixed_dictionaries(
        {"name_or_path": st.sampled_from(["surefit/nano", "a/b", ".", "x" * 300])},
        optional={
            "dtype": st.sampled_from(["auto", "float16", "bfloat16", "float32"]),
            "trust_remote_code": st.booleans(),
        },
    ),
    "adapter": st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(["lora", "full"]),
            "r": st.integers(1, 10**9),
            "target_modules": st.just("all-linear") | st.lists(st.text(max_size=8), max_size=3),
        },
    ),
    "data": st.fixed_dictionaries(
        {"train": st.text(max_size=20)},
        optional={
            "eval": st.floats(0, 1, exclude_min=True, exclude_max=True) | st.text(max_size=5),
            "max_length": st.integers(8, 10**12),
            "format": st.sampled_from(["auto", "messages", "text"]),
        },
    ),
    "train": st.fixed_dictionaries(
        {},
        optional={
            "epochs": st.floats(0, 1e6, exclude_min=True),
            "max_steps": st.integers(1, 10**9),
            "learning_rate": st.floats(0, 10, exclude_min=True, exclude_max=True),
            "global_batch_size": st.integers(1, 4096),
            "per_device_train_batch_size": st.just("auto") | st.integers(1, 4096),
            "warmup": st.floats(0, 1e9),
        },
    ),
    "checkpoint": st.fixed_dictionaries({}, optional={"every": st.just("auto") | st.integers(1, 10**9)}),
}
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["answers", "messages", "text", "output", "query"]),
        st.none() | st.text(max_size=5) | st.integers() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        max_size=4,
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    sections=st.fixed_dictionaries(SECTIONS), output=st.text(min_size=1, max_size=20), rows=ROWS, known=st.booleans()
)
def test_any_valid_config_is_judged_without_an_error_of_our_own(
    sections: dict[str, Any], output: str, rows: list[dict[str, Any]], known: bool
) -> None:
    config = Config.model_validate({**sections, "output_dir": output})
    try:
        resolved = resolve(Loaded(config, Path("c.yaml"), {}, frozenset()), NANO, CPU, len(rows))
    except ConfigError:
        resolved = None
    context = LintContext(
        config, Path("c.yaml"), resolved=resolved, dataset=dataset_facts("d", rows), columns=("query", "answers")
    )
    if known:
        context = replace(context, model=NANO, hardware=CPU, environment=EnvironmentFacts())
    result = run_rules(context)
    assert "INT001" not in {finding.code for finding in result.findings}, result.findings
    assert result.rules + len(result.skipped) == len(all_rules())


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
    assert "such as 0.17" in (found.help or "")
    (found,) = few_rows(15, 0.5)
    assert found.help == "collect more rows, or name a file of rows in data.eval"
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
