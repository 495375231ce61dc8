"""Writes report.html: one page that needs no network, made from the existing artefacts.

The functions in this directory turn artefacts into plain values; `page.html.j2` renders them. The template escapes
everything that a user or a model wrote, and a content security policy with the hashes of SureFit's own scripts prevents
the page from loading or running anything else even if the escaping should fail.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from surefit import __version__
from surefit.core.rundir import RunDir, write_atomic
from surefit.core.units import bytes_text, count_text, duration_text
from surefit.facts.free_text import LIKELIHOOD_BESIDE_ANSWER
from surefit.report import scores, text
from surefit.report.actual import PlanComparison, compare_plan_with_run, percent_off
from surefit.report.artefacts import Artefacts, ResolvedSetting, read_artefacts
from surefit.report.certified import CheckGroup, describe_certificate, group_checks
from surefit.report.checkpoints import CheckpointsView, build_checkpoints_view
from surefit.report.curves import Chart, Mark, TrainingCurves, build_training_curves
from surefit.report.examples import KINDS, ComparedAnswers, ComparedSet, select_compared_sets
from surefit.report.next_steps import list_next_steps
from surefit.report.reproduce import Reproduction, reproduction
from surefit.report.shapes import FindingRecord
from surefit.report.ship import ShipDecision, decide_shipping
from surefit.report.timeline import STAGES, Attempt, attempts, last_attempt
from surefit.report.verdict import Effect, Verdict, describe_training, judge_run, measure_effects

HERE = Path(__file__).parent
CHART_SCRIPTS = ("vendor/uplot/uPlot.iife.min.js", "page.js")
ARTEFACT_OF = {
    "check": "check.json",
    "plan": "plan.json",
    "train": "metrics.jsonl",
    "merge": "certificate.json",
    "evaluate": "eval/",
}
SAMPLES, LOST_SAMPLES = 5, 3
"""Number of examples that are shown open, and of those among them that got worse if others did not."""
SAMPLE_ORDER = ("lost", "wrong", "won", "right")
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Page:
    """Values for the page's template."""

    name: str
    written: float
    found: Artefacts
    verdict: Verdict
    ship: ShipDecision
    facts: list[tuple[str, str]]
    effects: list[Effect]
    sets: list[scores.SetScores]
    checkpoints: CheckpointsView | None
    examples: list[ComparedSet]
    samples: list[tuple[ComparedSet, ComparedAnswers]]
    next_steps: list[tuple[str, str]]
    certified: list[CheckGroup]
    certificate: list[str]
    actual: PlanComparison
    training: TrainingCurves | None
    findings: list[FindingRecord]
    origins: dict[str, int]
    chosen: list[ResolvedSetting]
    defaults: list[ResolvedSetting]
    attempts: list[Attempt]
    absent: dict[str, str]
    reproduction: Reproduction


def build_report(run: RunDir) -> Path:
    """Write the page for the existing artefacts of `run`, and return its path.

    Raises:
        MachineError: the page cannot be written.
    """
    write_atomic(run.report, render_page(build_page(read_artefacts(run))))
    return run.report


def build_page(found: Artefacts) -> Page:
    """Build the template's values from the artefacts."""
    curves = build_training_curves(found.metrics, found.events)
    stage_attempts = attempts(found.events)
    sets = scores.set_scores(found)
    effects = measure_effects(sets)
    ship = decide_shipping(found, effects, sets)
    examples = select_compared_sets(found, sets)
    settings = found.settings or []
    return Page(
        name=text.drop_surrogates(Path(found.value("output_dir") or found.run.path).name) or "run",
        written=time.time(),
        found=found,
        verdict=judge_run(found, curves, effects, stage_attempts),
        ship=ship,
        facts=describe_training(found, curves, sets),
        effects=effects,
        sets=sets,
        checkpoints=build_checkpoints_view(found),
        examples=examples,
        samples=pick_samples(examples),
        next_steps=list_next_steps(found, ship, effects, stage_attempts),
        certified=group_checks(found.certificate) if found.certificate else [],
        certificate=describe_certificate(found.certificate) if found.certificate else [],
        actual=compare_plan_with_run(found, curves, stage_attempts),
        training=curves,
        findings=sorted(found.check.findings, key=lambda f: SEVERITIES.index(f.severity)) if found.check else [],
        origins=Counter(setting.origin for setting in settings),
        chosen=[setting for setting in settings if setting.origin != "default"],
        defaults=[setting for setting in settings if setting.origin == "default"],
        attempts=stage_attempts,
        absent={stage: _absent(stage, found, stage_attempts) for stage in STAGES},
        reproduction=reproduction(found),
    )


def pick_samples(groups: Sequence[ComparedSet]) -> list[tuple[ComparedSet, ComparedAnswers]]:
    """Pick the examples that are shown open: the largest losses first, and if there are others, some of those."""
    by_kind: dict[str, list[tuple[ComparedSet, ComparedAnswers]]] = {kind: [] for kind in SAMPLE_ORDER}
    for group in groups:
        for example in group.shown:
            by_kind[example.kind].append((group, example))
    lost = sorted(by_kind["lost"], key=lambda sample: sample[1].tuned_score - sample[1].base_score)
    others = itertools.zip_longest(by_kind["won"], by_kind["wrong"], lost[LOST_SAMPLES:])
    in_turn = [sample for column in others for sample in column if sample is not None]
    picked = [*lost[:LOST_SAMPLES], *in_turn, *by_kind["right"]][:SAMPLES]
    return sorted(picked, key=lambda sample: SAMPLE_ORDER.index(sample[1].kind))


def _absent(stage: str, found: Artefacts, tries: Sequence[Attempt]) -> str:
    """Explain why a stage has nothing to show."""
    artefact = ARTEFACT_OF[stage]
    if damaged := [name for name in found.problems if name.startswith(artefact)]:
        return f"{damaged[0]} is damaged: {found.problems[damaged[0]]}."
    attempt = last_attempt(tries, stage)
    if attempt is None:
        return f"The {stage} stage has not run."
    match attempt.outcome:
        case "finished":
            return f"The {stage} stage finished, but {artefact} is not in the run directory."
        case "failed":
            return f"The {stage} stage failed: {attempt.detail.rstrip('.') or 'no reason is recorded'}."
        case "interrupted":
            return f"The {stage} stage was interrupted before it wrote any results."
        case _:
            return f"The {stage} stage was started, but has no recorded end: it is still running, or it was killed."


def render_page(page: Page) -> str:
    """Render the page as HTML."""
    training = page.training
    data = chart_data(training.charts, training.marks) if training and training.charts else None
    scripts = ["fold.js", *(CHART_SCRIPTS if data else ()), *(["examples.js"] if page.examples else ())]
    return render_template("page.html.j2", scripts, data, page=page, found=page.found, kinds=KINDS)


def render_template(template: str, scripts: Sequence[str], data: object, **values: object) -> str:
    """Render a template of this directory with SureFit's styles and the given scripts.

    Args:
        template: name of the template.
        scripts: file names in this directory; a content security policy forbids all others.
        data: data for the scripts, if any.
        values: values for the template.
    """
    sources = [asset(name) for name in scripts]
    return (
        environment()
        .get_template(template)
        .render(
            styles=[*([asset("vendor/uplot/uPlot.min.css")] if data else []), asset("page.css")],
            scripts=sources,
            policy=_policy(sources),
            licence=asset("vendor/uplot/LICENSE"),
            data=data,
            version=__version__,
            **values,
        )
    )


@cache
def environment() -> Environment:
    """Build the Jinja environment with escaping always on, and this directory's filters."""
    jinja = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(
        bytes=bytes_text,
        count=count_text,
        duration=duration_text,
        percent=text.percent,
        points=text.points,
        signed=text.signed,
        words=text.readable_metric,
        ticked=text.ticked,
        utc=text.utc,
        evidence=_evidence,
        place=_place,
        value=text.format_value,
        embed=embed_json,
        look=scores.variant_style,
        off_by=percent_off,
        quantity=text.quantity,
    )
    jinja.globals["beside_answer"] = LIKELIHOOD_BESIDE_ANSWER
    return jinja


def chart_data(charts: Sequence[Chart], marks: Sequence[Mark]) -> dict[str, object]:
    """Return the data for the page's script."""
    return {"charts": [chart.data() for chart in charts], "marks": [asdict(mark) for mark in marks]}


def embed_json(value: object) -> Markup:
    """Encode JSON for a script element: no character in it can end the element or begin a comment.

    >>> str(embed_json("</script>"))
    '"\\\\u003c/script\\\\u003e"'
    """
    encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return Markup(encoded)


def _policy(scripts: Sequence[Markup]) -> str:
    """Return a content security policy: no network, styles in the page, and only these scripts."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def asset(name: str) -> Markup:
    """Read a file of this directory for embedding in the page."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _evidence(value: object) -> str:
    """Return a finding's evidence as one short text."""
    return text.shorten_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 400)


def _place(finding: FindingRecord) -> str:
    """Return `file:line field`, with the parts that are known."""
    location = f"{finding.path or ''}{f':{finding.line}' if finding.line is not None else ''}".lstrip(":")
    return " ".join(part for part in (location, finding.field) if part)
