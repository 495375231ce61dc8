"""Typed results of the stages: the fields that matter, with figures for notebooks, and the whole document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from surefit.core import env
from surefit.core.rundir import RunDir, read_jsonl
from surefit.core.units import bytes_text, plural


@dataclass(frozen=True)
class FindingResult:
    """One finding of a rule; `surefit explain CODE` explains it."""

    code: str
    severity: str
    message: str
    help: str | None
    path: str | None
    line: int | None
    field: str | None

    def __str__(self) -> str:
        position = ":".join(str(part) for part in (self.path, self.line) if part)
        field_text = f" {self.field}:" if self.field else ""
        return f"{f'{position}: ' if position else ''}{self.severity}[{self.code}]{field_text} {self.message}"


@dataclass(frozen=True)
class CheckReport:
    """Findings of a check.

    Attributes:
        findings: the findings, errors first.
        rules: number of rules that had something to judge.
        document: the content of check.json.
    """

    findings: tuple[FindingResult, ...]
    rules: int
    document: dict[str, Any] = field(repr=False)

    @property
    def errors(self) -> tuple[FindingResult, ...]:
        """Findings that prevent `train` from starting."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def require_no_errors(self) -> None:
        """Raise if there are errors.

        Raises:
            CheckFailed: there are errors.
        """
        from surefit.stages.checking import require_no_errors

        require_no_errors(self.document)

    def _repr_html_(self) -> str:
        rows = [[f.severity, f.code, f.field or "", f.message, f.help or ""] for f in self.findings]
        title = plural(len(rows), "finding") if rows else "no problem found"
        return _table(f"{title} by {self.rules} rules", ["severity", "code", "field", "finding", "help"], rows)


@dataclass(frozen=True)
class Plan:
    """Predicted needs of a run.

    Attributes:
        verdict: "fits", "does not fit", "too close to call" or "unknown"; None where nothing could be estimated.
        low_bytes, high_bytes: range of the peak memory on the device, one process's share.
        total_seconds: time of the whole run; None where the device's speed is not known.
        disk_bytes: bytes that the run writes.
        does_not_fit: memory, disk or anything else that is short, each as a sentence.
        document: the content of plan.json.
    """

    verdict: str | None
    low_bytes: int | None
    high_bytes: int | None
    total_seconds: float | None
    disk_bytes: int | None
    does_not_fit: tuple[str, ...]
    document: dict[str, Any] = field(repr=False)

    @property
    def fits(self) -> bool:
        """Return whether nothing is known to be short."""
        return not self.does_not_fit

    def _repr_html_(self) -> str:
        from surefit.plan.plot import plan_svg

        if self.document["estimate"] and self.document["estimate"]["phases"]:
            return plan_svg(self.document)
        return _table("plan", ["", ""], [["verdict", str(self.verdict)], ["disk", _bytes(self.disk_bytes)]])


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        run: the run directory.
        output: directory of the adapter or the model; None after a dry run.
        steps: optimizer steps that were run, of `total_steps`.
        loss: loss of the last step in nats per supervised token.
        eval_loss: loss on the held-out rows after the last step.
        stopped_early: whether patience or a callback ended the run before its last step.
        document: the output of `surefit train --json`.
    """

    run: Path
    output: Path | None
    steps: int
    total_steps: int
    loss: float | None
    eval_loss: float | None
    stopped_early: bool
    document: dict[str, Any] = field(repr=False)

    def metrics(self) -> list[dict[str, Any]]:
        """Return every line of metrics.jsonl: the steps, and the evaluations (`kind: eval`)."""
        return list(read_jsonl(RunDir(self.run).metrics))

    def _repr_html_(self) -> str:
        points = (
            [(line["step"], line["loss"]) for line in self.metrics() if line.get("loss") is not None]
            if self.output
            else []
        )
        return _curve(f"loss of {self.run}", points)


@dataclass(frozen=True)
class Certificate:
    """Result of the proof that a merged model equals base + adapter.

    Attributes:
        merged: directory of the merged model.
        document: the content of certificate.json.
    """

    merged: Path
    passed: bool
    document: dict[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        rows = [[c["name"], str(c["value"]), c["comparison"], str(c["threshold"])] for c in self.document["checks"]]
        return _table(f"certificate {'passed' if self.passed else 'NOT passed'}", ["check", "value", "", "bound"], rows)


@dataclass(frozen=True)
class Scores:
    """Scores of the variants of a run's model.

    Attributes:
        metric: the primary metric.
        gate_passed: whether the gate passed; None where the config has no gate, and where the gate cannot tell.
        document: the content of eval/summary.json.
    """

    metric: str
    gate_passed: bool | None
    document: dict[str, Any] = field(repr=False)

    def of(self, variant: str, set_name: str = "eval") -> tuple[float, tuple[float, float]]:
        """Return the primary metric's mean and its 95 % interval."""
        scores = self.document["sets"][set_name]["variants"][variant][self.metric]
        return scores["mean"], tuple(scores["ci95"])

    def _repr_html_(self) -> str:
        rows = []
        for name, scored in self.document["sets"].items():
            for variant in scored["variants"]:
                mean, (low, high) = self.of(variant, name)
                rows.append([name, str(scored["n"]), variant, f"{mean:.3f} [{low:.3f}, {high:.3f}]"])
        return _table(f"{self.metric}, with 95 % intervals", ["set", "rows", "model", self.metric], rows)


@dataclass(frozen=True)
class Comparison:
    """Verdict whether B is better than A on the rows that both answered.

    Attributes:
        verdict: better, worse or undecided, for B.
        difference: B minus A on `metric`, with `ci95`, its 95 % interval.
        document: the output of `surefit compare --json`.
    """

    metric: str
    verdict: str
    difference: float
    ci95: tuple[float, float]
    document: dict[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        from surefit.evaluate.plot import draw_forest_plot

        return draw_forest_plot(self.document)


def _bytes(size: int | None) -> str:
    return bytes_text(size) if size is not None else "unknown"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(env.redact(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _curve(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Draw a line through points as SVG."""
    from surefit.core.svg import WIDTH, document

    if len(points) < 2:
        return _table(title, [], [])
    (x0, *_, x1), values = [x for x, _ in points], [y for _, y in points]
    low, high = min(values), max(values)
    x_scale, y_scale = (WIDTH - 100) / (x1 - x0), 160 / (high - low or 1)
    path = " ".join(f"{80 + (x - x0) * x_scale:.1f},{230 - (y - low) * y_scale:.1f}" for x, y in points)
    labels = [(70, 234, f"{low:.3f}", "end"), (70, 74, f"{high:.3f}", "end"), (80, 252, f"step {x0}", "start"),
              (WIDTH - 20, 252, f"step {x1}", "end")]  # fmt: skip
    texts = [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#555555">{text}</text>' for x, y, text, anchor in labels
    ]
    return document(title, 264, [f'<polyline points="{path}" fill="none" stroke="#0072b2" stroke-width="2"/>', *texts])
