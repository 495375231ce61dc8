"""The verb `runs show`: one run, read from its artefacts alone."""

from __future__ import annotations

from typing import Any

from surefit.cli.exits import verb
from surefit.cli.intervals import interval_text
from surefit.cli.options import RunPath
from surefit.cli.render import Output
from surefit.cli.runs.run_facts import newest_checkpoint, read_primary_scores, require_run
from surefit.cli.runs.summary import disk_usage, read_or_default, summarize_runs
from surefit.core.errors import EXIT_OK
from surefit.core.rundir import RunDir, read_jsonl
from surefit.core.units import bytes_text, duration_text, plural, shell_quote


@verb
def show(out: Output, run: RunPath) -> int:
    """Show one run: settings, stages, scores, disk use, and the stages that can be continued."""
    from surefit.report.artefacts import read_artefacts
    from surefit.report.timeline import attempts

    directory = require_run(run)
    (row,) = summarize_runs([directory])
    artefacts = read_artefacts(directory)
    settings = [
        (s.key, s.value, f"{'auto:' if s.origin == 'auto' and s.detail else s.origin} {s.detail}".strip())
        for s in artefacts.settings or []
        if s.origin != "default"
    ]
    stages = attempts(artefacts.events)
    resumable = describe_next_steps(directory, row)
    parts = disk_usage(directory)
    out.say(
        f"{directory.path}: {row['recipe']} on {row['model']}, {row['state_text']}, {row['steps_text']} steps", "bold"
    )
    out.table("Settings that are not defaults", ["setting", "value", "from"], settings)
    times = [[a.stage, a.outcome, duration_text(a.seconds) if a.seconds is not None else "-", a.detail] for a in stages]
    out.table("Stages", ["stage", "ended", "time", ""], times)
    scores = read_primary_scores(directory)
    score_rows = [[s["set"], s["variant"], s["metric"], interval_text(s)] for s in scores]
    if score_rows:
        out.table("Scores, with 95 % intervals", ["set", "variant", "metric", "score"], score_rows)
    out.table("Disk", ["part", "size"], [[name, bytes_text(size)] for name, size in parts.items()])
    for line in resumable:
        out.say(line)
    for name, problem in artefacts.problems.items():
        out.note(f"{name} is damaged: {problem}")
    out.result(
        row
        | {
            "settings": {key: value for key, value, _ in settings},
            "stages": [{"stage": a.stage, "outcome": a.outcome, "seconds": a.seconds} for a in stages],
            "scores": scores, "disk": parts, "resumable": resumable, "problems": artefacts.problems,
        }
    )  # fmt: skip
    return EXIT_OK


def describe_next_steps(run: RunDir, row: dict[str, Any]) -> list[str]:
    """Return the commands that continue the run, in sentences."""
    lines = []
    newest = newest_checkpoint(run)
    trained = run.adapter.exists() or run.model.exists()
    if not trained and newest is not None:
        lines.append(f"Training can go on from {newest.name}: surefit train {shell_quote(run.path)} --resume")
    elif not trained:
        lines.append(
            f"Nothing is trained, and there is no checkpoint: surefit train {shell_quote(run.path)} --overwrite"
        )
    elif not run.certificate.exists():
        lines.append(f"Trained, not merged: surefit merge {shell_quote(run.path)}")
    if partial := sorted(run.eval.glob("*/*.partial.jsonl")):
        answers = sum(len(read_or_default(lambda path=path: read_jsonl(path), [])) for path in partial)
        lines.append(
            f"{plural(answers, 'kept line')} of an evaluation that was cut off: "
            f"surefit evaluate {shell_quote(run.path)}"
        )
    elif trained and not run.eval_summary.exists():
        lines.append(f"Not scored: surefit evaluate {shell_quote(run.path)}")
    return lines or [f"Every stage is done: surefit report {shell_quote(run.path)}"]
