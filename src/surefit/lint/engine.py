"""Running the rules: all of them, all findings at once, and never a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from surefit.core.env import redact
from surefit.core.errors import ConfigError, did_you_mean
from surefit.lint.rule import Finding, LintContext, Rule
from surefit.lint.rules import FAMILIES

ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class LintResult:
    """What the rules found.

    Attributes:
        findings: errors first, then warnings, then infos; in the order of the config within each.
        rules: how many rules looked.
        skipped: code → the facts that rule lacked.
    """

    findings: list[Finding]
    rules: int
    skipped: dict[str, list[str]]

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """The rules' part of check.json."""
        return {
            "findings": [finding.as_dict() for finding in self.findings],
            "rules": self.rules,
            "skipped": self.skipped,
        }


def run_rules(context: LintContext, rules: Sequence[Rule] | None = None) -> LintResult:
    """Every finding of every rule whose facts are there.

    Args:
        context: the config and the facts.
        rules: those to run; all by default.
    """
    findings: list[Finding] = []
    skipped: dict[str, list[str]] = {}
    chosen = all_rules() if rules is None else rules
    for rule in chosen:
        missing = [kind.__name__ for kind in rule.needs if context.facts(kind) is None]
        if missing:
            skipped[rule.code] = missing
        else:
            findings += _run(rule, context)
    findings.sort(key=lambda finding: (ORDER[finding.severity], finding.line or 0, finding.code))
    return LintResult(findings, len(chosen) - len(skipped), skipped)


def _run(rule: Rule, context: LintContext) -> list[Finding]:
    try:
        found = list(rule.check(context, *(context.facts(kind) for kind in rule.needs)))
    except Exception as error:
        # A bug in one rule must not hide what the others found, and a user cannot do anything with its traceback.
        problem = redact(f"{type(error).__name__}: {error}")
        failed = Finding(
            message=f"rule {rule.code} ({rule.name}) failed: {problem}",
            help="the other rules ran; please report this as a bug in SureFit",
        )
        return [_stamp(failed, find_rule("INT001"), context)]
    return [_stamp(finding, rule, context) for finding in found]


def _stamp(finding: Finding, rule: Rule, context: LintContext) -> Finding:
    """Add what the rule's function left to the engine."""
    path, line = (finding.path, finding.line) if finding.path else context.place(finding.field)
    return replace(
        finding,
        code=rule.code,
        name=rule.name,
        severity=rule.severity,
        field=context.name(finding.field),
        path=path,
        line=line,
    )


@lru_cache(maxsize=1)
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    return tuple(sorted((r for family in FAMILIES for r in _family(family)), key=lambda rule: rule.code))


def find_rule(code: str) -> Rule:
    """One rule; only its own module is imported.

    Raises:
        ConfigError: there is no such code.
    """
    wanted = code.strip().upper()
    for rule in _family(wanted[:3]):
        if rule.code == wanted:
            return rule
    names = [rule.code for rule in all_rules()]
    raise ConfigError(
        f"there is no rule {code!r}{did_you_mean(wanted, names)}", help="`surefit explain --all` lists the rules"
    )


def _family(prefix: str) -> list[Rule]:
    module = FAMILIES.get(prefix)
    found = vars(import_module(f"surefit.lint.rules.{module}")).values() if module else ()
    return [value for value in found if isinstance(value, Rule) and value.code.startswith(prefix)]


def explain(code: str) -> str:
    """A rule's page: its code and name, then what its docstring says."""
    rule = find_rule(code)
    return f"# {rule.code}: {rule.name} ({rule.severity})\n\n{rule.doc}\n"
