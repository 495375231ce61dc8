"""Rules, findings and the context that rules read. A rule is one function that reads facts and yields findings, with a
docstring that explains it:

    @rule("SCH002", "no-checkpoint", severity="warning")
    def no_checkpoint(resolved: Resolved) -> Iterator[Finding]:
        \"\"\"One line that says what is wrong.

        ## What it does / ## Why it is bad / ## Example / ## Fix / ## Evidence
        \"\"\"

The parameters' types name the facts that the rule requires: they are passed to it, and if one is unknown, the rule is
skipped. A `LintContext` holds all known facts. The message states the problem in the user's numbers; only the help
proposes the fix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefit.config.capabilities import conflicts, traits
from surefit.config.load import OVERRIDE, is_overridden
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.core.errors import SureFitError
from surefit.facts.audit import AuditFacts
from surefit.facts.batch import BatchFacts
from surefit.facts.dataset import DatasetFacts
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.facts.examples import ExampleFacts
from surefit.facts.fit_advice import FitAdvice
from surefit.facts.hardware import HardwareFacts
from surefit.facts.job_script import JobScript
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts
from surefit.facts.tokenizer import TokenizerFacts

Severity = Literal["error", "warning", "info"]
SECTIONS = ("What it does", "Why it is bad", "Example", "Fix", "Evidence")


@dataclass(frozen=True)
class ConfigFix:
    """The only right value of a config key, as `surefit check --fix` writes it; None removes the key."""

    field: str
    value: Any


@dataclass(frozen=True)
class Finding:
    """One problem. The rule describes it; the engine adds the rule's code, name and severity, and the file and line.

    Attributes:
        field: the dotted config key, the attribute of `Setup`, or the column with the problem.
        message: the problem, in the user's names and numbers.
        help: the proposed remedy.
        path: the file; the config file unless the rule names another.
        line: 1-based; the field's line in the config unless the rule names another.
        evidence: values of this run that show the problem, if the message does not contain them.
        fix: the config change that removes the problem, if there is exactly one right answer.
        error: the code of the error that the finding reports, if it was raised while facts were gathered.
    """

    field: str | None = None
    message: str = ""
    help: str | None = None
    path: str | None = None
    line: int | None = None
    evidence: str | None = None
    fix: ConfigFix | None = None
    code: str = ""
    name: str = ""
    severity: Severity = "error"
    error: str | None = None

    @classmethod
    def of(cls, problem: SureFitError, field: str | None = None) -> Finding:
        """Return a finding for an error raised while facts were gathered; `field` is used if the error names none."""
        return cls(
            problem.field or field, problem.message, problem.help, problem.path, problem.line, error=problem.code
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as check.json stores it."""
        order = ("code", "name", "severity", "path", "line", "field", "message", "help", "evidence", "fix", "error")
        return {key: asdict(self)[key] for key in order}


@dataclass(frozen=True)
class LintContext:
    """All facts that rules may read. A field that is None is unknown, and the rules that require it are skipped.

    Attributes:
        config: the config as the user wrote it, "auto" included; for another tool's file, the config that it maps to;
            None if the file describes no whole run (an Accelerate or DeepSpeed file, a SLURM script, a data set).
        path: the config's file.
        lines: dotted key → its line in that file.
        overridden: dotted keys that were set on the command line.
        names: dotted key → its name in the file, if the file is another tool's.
        setup: the same settings in terms that all tools share.
        resolved: the config with every "auto" resolved, and the steps of the run.
        columns: the recipe's columns; empty for the general data formats.
        metrics: the names that the recipe's scores can have; empty if the recipe does not list them.
        baselines: the names of the recipe's baselines, which answer without a model.
        advice: the changes after which the run fits; None where it fits or that was not searched for.
        problems: errors raised while the facts were gathered; they are reported as findings beside all others.
    """

    config: SureFitConfig | None
    path: Path
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    setup: Setup | None = None
    resolved: ResolvedConfig | None = None
    model: ModelFacts | None = None
    tokenizer: TokenizerFacts | None = None
    hardware: HardwareFacts | None = None
    dataset: DatasetFacts | None = None
    examples: ExampleFacts | None = None
    scored: EvalPromptFacts | None = None
    audit: AuditFacts | None = None
    batch: BatchFacts | None = None
    environment: EnvironmentFacts | None = None
    stack: StackFacts | None = None
    job: JobScript | None = None
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    advice: FitAdvice | None = None
    problems: tuple[SureFitError, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Return whether the file belongs to another tool."""
        return self.setup is not None and self.setup.tool != "surefit"

    def facts(self, kind: type) -> Any:
        """Return the facts of one type, or None if they are unknown."""
        return next((value for value in vars(self).values() if isinstance(value, kind)), None)

    def is_set(self, dotted: str) -> bool:
        """Return whether the user set this key, in the file or on the command line."""
        return dotted in self.lines or is_overridden(dotted, self.overridden)

    def place(self, dotted: str | None) -> tuple[str, int | None]:
        """Return (file, line) of a config key or `Setup` attribute, or of the nearest section above it in the file."""
        place = self.setup.places.get(dotted) if self.setup and dotted else None
        if place and (place.path or place.line):
            return place.path or str(self.path), place.line
        dotted = place.name if place else dotted
        if dotted and is_overridden(dotted, self.overridden):
            return OVERRIDE, None
        while dotted and dotted not in self.lines:
            dotted = dotted.rpartition(".")[0]
        return str(self.path), self.lines.get(dotted) if dotted else None

    def name(self, dotted: str | None) -> str | None:
        """Return the name that a config key or an attribute of `Setup` has in the user's file."""
        if self.setup and dotted and dotted in self.setup.places:
            return self.setup.places[dotted].name
        return self.names.get(dotted, dotted) if dotted else None


Check = Callable[..., Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A rule: its code (never reused), its name, the severity of its findings, and its function.

    Attributes:
        takes: the types of the function's parameters. suppressible: whether a config may accept its findings
        (`lint.ignore`). False if they report an input that no stage can use: the run would stop later anyway.
    """

    code: str
    name: str
    severity: Severity
    check: Check
    takes: tuple[type, ...]
    suppressible: bool = True

    @property
    def needs(self) -> tuple[type, ...]:
        """Types of the facts that the rule requires."""
        return tuple(kind for kind in self.takes if kind is not LintContext)

    def findings(self, context: LintContext) -> Iterator[Finding]:
        """Return an iterator over the findings; every fact in `needs` must be known."""
        return self.check(*(context if kind is LintContext else context.facts(kind) for kind in self.takes))

    @property
    def doc(self) -> str:
        """Docstring of the rule's function, dedented."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return self.doc.partition("\n")[0]

    def section(self, title: str) -> str:
        """Return one section of the docstring; empty if it is missing."""
        match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", self.doc, re.MULTILINE | re.DOTALL)
        return match[1].strip() if match else ""


def rule(code: str, name: str, severity: Severity, suppressible: bool = True) -> Callable[[Check], Rule]:
    """Return a decorator that makes a function a `Rule` of the facts that the types of its parameters name."""

    def wrap(check: Check) -> Rule:
        names = [annotation for name, annotation in check.__annotations__.items() if name != "return"]
        return Rule(
            code, name, severity, check, tuple(check.__globals__[type_name] for type_name in names), suppressible
        )

    return wrap


def find_refused_combinations(context: LintContext, config: SureFitConfig, code: str) -> Iterator[Finding]:
    """Yield a finding for each combination that a rule forbids in a SureFit config, resolved if possible."""
    resolved_config = context.resolved.config if context.resolved else config
    for conflict in conflicts(traits(resolved_config)) if not context.is_foreign else ():
        if conflict.code == code:
            yield Finding(field=conflict.field, message=conflict.message, help=conflict.help)
