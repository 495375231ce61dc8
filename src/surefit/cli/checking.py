"""The verbs before a run: check and plan. Torch-free, but for the tokenizer that `check --show` needs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from surefit import __version__
from surefit.cli.prepare import Gathered, Prepared
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, SureFitError
from surefit.core.units import bytes_text, duration_text, plural

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.config.schema import Config

SAMPLED_ROWS = 500
"""Rows that `check` converts: enough for a systematic fault, and little of its two seconds."""


def check(out: Output, found: Gathered, show: int = 0) -> int:
    """Every finding at once; with `show`, what the first examples look like to the loss."""
    report = checked(found)
    out.findings(report["findings"])
    errors = _count(report, "error")
    warnings = _count(report, "warning")
    if show:
        _show_examples(out, found, show)
    where = str(found.loaded.path)
    if not errors and not warnings:
        out.say(f"{where}: no problem found by {report['rules']} rules in {duration_text(report['seconds'])}", "green")
    else:
        out.say(f"{where}: {plural(errors, 'error')}, {plural(warnings, 'warning')}")
    for line in _not_looked_at(found, report):
        out.note(line)
    out.result(report)
    return EXIT_FINDINGS if errors else EXIT_OK


def checked(found: Gathered) -> dict[str, Any]:
    """The content of check.json."""
    from surefit.facts.dataset import dataset_facts
    from surefit.facts.environment import environment_facts
    from surefit.facts.setup import setup_of
    from surefit.lint.engine import run_rules
    from surefit.lint.rule import LintContext

    start = time.monotonic()
    loaded, recipe, rows = found.loaded, found.recipe, found.rows
    columns = recipe.columns if recipe else ()
    dataset = dataset_facts(rows.source, rows, rows.where, expected=columns) if rows else None
    context = LintContext(
        config=loaded.config,
        path=loaded.path,
        lines=loaded.lines,
        overridden=loaded.overridden,
        setup=setup_of(loaded.config, found.resolved),
        resolved=found.resolved,
        model=found.model,
        hardware=found.hardware,
        dataset=dataset,
        environment=environment_facts(),
        columns=columns,
        problems=(*found.problems, *_row_problems(found), *_scored_problems(found)),
    )
    result = run_rules(context)
    return {"surefit": __version__, "seconds": time.monotonic() - start, **result.as_dict()}


def _row_problems(found: Gathered) -> list[SureFitError]:
    """What converting a sample of the rows runs into."""
    from surefit.data.formats import to_examples

    if found.rows is None or found.recipe is None:
        return []
    section = found.loaded.config.data
    try:
        to_examples(found.rows.sample(SAMPLED_ROWS), found.recipe, section.format, section.bad_rows)
    except SureFitError as error:
        return [error]
    return []


def _scored_sources(config: Config) -> dict[str, str]:
    """The sets that are scored, by config key: another file of held-out rows, and those of `evaluate.also`."""
    held_out = {"data.eval": config.data.eval} if isinstance(config.data.eval, str) else {}
    return held_out | {f"evaluate.also.{name}": source for name, source in config.evaluate.also.items()}


def _scored_problems(found: Gathered) -> list[SureFitError]:
    """What reading those sets, where they are on this machine, and converting a sample of them runs into."""
    from surefit.data.formats import load_held_out, to_examples
    from surefit.data.load import is_local

    problems: list[SureFitError] = []
    section = found.loaded.config.data
    for key, source in _scored_sources(found.loaded.config).items():
        if not is_local(source):
            continue
        try:
            rows = load_held_out(source, section.split, found.rows if key == "data.eval" else None)
            if found.recipe is not None:
                to_examples(rows.sample(SAMPLED_ROWS), found.recipe, section.format, section.bad_rows)
        except SureFitError as error:
            error.field = error.field or key
            problems.append(error)
    return problems


def _not_looked_at(found: Gathered, report: dict[str, Any]) -> list[str]:
    """What a clean check does not speak for."""
    from surefit.data.load import is_local

    notes = []
    config = found.loaded.config
    on_hub = [text for text in (config.data.train, *_scored_sources(config).values()) if not is_local(text)]
    if on_hub:
        notes.append(f"not looked at: the rows of {', '.join(on_hub)} (on the hub)")
    if found.rows is not None and len(found.rows) > SAMPLED_ROWS:
        notes.append(f"looked at {SAMPLED_ROWS} of {len(found.rows):,} rows")
    if report["skipped"]:
        notes.append(f"rules that lacked facts: {', '.join(sorted(report['skipped']))}")
    return notes


def _show_examples(out: Output, found: Gathered, count: int) -> None:
    from surefit.data.formats import to_examples
    from surefit.data.show import segments
    from surefit.model.load import load_tokenizer

    if found.rows is None or found.recipe is None:
        raise ConfigError("there are no local rows to show", field="data.train", help="name a file of rows")
    tokenizer = load_tokenizer(found.loaded.config.model)
    section = found.loaded.config.data
    examples = to_examples(found.rows.sample(count), found.recipe, section.format, section.bad_rows)
    for example, where in zip(examples, examples.where, strict=True):
        out.heading(f"{where}: the loss falls on the marked text")
        out.segments(segments(example, tokenizer))


def plan(out: Output, run: Prepared) -> int:
    """The static terms of memory and disk, and what they leave out."""
    planned = planned_run(run)
    device = planned["device"]
    memory = bytes_text(device["memory_bytes"]) if device["memory_bytes"] else "unknown"
    out.say(f"{planned['model']['name']} on {device['name']} ({memory} of memory, {device['source']})", "bold")
    for key, title in (("memory", "Memory, the terms that are known"), ("disk", "Disk")):
        rows = [[term["term"], bytes_text(term["bytes"]), term["why"]] for term in planned[key]]
        if planned[f"{key}_total_bytes"] is not None:
            rows.append(["at least" if key == "memory" else "total", bytes_text(planned[f"{key}_total_bytes"]), ""])
        out.table(title, ["term", "size", "why"], rows)
    steps = planned["steps"]
    out.say(
        f"{steps['total_steps'] or 'an unknown number of'} optimizer steps of {steps['global_batch_size']} examples "
        f"({steps['per_device_train_batch_size']} per micro batch × {steps['gradient_accumulation_steps']})"
    )
    out.say("Not counted yet: " + "; ".join(planned["left_out"]))
    for text in planned["does_not_fit"]:
        out.say(f"Does not fit: {text}", "bold red")
    out.result(planned)
    return EXIT_FINDINGS if planned["does_not_fit"] else EXIT_OK


def planned_run(run: Prepared) -> dict[str, Any]:
    """The content of plan.json."""
    from surefit.plan.static import static_plan

    return static_plan(run.resolved, run.model, run.hardware, len(run.rows) if run.rows is not None else None)


def _count(report: dict[str, Any], severity: str) -> int:
    return sum(finding["severity"] == severity for finding in report["findings"])
