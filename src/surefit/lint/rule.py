"""What a rule is: one function that looks at facts and yields findings, with a docstring that explains it.

    @rule("SCH002", "no-checkpoint", severity="warning")
    def no_checkpoint(resolved: Resolved) -> Iterator[Finding]:
        \"\"\"One line that says what is wrong.

        ## What it does / ## Why it is bad / ## Example / ## Fix / ## Evidence
        \"\"\"

The parameters' types say which facts the rule cannot judge without: they are passed to it, and where one is absent the
rule is skipped. A `LintContext` is everything that is known. The message states the problem in the user's numbers; only
the help proposes the fix.
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
from surefit.config.schema import Config
from surefit.core.errors import SureFitError
from surefit.facts.audit import AuditFacts
from surefit.facts.batch import BatchFacts
from surefit.facts.dataset import DatasetFacts
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.facts.examples import ExampleFacts
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
    """The one right value of a config key: what `surefit check --fix` writes. None takes the key out."""

    field: str
    value: Any


@dataclass(frozen=True)
class Finding:
    """One problem. A rule fills in what it knows; the engine adds the rule's code, name and severity, and the place.

    Attributes:
        field: the dotted config key, the attribute of `Setup`, or the column, it is about.
        message: the problem, in the user's names and numbers.
        help: what to do about it.
        path: the file; the config file unless the rule names another.
        line: 1-based; the field's line in the config unless the rule names another.
        evidence: what in this run shows it, where the message does not already say.
        fix: the change that removes it, where there is exactly one right answer.
        error: the code of the error that it reports, where it was met while facts were gathered.
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
        """An error met while facts were gathered, as a finding; `field` is for one that names none."""
        return cls(
            problem.field or field, problem.message, problem.help, problem.path, problem.line, error=problem.code
        )

    def as_dict(self) -> dict[str, Any]:
        """The same, for check.json."""
        order = ("code", "name", "severity", "path", "line", "field", "message", "help", "evidence", "fix", "error")
        return {key: asdict(self)[key] for key in order}


@dataclass(frozen=True)
class LintContext:
    """All that rules may look at. What is None is not known, and the rules that need it are skipped.

    Attributes:
        config: the config as the user wrote it, "auto" included; of another tool's file, what it maps to; None where
            the file describes no whole run (an Accelerate or DeepSpeed file, a SLURM script, a data set).
        path: its file.
        lines: dotted key → line in that file.
        overridden: dotted keys that were set on the command line.
        names: dotted key → how the file calls it, where that is another tool's.
        setup: the same settings in terms that all tools share.
        resolved: the config with every "auto" decided, and the steps of the run.
        columns: the recipe's columns; empty for the general data formats.
        metrics: the names that the recipe's scores can have; empty where it does not say.
        baselines: the recipe's answers that need no model.
        problems: errors met while the facts were gathered; they are reported as findings beside all others.
    """

    config: Config | None
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
    problems: tuple[SureFitError, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Whether the file is another tool's."""
        return self.setup is not None and self.setup.tool != "surefit"

    def facts(self, kind: type) -> Any:
        """The facts of one kind, or None."""
        return next((value for value in vars(self).values() if isinstance(value, kind)), None)

    def is_set(self, dotted: str) -> bool:
        """Whether the user wrote this key, in the file or on the command line."""
        return dotted in self.lines or is_overridden(dotted, self.overridden)

    def place(self, dotted: str | None) -> tuple[str, int | None]:
        """(file, line) of a config key or an attribute of `Setup`, or of the nearest section above it in the file."""
        stated = self.setup.places.get(dotted) if self.setup and dotted else None
        if stated and (stated.path or stated.line):
            return stated.path or str(self.path), stated.line
        dotted = stated.name if stated else dotted
        if dotted and is_overridden(dotted, self.overridden):
            return OVERRIDE, None
        while dotted and dotted not in self.lines:
            dotted = dotted.rpartition(".")[0]
        return str(self.path), self.lines.get(dotted) if dotted else None

    def name(self, dotted: str | None) -> str | None:
        """A config key, or an attribute of `Setup`, as the user's file calls it."""
        if self.setup and dotted and dotted in self.setup.places:
            return self.setup.places[dotted].name
        return self.names.get(dotted, dotted) if dotted else None


Check = Callable[..., Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A rule: its code (never reused), its name, how bad a finding is, and the function.

    Attributes:
        takes: the types of what the function is given.
        suppressible: a config may accept its findings (`lint.ignore`). Not where they stand for an input that no stage
            can use: the run would stop all the same, later.
    """

    code: str
    name: str
    severity: Severity
    check: Check
    takes: tuple[type, ...]
    suppressible: bool = True

    @property
    def needs(self) -> tuple[type, ...]:
        """The facts it cannot judge without."""
        return tuple(kind for kind in self.takes if kind is not LintContext)

    def findings(self, context: LintContext) -> Iterator[Finding]:
        """What it finds; nothing that it needs is missing."""
        return self.check(*(context if kind is LintContext else context.facts(kind) for kind in self.takes))

    @property
    def doc(self) -> str:
        """The docstring, dedented."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return self.doc.partition("\n")[0]

    def section(self, title: str) -> str:
        """One section of the docstring; empty where it is missing."""
        found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", self.doc, re.MULTILINE | re.DOTALL)
        return found[1].strip() if found else ""


def rule(code: str, name: str, severity: Severity, suppressible: bool = True) -> Callable[[Check], Rule]:
    """Make a function a rule, which is given the facts that the types of its parameters name."""

    def wrap(check: Check) -> Rule:
        names = [annotation for name, annotation in check.__annotations__.items() if name != "return"]
        return Rule(code, name, severity, check, tuple(check.__globals__[each] for each in names), suppressible)

    return wrap


def find_refused_combinations(context: LintContext, config: Config, code: str) -> Iterator[Finding]:
    """The combinations in a config of ours, decided as far as it can be, that this rule refuses."""
    decided = context.resolved.config if context.resolved else config
    for row in conflicts(traits(decided)) if not context.is_foreign else ():
        if row.code == code:
            yield Finding(field=row.field, message=row.message, help=row.help)
