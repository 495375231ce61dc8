"""The model card of an export: purpose, training, scores and limitations of the model.

It is made from the run's artefacts alone. It is published, so it contains no directory, no secret and no row of the
data: paths in settings are reduced to names, and the finished text is redacted once more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from surefit import __version__
from surefit.core.env import redact
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text, count_text, duration_text, plural, without_paths
from surefit.evaluate.answers import BASELINE
from surefit.merge.origin import GgufOrigin
from surefit.merge.serving import card_commands
from surefit.report import scores
from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.curves import TrainingCurves, build_training_curves
from surefit.report.scores import HELD_OUT, SetScores
from surefit.report.shapes import CertificateRecord, Evaluation
from surefit.report.text import readable_metric
from surefit.report.timeline import attempts
from surefit.report.verdict import Verdict, judge_run, measure_effects
from surefit.task import TaskRecipe

HERE = Path(__file__).parent
PRIVATE = ("output_dir", "telemetry.", "hardware.", "evaluate.server", "annotations.")
"""Prefixes of settings that concern the machine and not the model."""
RELATIONS, LIBRARIES = {"hub": "finetune", "adapter": "adapter"}, {"gguf": "gguf", "adapter": "peft"}
"""Export format → the hub's name for its relation to the base, and for the library that loads it; by default quantized
and transformers."""


@dataclass(frozen=True)
class CardContext:
    """Facts about the export that the run directory does not contain.

    Attributes:
        name: name of the model.
        recipe: its task.
        base: the base's id on the hub; None if it is not on the hub.
        base_name: public name of the base.
        license: license in the base's own card or config.
        datasets: hub ids of the training data.
        format: export format; `hub` for the unconverted weights.
        gguf: the GGUF file that the base was converted from, if any.
        score: estimates for the export itself, if it was scored (`compute_estimates` of evaluate/estimates.py).
    """

    name: str
    recipe: TaskRecipe
    base: str | None
    base_name: str
    license: str | None
    datasets: list[str]
    format: str
    score: Mapping[str, Any] | None = None
    gguf: GgufOrigin | None = None


@dataclass(frozen=True)
class ModelCard:
    """Values for the card's template."""

    about: CardContext
    front: str
    found: Artefacts
    verdict: Verdict
    sets: list[SetScores]
    training: TrainingCurves | None
    compared: list[tuple[str, str, str]]
    certificate: CertificateRecord
    own: Mapping[str, Any] | None
    limitations: list[str]
    settings: list[tuple[str, str]]
    adapter: str
    commands: dict[str, list[str]]
    notes: list[str]
    version: str = __version__

    @property
    def primary_metric(self) -> str:
        """Return the metric that decides on the held-out rows; the recipe's where nothing was scored."""
        return scores.primary_metric(self.found) or self.about.recipe.primary_metric


def render_model_card(run: RunDir, about: CardContext, certificate: Mapping[str, Any], directory: Path) -> str:
    """Render the card as Markdown with YAML front matter.

    Args:
        directory: directory of the export, which determines the serving commands.
        certificate: certificate of the export: the run's own, or a conversion's, with the run's under "merge".
    """
    artefacts = read_artefacts(run)
    commands, notes = card_commands(directory, about.base if about.base and not about.gguf else "BASE")
    conversion = certificate if certificate.get("against") == "merged" else None
    sets = scores.set_scores(artefacts)
    curves = build_training_curves(artefacts.metrics, artefacts.events)
    card = ModelCard(
        about=about,
        front=yaml.safe_dump(front_matter(artefacts, about, sets), sort_keys=False, allow_unicode=True, width=110),
        found=artefacts,
        verdict=judge_run(artefacts, curves, measure_effects(sets), attempts(artefacts.events)),
        sets=sets,
        training=curves,
        compared=list_planned_and_actual(artefacts, curves),
        certificate=CertificateRecord.model_validate(certificate["merge"] if conversion else certificate),
        own=conversion,
        limitations=limitations(artefacts, about, sets, conversion),
        settings=[(s.key, _name(s.value)) for s in artefacts.settings or [] if not s.key.startswith(PRIVATE)],
        adapter=artefacts.value("train.method") or "lora",
        commands=commands,
        notes=notes,
    )
    environment = Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
        finalize=_without_tags,
    )
    environment.filters |= {
        "figure": _figure,
        "cell": _cell,
        "bytes_text": bytes_text,
        "words": readable_metric,
        "name": _name,
    }
    environment.globals["BASELINE"] = BASELINE
    return redact_text(environment.get_template("model_card.md.j2").render(card=card))


def _without_tags(value: Any) -> Any:
    """Escape HTML tags in a value of the run: the hub renders HTML in Markdown."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Remove secrets and the directories of this machine."""
    for directory in (Path.cwd(), Path.home()):
        if len(directory.parts) > 1:
            text = text.replace(f"{directory}/", "")
    return redact(without_paths(text))


def front_matter(found: Artefacts, about: CardContext, sets: list[SetScores]) -> dict[str, Any]:
    """Build the metadata that the hub reads: https://huggingface.co/docs/hub/model-cards."""
    front: dict[str, Any] = {}
    if about.base:
        front |= {"base_model": about.base, "base_model_relation": RELATIONS.get(about.format, "quantized")}
    library = LIBRARIES.get(about.format, "transformers")
    front |= {"library_name": library, "pipeline_tag": "text-generation"}
    if about.license:
        front["license"] = about.license
    tasks = [name.replace("_", "-") for name in about.recipe.parts or [about.recipe.name]]
    front["tags"] = ["surefit", *tasks, *([about.format] if about.format != "hub" else [])]
    if about.datasets:
        front["datasets"] = about.datasets
    metrics = [row.metric for set_scores in sets[:1] for row in set_scores.rows]
    if metrics:
        front["metrics"] = metrics
        results = [_result(about, set_scores) for set_scores in sets if set_scores.tuned]
        front["model-index"] = [{"name": about.name, "results": results}]
    return front


def _result(about: CardContext, each: SetScores) -> dict[str, Any]:
    """Build the model-index entry of one set; it has no field for an interval, so the metric's name contains it."""
    metrics = []
    for row in each.rows:
        score = row.scores.get(each.tuned or "")
        if score is not None:
            span = f" (95 % interval {_number(score.ci95[0])} to {_number(score.ci95[1])})" if score.ci95 else ""
            metrics.append({"type": row.metric, "value": round(score.mean, 4), "name": f"{row.metric}{span}"})
    name = "held-out rows" if each.name == HELD_OUT else each.name
    rows = f", {plural(each.n, 'row')}" if each.n else ""
    return {
        "task": {"type": "text-generation", "name": about.recipe.name},
        "dataset": {"type": each.name, "name": f"{name}{rows}"},
        "metrics": metrics,
    }


def list_planned_and_actual(found: Artefacts, trained: TrainingCurves | None) -> list[tuple[str, str, str]]:
    """Return (quantity, planned, actual) for everything with both values."""
    lines: list[tuple[str, str, str]] = []
    plan, steps = found.plan, [line for line in found.metrics if line.eval_loss is None]
    if plan is None or not steps:
        return lines
    planned = plan.steps.total_steps
    if planned:
        lines.append(("optimizer steps", f"{planned:,}", f"{max(line.step for line in steps):,}"))
    parts = plan.time.parts if plan.time else None
    step_seconds = sum(line.seconds or 0.0 for line in steps)
    if parts and step_seconds and parts.get("steps"):
        lines.append(("time in steps", duration_text(parts["steps"]), duration_text(step_seconds)))
    peak = max((line.memory_bytes or 0 for line in steps), default=0)
    if plan.estimate and peak:
        low, high = plan.estimate.low_bytes, plan.estimate.high_bytes
        lines.append(("peak memory", f"{bytes_text(low)} to {bytes_text(high)}", bytes_text(peak)))
    return lines


def limitations(
    found: Artefacts, about: CardContext, sets: list[SetScores], own: Mapping[str, Any] | None
) -> list[str]:
    """List the model's limitations that the artefacts show."""
    lines = []
    for set_scores in sets:
        lines += _about_answers(set_scores)
    for change in measure_effects(sets):
        if change.fit and (change.beside or (change.fit_decides and change.tone != "good")):
            lines.append(f"On `{change.set}`: {change.fit.headline[:1].lower()}{change.fit.headline[1:]} "
                         f"({change.fit.loss_text}).")  # fmt: skip
        elif change.comparison and change.comparison.ci95[1] < 0:
            low, high = change.comparison.ci95
            lines.append(
                f"Training lowered the score on `{change.set}`: {change.metric} "
                f"{_points(change.comparison.difference)} [{_points(low)}, {_points(high)}] points from the base."
            )
        elif change.comparison and change.tone == "neutral":
            lines.append(f"On `{change.set}` it shows no clear difference from the base: the interval contains 0.")
    if about.recipe.chance_level > 0:
        lines.append(f"A random answer scores {_number(about.recipe.chance_level)} of "
                     f"{about.recipe.primary_metric}.")  # fmt: skip
    if not sets:
        lines.append("It has not been scored, so it is unknown whether training helped.")
    elif HELD_OUT not in {set_scores.name for set_scores in sets}:
        lines.append("It has not been scored on held-out rows of its own task.")
    if found.summary and found.summary.gate and not found.summary.gate.passed:
        outcome = "Its score gate is undecided" if found.summary.gate.undecided else (
            "It did not pass its score gate"
        )  # fmt: skip
        lines.append(f"{outcome}: {found.summary.gate.reason}.")
    if own is not None:
        share = own["measured"]["top1_agreement"]
        score_note = "" if about.score else " Its task metric was not measured after the conversion."
        lines.append(
            "The table under *Scores* is for the merged model. These weights are a conversion, which predicts the same "
            f"next token in {100 * share:.1f} % of cases.{score_note}"
        )
    lines.append("The scores cover one task in one format: other uses, other languages and safety "
                 "were not measured.")  # fmt: skip
    return lines


def _about_answers(each: SetScores) -> list[str]:
    evaluation: Evaluation | None = each.evaluations.get(each.tuned or "")
    if evaluation is None or not evaluation.n:
        return []
    lines = []
    if evaluation.truncated:
        limit = evaluation.decoding.max_new_tokens
        at = f" of {limit:,} new tokens" if limit else ""
        lines.append(f"On `{each.name}`, {evaluation.truncated:,} of {evaluation.n:,} answers were truncated at the "
                         f"limit{at} and count as wrong.")  # fmt: skip
    if evaluation.unparsed:
        lines.append(f"On `{each.name}`, {evaluation.unparsed:,} of {evaluation.n:,} answers could not be parsed.")
    return lines


def _name(value: str) -> str:
    """Return the last component of a path; any other value unchanged."""
    return Path(value).name if value.startswith(("/", "~", "./", "../")) else value


def _figure(score: Any) -> str:
    if score is None:
        return "–"
    span = f" [{_number(score.ci95[0])}, {_number(score.ci95[1])}]" if score.ci95 else ""
    return f"{_number(score.mean)}{span}"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else count_text(value)


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _cell(value: Any) -> str:
    """Format a value for a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join((f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text).split()).replace("|", "\\|")
