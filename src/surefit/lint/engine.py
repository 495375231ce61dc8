"""Running the rules: all of them, all findings at once, and never a traceback."""

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
"""Facts that are others on the next machine: what needs them may find nothing here and something there."""


@dataclass(frozen=True)
class SuppressedFinding:
    """A finding that the config accepts (`lint.ignore`), and why."""

    finding: Finding
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The same, for check.json."""
        return self.finding.as_dict() | {"reason": self.reason}


@dataclass(frozen=True)
class LintResult:
    """What the rules found.

    Attributes:
        findings: errors first, then warnings, then infos; in the order of the config within each.
        rules: how many rules looked.
        skipped: code → the facts that rule lacked.
        suppressed: what the config accepts; in the same order.
    """

    findings: list[Finding]
    rules: int
    skipped: dict[str, list[str]]
    suppressed: list[SuppressedFinding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """The rules' part of check.json."""
        return {
            "findings": [finding.as_dict() for finding in self.findings],
            "suppressed": [one.as_dict() for one in self.suppressed],
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
    ran: dict[str, Rule] = {}
    for rule in all_rules() if rules is None else rules:
        missing = [kind.__name__ for kind in rule.needs if context.facts(kind) is None]
        if missing:
            skipped[rule.code] = missing
        else:
            ran[rule.code] = rule
            findings += _run(rule, context)
    findings = _drop_generic_findings(findings)
    reasons = context.config.lint.ignore if context.config else {}
    accepted = {code: reasons[code] for code, rule in ran.items() if code in reasons and rule.suppressible}
    suppressed = [SuppressedFinding(each, accepted[each.code]) for each in findings if each.code in accepted]
    findings = [each for each in findings if each.code not in accepted]
    if "CFG005" in ran:
        useless = _unused_suppressions(ran, reasons, {one.finding.code for one in suppressed})
        findings += [_stamp(each, ran["CFG005"], context) for each in useless]
    return LintResult(
        sorted(findings, key=_position),
        len(ran),
        skipped,
        sorted(suppressed, key=lambda one: _position(one.finding)),
    )


def _drop_generic_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Without what a tool refuses (CFG004) where a rule of its own says of the same field why that is so."""
    explained = {(each.path, each.field) for each in findings if each.code != "CFG004" and each.severity == "error"}
    return [each for each in findings if each.code != "CFG004" or (each.path, each.field) not in explained]


def _position(finding: Finding) -> tuple[int, int, str]:
    return ORDER[finding.severity], finding.line or 0, finding.code


def _unused_suppressions(ran: Mapping[str, Rule], reasons: Iterable[str], used: Container[str]) -> Iterator[Finding]:
    """What CFG005 reports: only after all rules have run is it known."""
    for code in reasons:
        rule = ran.get(code)
        if rule is None or code in used or (rule.suppressible and MACHINE.intersection(rule.needs)):
            continue
        what = f"{code} ({rule.name})"
        if rule.suppressible:
            message, help_text = f"{what} is ignored, and finds nothing here", f"remove {code} from lint.ignore"
        else:
            message = f"{what} cannot be ignored: what it finds stops the run all the same"
            help_text = f"fix what {code} finds, and remove it from lint.ignore"
        yield Finding(f"lint.ignore.{code}", message, help_text, fix=ConfigFix(f"lint.ignore.{code}", None))


def _run(rule: Rule, context: LintContext) -> list[Finding]:
    try:
        found = list(rule.findings(context))
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


def choose_rules(select: str | None = None, ignore: str | None = None) -> tuple[Rule, ...]:
    """The rules that `select` names, without those that `ignore` names; all where neither says anything.

    Args:
        select: codes or their beginnings, separated by commas: `MEM,SCH001`.
        ignore: the same.

    Raises:
        ConfigError: a word in them begins no code, or no rule is left.
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
    """The codes, or their beginnings, in an option's value."""
    words = tuple(word.strip().upper() for word in text.split(",") if word.strip())
    known = [rule.code for rule in all_rules()]
    unknown = next((word for word in words if not any(code.startswith(word) for code in known)), None)
    if unknown or not words:
        hint = did_you_mean(unknown, [*known, *FAMILIES]) if unknown else ""
        raise ConfigError(
            f"{option} {text}: {f'no rule begins with {unknown}' if unknown else 'names no rule'}{hint}",
            code="E2099",
            help=f"codes or their beginnings, separated by commas, for example {option} MEM,SCH001",
        )
    return words


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
        f"there is no rule {code!r}{did_you_mean(wanted, names)}",
        code="E2100",
        help="`surefit explain --all` lists the rules",
    )


def _family(prefix: str) -> list[Rule]:
    modules = (import_module(f"surefit.lint.rules.{name}") for name in FAMILIES.get(prefix, "").split())
    found = [value for module in modules for value in vars(module).values()]
    return [value for value in found if isinstance(value, Rule) and value.code.startswith(prefix)]


def explain_rule(code: str) -> str:
    """A rule's page: its code and name, then what its docstring says."""
    rule = find_rule(code)
    return f"# {rule.code}: {rule.name} ({rule.severity})\n\n{rule.doc}\n"
