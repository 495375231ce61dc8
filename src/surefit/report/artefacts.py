"""Reads the contents of a run directory for a page that can always be written.

Every artefact has a checked shape (shapes.py). A missing artefact is None or empty, and a damaged one becomes an entry
of `Artefacts.problems`: reading never raises because of a file's content. Texts are truncated, and cleaned of secrets
and of characters that UTF-8 cannot encode, while they are read: the other modules can rely on that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from surefit.config.load import compose_yaml
from surefit.core.env import redact
from surefit.core.errors import ConfigError
from surefit.core.reading import open_file, parse_json, read_bytes
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import checkpoint_step
from surefit.report.shapes import (
    Artefact,
    BatchAudit,
    CertificateRecord,
    CheckpointScores,
    CheckRecord,
    DryPassRecord,
    EnvironmentRecord,
    Evaluation,
    Event,
    Metrics,
    Passport,
    PlanRecord,
    PredictionRecord,
    Summary,
)
from surefit.report.text import drop_surrogates, shorten_text

SETTINGS_BYTES = 4 * 1024**2
TEXT_LIMIT = 600
"""Largest number of bytes of a text in an artefact, as `shorten_text` counts them."""
NAME_LIMIT = 80
"""The same limit for the name of a set, a variant, a metric or a package."""
ANSWER_LIMIT = 4_000
"""The same limit for a prompt or an answer."""
MAX_SETTINGS = 250

Origin = Literal["user", "--set", "auto", "default", "unknown"]
ShapeT = TypeVar("ShapeT", bound=Artefact)


@dataclass(frozen=True)
class ResolvedSetting:
    """One value of resolved.yaml.

    Attributes:
        key: dotted key.
        text: the value as it is written in the file.
        value: the value without YAML's quotes.
        origin: source of the value.
        detail: file and line of a user's value, or the reason for another one.
    """

    key: str
    text: str
    value: str
    origin: Origin
    detail: str


@dataclass
class Artefacts:
    """All contents of a run directory that the page shows.

    Attributes:
        problems: damaged file → description of the damage.
        documents: the raw content of each JSON file, for functions that need it.
    """

    run: RunDir
    settings: list[ResolvedSetting] | None = None
    check: CheckRecord | None = None
    plan: PlanRecord | None = None
    passport: Passport | None = None
    batch_audit: BatchAudit | None = None
    dry_pass: DryPassRecord | None = None
    environment: EnvironmentRecord | None = None
    certificate: CertificateRecord | None = None
    summary: Summary | None = None
    checkpoints: CheckpointScores | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    documents: dict[Path, Any] = field(default_factory=dict)

    def value(self, key: str) -> str | None:
        """Return the resolved value at a dotted key; None if it is unknown or null."""
        resolved = next((setting.value for setting in self.settings or [] if setting.key == key), None)
        return None if resolved in ("null", "") else resolved

    def is_on(self, key: str) -> bool:
        """Return whether the boolean setting at a dotted key is true. `value` returns text, and the text "false" is
        truthy."""
        return self.value(key) == "true"

    def predictions(self, set_name: str, variant: str) -> list[PredictionRecord]:
        """Read the answers of `variant` to the prompts of a set, in the order of the file."""
        if not set_name.replace("_", "").replace("-", "").isalnum():
            return []  # no set has such a name, and it could be a path out of the run
        path = self.run.eval / set_name / f"{variant}.predictions.jsonl"
        return self._lines(path, PredictionRecord, ANSWER_LIMIT)

    def _json(self, path: Path, shape: type[ShapeT]) -> ShapeT | None:
        try:
            document = _cut(parse_json(redact(read_bytes(path).decode())), TEXT_LIMIT)
            record = shape.model_validate(document)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._damaged(path, error)
            return None
        self.documents[path] = document
        return record

    def _lines(self, path: Path, shape: type[ShapeT], limit: int = TEXT_LIMIT) -> list[ShapeT]:
        """Read the valid lines of a log; an incomplete last line after a crash is no damage."""
        records: list[ShapeT] = []
        bad_lines: list[str] = []
        try:
            with open_file(path) as file:
                for number, line in enumerate(file, start=1):
                    try:
                        records.append(shape.model_validate(_cut(parse_json(redact(line.decode().rstrip())), limit)))
                    except (ValueError, RecursionError) as error:
                        if line.endswith(b"\n"):
                            bad_lines.append(f"line {number} is skipped, {_reason(error)}")
        except FileNotFoundError:
            return []
        except OSError as error:
            bad_lines.append(_reason(error))
        if bad_lines:
            self._damaged(
                path, bad_lines[0] + (f"; {len(bad_lines) - 1} more lines are skipped" if len(bad_lines) > 1 else "")
            )
        return records

    def _settings(self) -> list[ResolvedSetting] | None:
        path = self.run.resolved
        try:
            return list(
                itertools.islice(read_settings(redact(read_bytes(path, SETTINGS_BYTES).decode())), MAX_SETTINGS)
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, yaml.YAMLError, ConfigError) as error:
            self._damaged(path, error)
            return None

    def _evaluations(self) -> list[Evaluation]:
        paths = sorted(path for path in self.run.eval.glob("*/*.json") if checkpoint_step(path.stem) is None)
        records = [self._json(path, Evaluation) for path in paths]
        return [evaluation for evaluation in records if evaluation is not None]

    def _damaged(self, path: Path, error: Exception | str) -> None:
        name = drop_surrogates(path.relative_to(self.run.path).as_posix())
        self.problems[name] = shorten_text(
            drop_surrogates(error if isinstance(error, str) else _reason(error)), TEXT_LIMIT
        )


def read_artefacts(run: RunDir) -> Artefacts:
    """Read everything except the predictions, which are large and read on demand."""
    artefacts = Artefacts(run)
    artefacts.settings = artefacts._settings()
    artefacts.check = artefacts._json(run.check, CheckRecord)
    artefacts.plan = artefacts._json(run.plan, PlanRecord)
    artefacts.passport = artefacts._json(run.passport, Passport)
    artefacts.batch_audit = artefacts._json(run.batch_audit, BatchAudit)
    artefacts.dry_pass = artefacts._json(run.dry_pass, DryPassRecord)
    artefacts.environment = artefacts._json(run.environment, EnvironmentRecord)
    artefacts.certificate = artefacts._json(run.certificate, CertificateRecord)
    artefacts.summary = artefacts._json(run.eval_summary, Summary)
    artefacts.checkpoints = artefacts._json(run.eval / "checkpoints.json", CheckpointScores)
    artefacts.evaluations = artefacts._evaluations()
    artefacts.events = sorted(artefacts._lines(run.events, Event), key=lambda event: event.time)
    artefacts.metrics = artefacts._lines(run.metrics, Metrics)
    return artefacts


def read_settings(text: str) -> Iterator[ResolvedSetting]:
    """Yield the values of a resolved.yaml, each with the comment at the end of its line.

    >>> [str((s.key, s.value, s.origin, s.detail)) for s in read_settings("train:\\n  seed: 7  # user run.yaml:3")]
    ["('train.seed', '7', 'user', 'run.yaml:3')"]
    """
    root = compose_yaml(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("contains no settings")

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[ResolvedSetting]:
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from walk(value, f"{dotted}.")
                continue
            end = value.end_mark.index
            raw = text[value.start_mark.index : end]
            plain_value = value.value if isinstance(value, yaml.ScalarNode) else raw
            origin, detail = _origin(text[end:].partition("\n")[0].partition("#")[2].strip())
            dotted, raw, plain_value, detail = (
                shorten_text(drop_surrogates(part), 200) for part in (dotted, raw, plain_value, detail)
            )
            yield ResolvedSetting(dotted, raw, plain_value, origin, detail)

    return walk(root, "")


def _origin(comment: str) -> tuple[Origin, str]:
    kind, _, detail = comment.partition(" ")
    match kind.rstrip(":"):
        case "user" | "--set" | "auto" | "default" as known:
            return known, detail
        case _:
            return "unknown", comment


def _cut(value: Any, limit: int) -> Any:
    """Return a JSON value with every text in it cleaned and shortened."""
    match value:
        case str():
            return shorten_text(drop_surrogates(value), limit)
        case list():
            return [_cut(item, limit) for item in value]
        case dict():
            return {shorten_text(drop_surrogates(key), NAME_LIMIT): _cut(item, limit) for key, item in value.items()}
        case _:
            return value


def _reason(error: Exception) -> str:
    """Describe in one line what is wrong with a file."""
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            location = ".".join(map(str, first["loc"])) or "the whole"
            and_more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            return f"not of the expected shape: {location}: {first['msg']}{and_more}"
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
