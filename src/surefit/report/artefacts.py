"""What a run directory holds, read for a page that must always be written.

Every artefact has a checked shape here; the fields a page can do without are optional. A missing artefact is None or
empty, and a damaged one becomes a line in `Artefacts.problems`: reading never raises for what is in a file. Texts are
cut to a bound, and cleaned of secrets and of what UTF-8 cannot hold, on the way in: nothing after this file has to
think of that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surefit.core.env import redact
from surefit.core.rundir import RunDir
from surefit.report.text import clean, shorten

TEXT_LIMIT = 600
"""Bytes kept of a text in an artefact, as `shorten` counts them."""
NAME_LIMIT = 80
"""The same, of the name of a set, a variant, a metric or a package."""
ANSWER_LIMIT = 4_000
"""The same, of a prompt or an answer."""
MAX_SETTINGS = 250

Number = Annotated[float, Field(ge=-1e18, le=1e18)]
"""A finite number of a size that can be added up and written out."""
Count = Annotated[int, Field(ge=-(10**15), le=10**15)]
Interval = tuple[Number, Number]
Origin = Literal["user", "--set", "auto", "default", "unknown"]


class Shape(BaseModel):
    """An artefact or a part of one; fields that the page does not show are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


ShapeT = TypeVar("ShapeT", bound=Shape)


class Finding(Shape):
    code: str
    severity: Literal["error", "warning", "info"]
    message: str
    name: str | None = None
    path: str | None = None
    line: Count | None = None
    field: str | None = None
    help: str | None = None
    evidence: Any = None


class Suppressed(Finding):
    """A finding that the config accepts."""

    reason: str = ""


class Check(Shape):
    """check.json"""

    findings: list[Finding]
    suppressed: list[Suppressed] = []
    rules: Count | None = None


class Histogram(Shape):
    """Counts of lengths in bins of one width, from 0; `over` counts those beyond the last bin."""

    width: Annotated[int, Field(ge=1, le=10**12)] = 1
    counts: Annotated[list[Annotated[int, Field(ge=0, le=10**15)]], Field(max_length=200)] = []
    over: Annotated[int, Field(ge=0, le=10**15)] = 0


class Lengths(Shape):
    """The lengths of one part of the examples."""

    total: Count = 0
    mean: Number | None = None
    p50: Count | None = None
    p95: Count | None = None
    p99: Count | None = None
    max: Count | None = None
    histogram: Histogram = Histogram()


class Observed(Shape):
    """One thing that the audit looked for."""

    rows: Count
    of: Count
    examples: list[str] = []
    detail: str = ""


class Passport(Shape):
    """passport.json"""

    source: str
    sha256: str
    rows: Count
    audited: Count
    usable: Count | None = None
    unit: str = "tokens"
    lengths: dict[str, Lengths] = {}
    supervised_share: Number | None = None
    observations: dict[str, Observed] = {}
    findings: list[Finding] = []


class Term(Shape):
    term: str
    bytes: Number
    why: str = ""
    moment: str | None = None


class Device(Shape):
    name: str
    kind: str | None = None
    memory_bytes: Number | None = None
    source: str | None = None


class PlannedModel(Shape):
    name: str | None = None
    parameters: Number | None = None
    trainable: Number | None = None
    architecture: str | None = None


class PlannedSteps(Shape):
    rows: Count | None = None
    total_steps: Count | None = None
    global_batch_size: Count | None = None
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None


class PlannedMemory(Shape):
    verdict: str = ""
    how: str = ""
    low_bytes: Number
    high_bytes: Number
    peak_bytes: Number


class PlannedTime(Shape):
    parts: dict[str, Number] | None = None


class Plan(Shape):
    """plan.json"""

    estimate: PlannedMemory | None = None
    time: PlannedTime | None = None

    device: Device | None = None
    model: PlannedModel = PlannedModel()
    memory: list[Term] = []
    memory_total_bytes: Number | None = None
    left_out: list[str] = []
    does_not_fit: list[str] = []
    disk: list[Term] = []
    disk_total_bytes: Number | None = None
    disk_free_bytes: Number | None = None
    steps: PlannedSteps = PlannedSteps()


class Event(Shape):
    """A line of events.jsonl."""

    time: Number
    stage: str
    event: str
    seconds: Number | None = None
    step: Count | None = None
    error: Any = None


class Metrics(Shape):
    """A line of metrics.jsonl: an optimizer step, or a measurement of the held-out loss."""

    step: Count
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: Number | None = None
    tokens_per_second: float | None = None
    seconds: Number | None = None
    memory_bytes: Number | None = None
    rejected: bool = False
    eval_loss: float | None = None


class Environment(Shape):
    """environment.json"""

    python: str | None = None
    platform: str | None = None
    cpu_count: Count | None = None
    memory_bytes: Number | None = None
    gpus: list[Any] = []
    packages: dict[str, str] = {}
    surefit: str | None = None


class CertificateCheck(Shape):
    name: str
    value: Any = None
    threshold: Any = None
    comparison: str = ""
    passed: bool
    why: str = ""


class CertifiedBase(Shape):
    name: str | None = None
    sha256: str | None = None


class Certificate(Shape):
    """certificate.json"""

    passed: bool
    reason: str = ""
    checks: list[CertificateCheck] = []
    prompts: Count | None = None
    positions: Count | None = None
    base: CertifiedBase = CertifiedBase()
    adapter_sha256: str | None = None
    merged_sha256: str | None = None
    dtype: str | None = None
    seconds: Number | None = None


class Score(Shape):
    mean: Number
    ci95: Interval | None = None
    n: Count | None = None


class Decoding(Shape):
    strategy: str | None = None
    max_new_tokens: Count | None = None
    batch_size: Count | None = None
    num_beams: Count | None = None
    samples: Count | None = None
    temperature: Number | None = None
    constrained: bool = False


class Evaluation(Shape):
    """eval/SET/VARIANT.json"""

    set: str
    variant: str
    metrics: dict[str, Score]
    recipe: str | None = None
    recipe_version: Count | None = None
    n: Count | None = None
    primary_metric: str | None = None
    truncated: Count | None = None
    unparsed: Count | None = None
    seconds: Number | None = None
    tokens_per_second: Number | None = None
    decoding: Decoding = Decoding()


class Comparison(Shape):
    a: str
    b: str
    metric: str
    difference: Number
    ci95: Interval
    wins: Count
    losses: Count
    ties: Count


class SetSummary(Shape):
    n: Count | None = None
    variants: dict[str, dict[str, Score]] = {}
    comparisons: list[Comparison] = []


class Gate(Shape):
    passed: bool
    reason: str = ""


class Summary(Shape):
    """eval/summary.json"""

    primary_metric: str
    sets: dict[str, SetSummary]
    gate: Gate | None = None
    left_out: list[str] = []


class Prediction(Shape):
    """A line of eval/SET/VARIANT.predictions.jsonl."""

    index: Count
    text: str
    where: str | None = None
    prompt: str = ""
    gold: str | None = None
    truncated: bool = False
    scores: dict[str, float] = {}


@dataclass(frozen=True)
class Setting:
    """One value of resolved.yaml.

    Attributes:
        key: dotted.
        text: the value as it is written there.
        value: the value without YAML's quotes.
        origin: where it came from.
        detail: the file and line, or the reason.
    """

    key: str
    text: str
    value: str
    origin: Origin
    detail: str


@dataclass
class Artefacts:
    """Everything in a run directory that the page shows. `problems`: damaged file → what is wrong with it."""

    run: RunDir
    settings: list[Setting] | None = None
    check: Check | None = None
    plan: Plan | None = None
    passport: Passport | None = None
    environment: Environment | None = None
    certificate: Certificate | None = None
    summary: Summary | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | None:
        """The resolved value at a dotted key; None where it is not known or null."""
        found = next((setting.value for setting in self.settings or [] if setting.key == key), None)
        return None if found in ("null", "") else found

    def predictions(self, set_name: str, variant: str) -> list[Prediction]:
        """What `variant` answered to the prompts of a set, in the order of the file."""
        if not set_name.replace("_", "").replace("-", "").isalnum():
            return []  # no set has such a name, and a path made of it might lead anywhere
        path = self.run.eval / set_name / f"{variant}.predictions.jsonl"
        return self._lines(path, Prediction, ANSWER_LIMIT)

    def _json(self, path: Path, shape: type[ShapeT]) -> ShapeT | None:
        try:
            return shape.model_validate(_cut(json.loads(redact(path.read_text(encoding="utf-8"))), TEXT_LIMIT))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._damaged(path, error)
            return None

    def _lines(self, path: Path, shape: type[ShapeT], limit: int = TEXT_LIMIT) -> list[ShapeT]:
        """The lines of a log that can be read; a last line that a crash cut short is no damage."""
        records: list[ShapeT] = []
        bad: list[str] = []
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        records.append(shape.model_validate(_cut(json.loads(redact(line.decode().rstrip())), limit)))
                    except (ValueError, RecursionError) as error:
                        if line.endswith(b"\n"):
                            bad.append(f"line {number} is left out, {_reason(error)}")
        except FileNotFoundError:
            return []
        except OSError as error:
            bad.append(_reason(error))
        if bad:
            self._damaged(path, bad[0] + (f"; {len(bad) - 1} more lines are left out" if len(bad) > 1 else ""))
        return records

    def _settings(self) -> list[Setting] | None:
        path = self.run.resolved
        try:
            return list(itertools.islice(read_settings(redact(path.read_text(encoding="utf-8"))), MAX_SETTINGS))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            self._damaged(path, error)
            return None

    def _evaluations(self) -> list[Evaluation]:
        paths = sorted(self.run.eval.glob("*/*.json"))
        read = [self._json(path, Evaluation) for path in paths]
        return [evaluation for evaluation in read if evaluation is not None]

    def _damaged(self, path: Path, error: Exception | str) -> None:
        name = clean(path.relative_to(self.run.path).as_posix())
        self.problems[name] = shorten(clean(error if isinstance(error, str) else _reason(error)), TEXT_LIMIT)


def read_artefacts(run: RunDir) -> Artefacts:
    """Read everything but the predictions, which are large and read when they are needed."""
    found = Artefacts(run)
    found.settings = found._settings()
    found.check = found._json(run.check, Check)
    found.plan = found._json(run.plan, Plan)
    found.passport = found._json(run.passport, Passport)
    found.environment = found._json(run.environment, Environment)
    found.certificate = found._json(run.certificate, Certificate)
    found.summary = found._json(run.eval_summary, Summary)
    found.evaluations = found._evaluations()
    found.events = sorted(found._lines(run.events, Event), key=lambda event: event.time)
    found.metrics = found._lines(run.metrics, Metrics)
    return found


def read_settings(text: str) -> Iterator[Setting]:
    """The values of a resolved.yaml, each with the comment at the end of its line.

    >>> [str((s.key, s.value, s.origin, s.detail)) for s in read_settings("train:\\n  seed: 7  # user run.yaml:3")]
    ["('train.seed', '7', 'user', 'run.yaml:3')"]
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("holds no settings")

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[Setting]:
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from walk(value, f"{dotted}.")
                continue
            end = value.end_mark.index
            raw = text[value.start_mark.index : end]
            plain = value.value if isinstance(value, yaml.ScalarNode) else raw
            origin, detail = _origin(text[end:].partition("\n")[0].partition("#")[2].strip())
            dotted, raw, plain, detail = (shorten(clean(part), 200) for part in (dotted, raw, plain, detail))
            yield Setting(dotted, raw, plain, origin, detail)

    return walk(root, "")


def _origin(comment: str) -> tuple[Origin, str]:
    kind, _, detail = comment.partition(" ")
    match kind.rstrip(":"):
        case "user" | "--set" | "auto" | "default" as known:
            return known, detail
        case _:
            return "unknown", comment


def _cut(value: Any, limit: int) -> Any:
    """`value` as JSON gave it, every text in it cleaned and shortened."""
    match value:
        case str():
            return shorten(clean(value), limit)
        case list():
            return [_cut(item, limit) for item in value]
        case dict():
            return {shorten(clean(key), NAME_LIMIT): _cut(item, limit) for key, item in value.items()}
        case _:
            return value


def _reason(error: Exception) -> str:
    """What is wrong with a file, in one line."""
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the whole"
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            return f"not of the expected shape: {place}: {first['msg']}{more}"
        case json.JSONDecodeError():
            line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
            return f"not valid JSON: {error.msg} at {line}column {error.colno}"
        case UnicodeDecodeError():
            return f"not UTF-8 text (byte {error.start})"
        case RecursionError():
            return "nested too deeply"
        case OSError():
            return f"cannot be read: {error.strerror}"
        case yaml.MarkedYAMLError() if error.problem_mark is not None:
            return f"not valid YAML: line {error.problem_mark.line + 1}: {error.problem}"
        case yaml.YAMLError():
            return f"not valid YAML: {error}"
        case _:
            return str(error)
