"""What every rule must have: an explanation with all its sections, a config it catches and one it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.rules.conftest import fixture

from surefit.lint.engine import all_rules, explain_rule, run_rules
from surefit.lint.rule import SECTIONS, Rule
from surefit.lint.rules import FAMILIES

HERE = Path(__file__).parent
RULES = [
    rule for rule in all_rules() if rule.code != "INT001"
]  # INT001 stands for a rule that failed; see tests/unit/lint
SMALL = {"BAT002", "SCH011"}
"""Rules that fewer rows than a real run's trigger: fixtures are small, so that they can be read."""
MACHINE_PATHS = re.compile(r"/(work|tmp|root|home)\b")


def by_code(rule: Rule) -> str:
    return rule.code


@pytest.mark.parametrize("rule", RULES, ids=by_code)
def test_the_bad_config_triggers_exactly_this_rule(rule: Rule, gather) -> None:
    result = run_rules(gather(fixture(rule.code, "bad")))
    lacked = f"skipped: this fixture has no {result.skipped[rule.code]}" if rule.code in result.skipped else "it looked"
    findings = [finding for finding in result.findings if finding.code not in SMALL - {rule.code}]
    assert {finding.code for finding in findings} == {rule.code}, (lacked, result.findings)
    for finding in findings:
        assert finding.message
        assert finding.help, "a finding says what to do"
        assert finding.path
        assert finding.severity == rule.severity


@pytest.mark.parametrize("rule", RULES, ids=by_code)
def test_the_good_config_triggers_none(rule: Rule, gather) -> None:
    findings = run_rules(gather(fixture(rule.code, "good"))).findings
    assert [finding for finding in findings if finding.code not in SMALL - {rule.code}] == []


@pytest.mark.parametrize("rule", all_rules(), ids=by_code)
def test_the_explanation_is_whole(rule: Rule) -> None:
    assert re.fullmatch(r"[A-Z]{3}\d{3}", rule.code)
    assert rule.code[:3] in FAMILIES
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert rule.summary.endswith(".")
    titles = re.findall(r"^## (.*)$", rule.doc, re.MULTILINE)
    assert tuple(titles) == SECTIONS
    assert all(rule.section(title) for title in SECTIONS)
    assert not MACHINE_PATHS.search(rule.doc)
    assert rule.doc in explain_rule(rule.code)


def test_codes_and_names_are_used_once() -> None:
    codes = [rule.code for rule in all_rules()]
    names = [rule.name for rule in all_rules()]
    assert len(codes) == len(set(codes))
    assert len(names) == len(set(names))


def test_every_fixture_belongs_to_a_rule() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and re.fullmatch(r"[A-Z]{3}\d{3}", path.name)}
    assert folders == {rule.code for rule in RULES}
