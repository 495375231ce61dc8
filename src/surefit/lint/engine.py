"""The engine that runs all rules and collects their findings; a failing rule becomes a finding, not a traceback."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from surefit.core.env import redact
from surefit.core.errors import ConfigError, did_you_mean
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import HardwareFacts
from surefit.facts.stack import StackFacts
from surefit.lint.rule import ConfigFix, Finding, LintContext, Rule
from surefit.lint.rules import FAMILIES

ORDER = {"error": 0, "warning": 1, "info": 2}
MACHINE = {EnvironmentFacts, HardwareFacts, StackFacts}
"""Facts that differ between machines: a rule that needs them may find nothing on this one and something on another."""


@dataclass(frozen=True)
class SuppressedFinding:
    """A finding that the config accepts (`lint.ignore`), with the reason given there."""

    finding: Finding
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the finding and its reason as check.json stores them."""
        return self.finding.as_dict() | {"reason": self.reason}


@dataclass(frozen=True)
class LintResult:
    """Results of running the rules.

    Attributes:
        findings: errors first, then warnings, then infos; in the order of the config within each.
        rules: the number of rules that ran.
        skipped: code of a skipped rule → the facts that it lacked.
        suppressed: findings that the config accepts; in the same order.
    """

    findings: list[Finding]
    rules: int
    skipped: dict[str, list[str]]
    suppressed: list[SuppressedFinding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Findings that stop a run."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """Return the rules' part of check.json."""
        return {
            "findings": [finding.as_dict() for finding in self.findings],
            "suppressed": [finding.as_dict() for finding in self.suppressed],
            "rules": self.rules,
            "skipped": self.skipped,
        }


def run_rules(context: LintContext, rules: Sequence[Rule] | None = None) -> LintResult:
    """Run the rules whose facts are known, and return all findings.

    Args:
        context: the config and the facts.
        rules: the rules to run; all by default.
    """
    findings: list[Finding] = []
    skipped: dict[str, list[str]] = {}
    ran_rules: dict[str, Rule] = {}
    for rule in all_rules() if rules is None else rules:
        missing = [kind.__name__ for kind in rule.needs if context.facts(kind) is None]
        if missing:
            skipped[rule.code] = missing
        else:
            ran_rules[rule.code] = rule
            findings += _run(rule, context)
    findings = _drop_generic_findings(findings)
    reasons = context.config.lint.ignore if context.config else {}
    accepted_reasons = {
        code: reasons[code] for code, rule in ran_rules.items() if code in reasons and rule.suppressible
    }
    suppressed = [
        SuppressedFinding(finding, accepted_reasons[finding.code])
        for finding in findings
        if finding.code in accepted_reasons
    ]
    findings = [finding for finding in findings if finding.code not in accepted_reasons]
    if "CFG005" in ran_rules:
        unused = _unused_suppressions(ran_rules, reasons, {item.finding.code for item in suppressed})
        findings += [_stamp(finding, ran_rules["CFG005"], context) for finding in unused]
    return LintResult(
        sorted(findings, key=_position),
        len(ran_rules),
        skipped,
        sorted(suppressed, key=lambda item: _position(item.finding)),
    )


def _drop_generic_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without each CFG004 whose field has an error from another rule, which explains the cause."""
    explained_fields = {
        (finding.path, finding.field)
        for finding in findings
        if finding.code != "CFG004" and finding.severity == "error"
    }
    return [
        finding
        for finding in findings
        if finding.code != "CFG004" or (finding.path, finding.field) not in explained_fields
    ]


def _position(finding: Finding) -> tuple[int, int, str]:
    return ORDER[finding.severity], finding.line or 0, finding.code


def _unused_suppressions(ran: Mapping[str, Rule], reasons: Iterable[str], used: Container[str]) -> Iterator[Finding]:
    """Yield CFG005's findings, which are known only after all other rules have run."""
    for code in reasons:
        rule = ran.get(code)
        if rule is None or code in used or (rule.suppressible and MACHINE.intersection(rule.needs)):
            continue
        label = f"{code} ({rule.name})"
        if rule.suppressible:
            message, help_text = f"{label} is ignored, but finds nothing here", f"remove {code} from lint.ignore"
        else:
            message = f"{label} cannot be ignored: the run would stop anyway"
            help_text = f"fix the problem that {code} reports, and remove it from lint.ignore"
        yield Finding(f"lint.ignore.{code}", message, help_text, fix=ConfigFix(f"lint.ignore.{code}", None))


def _run(rule: Rule, context: LintContext) -> list[Finding]:
    try:
        findings = list(rule.findings(context))
    except Exception as error:
        # A bug in one rule must not hide the other rules' findings, and its traceback does not help a user.
        description = redact(f"{type(error).__name__}: {error}")
        failure = Finding(
            message=f"rule {rule.code} ({rule.name}) failed: {description}",
            help="the other rules ran; please report this as a bug in SureFit",
        )
        return [_stamp(failure, find_rule("INT001"), context)]
    return [_stamp(finding, rule, context) for finding in findings]


def _stamp(finding: Finding, rule: Rule, context: LintContext) -> Finding:
    """Return a finding with the rule's code, name and severity, and the file and line of its field."""
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
    """Return all rules, sorted by code."""
    return tuple(sorted((r for family in FAMILIES for r in _family(family)), key=lambda rule: rule.code))


def choose_rules(select: str | None = None, ignore: str | None = None) -> tuple[Rule, ...]:
    """Return the rules that `select` names, without the rules that `ignore` names; all rules by default.

    Args:
        select: codes or their beginnings, separated by commas: `MEM,SCH001`.
        ignore: the same.

    Raises:
        ConfigError: a word is not the beginning of any code, or no rule is left.
    """
    rules = [rule for rule in all_rules() if select is None or rule.code.startswith(_codes("--select", select))]
    if ignore is not None:
        rules = [rule for rule in rules if not rule.code.startswith(_codes("--ignore", ignore))]
    if not rules:
        raise ConfigError(
            "--select and --ignore leave no rule", code="E2098", help="`surefit explain --all` lists the rules"
        )
    return tuple(rules)


def _codes(option: str, text: str) -> tuple[str, ...]:
    """Return the codes, or beginnings of codes, in an option's value."""
    words = tuple(word.strip().upper() for word in text.split(",") if word.strip())
    all_codes = [rule.code for rule in all_rules()]
    unknown = next((word for word in words if not any(code.startswith(word) for code in all_codes)), None)
    if unknown or not words:
        hint = did_you_mean(unknown, [*all_codes, *FAMILIES]) if unknown else ""
        raise ConfigError(
            f"{option} {text}: {f'no rule begins with {unknown}' if unknown else 'names no rule'}{hint}",
            code="E2099",
            help=f"codes or their beginnings, separated by commas, for example {option} MEM,SCH001",
        )
    return words


def find_rule(code: str) -> Rule:
    """Return the rule with this code; only its family's modules are imported.

    Raises:
        ConfigError: there is no such code.
    """
    upper_code = code.strip().upper()
    for rule in _family(upper_code[:3]):
        if rule.code == upper_code:
            return rule
    codes = [rule.code for rule in all_rules()]
    raise ConfigError(
        f"there is no rule {code!r}{did_you_mean(upper_code, codes)}",
        code="E2100",
        help="`surefit explain --all` lists the rules",
    )


def _family(prefix: str) -> list[Rule]:
    modules = (import_module(f"surefit.lint.rules.{name}") for name in FAMILIES.get(prefix, "").split())
    members = [value for module in modules for value in vars(module).values()]
    return [value for value in members if isinstance(value, Rule) and value.code.startswith(prefix)]


def explain_rule(code: str) -> str:
    """Return a rule's page: its code and name, then its docstring."""
    rule = find_rule(code)
    return f"# {rule.code}: {rule.name} ({rule.severity})\n\n{rule.doc}\n"
