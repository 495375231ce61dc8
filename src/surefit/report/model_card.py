"""The model card of an export: what the model is for, how it was made, how good it is and where it is not.

Made of the run's artefacts alone. It leaves this machine, so it holds no directory, no secret and no row of the data:
settings that name places are reduced to names, and the finished text is cleaned once more.
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
"""Settings that are about the place of training and not about the model."""
RELATIONS, LIBRARIES = {"hub": "finetune", "adapter": "adapter"}, {"gguf": "gguf", "adapter": "peft"}
"""Format of an export → how the hub calls what it is to its base, and what loads it; else quantized, transformers."""


@dataclass(frozen=True)
class CardContext:
    """What the run directory does not tell.

    Attributes:
        name: of the model.
        recipe: its task.
        base: the base's id on the hub; None where it is not there.
        base_name: what it is called, wherever it is.
        license: as the base's own card or config has it.
        datasets: ids on the hub that it was trained on.
        format: of the export; `hub` for the weights as they are.
        gguf: of a base that was made from a GGUF file, what was made of which.
        score: of the export itself, where it was asked for: `estimates` of evaluate/summary.py.
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
    """What the template draws."""

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


def render_model_card(run: RunDir, about: CardContext, certificate: Mapping[str, Any], directory: Path) -> str:
    """The card as Markdown with YAML front matter.

    Args:
        directory: the export's files, from which the commands that serve it follow.
        certificate: of the export: the run's own, or that of a conversion with the run's under "merge".
    """
    found = read_artefacts(run)
    commands, notes = card_commands(directory, about.base if about.base and not about.gguf else "BASE")
    own = certificate if certificate.get("against") == "merged" else None
    sets = scores.set_scores(found)
    trained = build_training_curves(found.metrics, found.events)
    card = ModelCard(
        about=about,
        front=yaml.safe_dump(front_matter(found, about, sets), sort_keys=False, allow_unicode=True, width=110),
        found=found,
        verdict=judge_run(found, trained, measure_effects(sets), attempts(found.events)),
        sets=sets,
        training=trained,
        compared=list_planned_and_actual(found, trained),
        certificate=CertificateRecord.model_validate(certificate["merge"] if own else certificate),
        own=own,
        limitations=limitations(found, about, sets, own),
        settings=[(s.key, _name(s.value)) for s in found.settings or [] if not s.key.startswith(PRIVATE)],
        adapter=found.value("train.method") or "lora",
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
    """A name or a value of the run beside our own Markdown: the hub shows HTML that stands in it."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Without secrets, and without the directories of this machine."""
    for place in (Path.cwd(), Path.home()):
        if len(place.parts) > 1:
            text = text.replace(f"{place}/", "")
    return redact(without_paths(text))


def front_matter(found: Artefacts, about: CardContext, sets: list[SetScores]) -> dict[str, Any]:
    """The metadata that the hub reads: https://huggingface.co/docs/hub/model-cards."""
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
    metrics = [row.metric for each in sets[:1] for row in each.rows]
    if metrics:
        front["metrics"] = metrics
        results = [_result(about, each) for each in sets if each.tuned]
        front["model-index"] = [{"name": about.name, "results": results}]
    return front


def _result(about: CardContext, each: SetScores) -> dict[str, Any]:
    """One set of model-index, which has no field for an interval: it stands in the metric's name."""
    found = []
    for row in each.rows:
        score = row.scores.get(each.tuned or "")
        if score is not None:
            span = f" (95 % interval {_number(score.ci95[0])} to {_number(score.ci95[1])})" if score.ci95 else ""
            found.append({"type": row.metric, "value": round(score.mean, 4), "name": f"{row.metric}{span}"})
    name = "held-out rows" if each.name == HELD_OUT else each.name
    rows = f", {plural(each.n, 'row')}" if each.n else ""
    return {
        "task": {"type": "text-generation", "name": about.recipe.name},
        "dataset": {"type": each.name, "name": f"{name}{rows}"},
        "metrics": found,
    }


def list_planned_and_actual(found: Artefacts, trained: TrainingCurves | None) -> list[tuple[str, str, str]]:
    """(what, as planned, as it was), of everything that is known of both."""
    lines: list[tuple[str, str, str]] = []
    plan, steps = found.plan, [line for line in found.metrics if line.eval_loss is None]
    if plan is None or not steps:
        return lines
    planned = plan.steps.total_steps
    if planned:
        lines.append(("optimizer steps", f"{planned:,}", f"{max(line.step for line in steps):,}"))
    parts = plan.time.parts if plan.time else None
    spent = sum(line.seconds or 0.0 for line in steps)
    if parts and spent and parts.get("steps"):
        lines.append(("time in steps", duration_text(parts["steps"]), duration_text(spent)))
    peak = max((line.memory_bytes or 0 for line in steps), default=0)
    if plan.estimate and peak:
        low, high = plan.estimate.low_bytes, plan.estimate.high_bytes
        lines.append(("peak memory", f"{bytes_text(low)} to {bytes_text(high)}", bytes_text(peak)))
    return lines


def limitations(
    found: Artefacts, about: CardContext, sets: list[SetScores], own: Mapping[str, Any] | None
) -> list[str]:
    """What the facts say against the model."""
    lines = []
    for each in sets:
        lines += _about_answers(each)
    for change in measure_effects(sets):
        if change.comparison and change.comparison.ci95[1] < 0:
            low, high = change.comparison.ci95
            lines.append(
                f"Training made it worse on `{change.set}`: {change.metric} {_points(change.comparison.difference)} "
                f"[{_points(low)}, {_points(high)}] points against the base."
            )
        elif change.comparison and change.tone == "neutral":
            lines.append(f"On `{change.set}` it cannot be told from the base: the interval of the difference holds 0.")
    if about.recipe.chance_level > 0:
        lines.append(f"An answer drawn at random reaches {_number(about.recipe.chance_level)} of "
                     f"{about.recipe.primary_metric}.")  # fmt: skip
    if not sets:
        lines.append("It has not been scored: nobody knows whether training helped.")
    elif HELD_OUT not in {each.name for each in sets}:
        lines.append("It has not been scored on held-out rows of its own task.")
    if found.summary and found.summary.gate and not found.summary.gate.passed:
        what = "The gate that its makers set cannot tell" if found.summary.gate.undecided else (
            "It did not pass the gate that its makers set"
        )  # fmt: skip
        lines.append(f"{what}: {found.summary.gate.reason}.")
    if own is not None:
        share = own["measured"]["top1_agreement"]
        scored = "" if about.score else " Its task metric was not measured after the conversion."
        lines.append(
            "The table under *Scores* is of the merged model. These weights are a conversion, which agrees with it "
            f"in {100 * share:.1f} % of the next tokens.{scored}"
        )
    lines.append("Scores are of one task, in the form of its rows: they say nothing about other uses, languages or "
                 "about safety, which were not measured.")  # fmt: skip
    return lines


def _about_answers(each: SetScores) -> list[str]:
    evaluation: Evaluation | None = each.evaluations.get(each.tuned or "")
    if evaluation is None or not evaluation.n:
        return []
    lines = []
    if evaluation.truncated:
        limit = evaluation.decoding.max_new_tokens
        at = f" of {limit:,} new tokens" if limit else ""
        lines.append(f"On `{each.name}`, {evaluation.truncated:,} of {evaluation.n:,} answers were cut off by the "
                     f"limit{at}, and count as wrong.")  # fmt: skip
    if evaluation.unparsed:
        lines.append(f"On `{each.name}`, {evaluation.unparsed:,} of {evaluation.n:,} answers could not be parsed.")
    return lines


def _name(value: str) -> str:
    """Of a path, whatever it holds, the name at its end; anything else as it is."""
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
    """A value in a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join((f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text).split()).replace("|", "\\|")
