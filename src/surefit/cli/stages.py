"""What each verb does: gather, call the room that knows how, say what came out. No logic of its own.

Every function takes an `Output` and returns an exit code; the artefacts go into the run directory. torch is imported by
the rooms that these functions import when they run, never by `check`, `plan`, `doctor` or `runs`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.checking import check
from surefit.cli.noting import noted, trained
from surefit.cli.planning import planned_run, say_plan
from surefit.cli.prepare import Prepared
from surefit.cli.training import train
from surefit.core.errors import (
    EXIT_FINDINGS,
    EXIT_OK,
    ConfigError,
)
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic
from surefit.core.units import bytes_text, plural

if TYPE_CHECKING:
    from surefit.cli.render import Output


def merge(out: Output, run: Prepared) -> int:
    """Merge and certify."""
    from surefit.data.formats import read_splits
    from surefit.data.tokenize import build_dataset
    from surefit.merge.merge import merge as merge_run
    from surefit.model.load import load_tokenizer

    config = run.resolved.config
    _require_trained(run)
    with run.run.locked("merge", out.note), noted(run.run, "merge"), out.progress("merging") as on_progress:
        tokenizer = load_tokenizer(config.model)
        _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
        dataset = build_dataset(held_out, tokenizer, max_length=config.data.max_length, too_long=config.data.too_long)
        sequences = [dataset[index][0].tolist() for index in range(len(dataset))]
        certificate = merge_run(config, run.hardware, run.run, sequences, on_progress)
    # The checks of what ships; certificate.json has those of the adapter and of the weights in memory as well.
    shown = [
        c for c in certificate["checks"] if c["name"].startswith("reloaded_") and isinstance(c["value"], float | int)
    ]
    rows = [[c["name"], f"{c['value']:.3g}", c["comparison"], f"{c['threshold']:.3g}"] for c in shown]
    out.table("The merged model, read back from disk, against base + adapter", ["check", "value", "", "bound"], rows)
    path = run.run.merged if config.adapter.kind == "lora" else run.run.model
    out.say(f"Certificate passed, {plural(len(certificate['checks']), 'check')} → {path}", "green")
    out.result(certificate)
    return EXIT_OK


def _require_trained(run: Prepared) -> None:
    if not trained(run.run):
        raise ConfigError("nothing is trained yet in this run", path=run.run.path, help="`surefit train` comes first")


def evaluate(out: Output, run: Prepared, variants: Sequence[str] | None) -> int:
    """Score the variants on the held-out rows and on the sets of `evaluate.also`; the gate becomes the exit code."""
    from surefit.data.formats import read_splits, to_examples
    from surefit.data.load import load_rows
    from surefit.evaluate.runner import evaluate as evaluate_run

    config = run.resolved.config
    _require_trained(run)
    with run.run.locked("evaluate", out.note), noted(run.run, "evaluate"), out.progress("evaluating") as on_progress:
        _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
        sets = {"eval": held_out}
        for name, source in config.evaluate.also.items():
            sets[name] = to_examples(load_rows(source), run.recipe, config.data.format, config.data.bad_rows)
        summary = evaluate_run(config, run.recipe, run.hardware, run.run, sets, variants or None, on_progress)
    say_scores(out, summary)
    out.result(summary)
    gate = summary["gate"]
    return EXIT_OK if gate is None or gate["passed"] else EXIT_FINDINGS


def say_scores(out: Output, summary: dict[str, Any]) -> None:
    """A table per set (metrics down, variants across), then what was gained on the primary metric."""
    primary = summary["primary_metric"]
    for name, scored in summary["sets"].items():
        variants = scored["variants"]
        metrics = list(dict.fromkeys(metric for values in variants.values() for metric in values))
        rows = [
            [metric, *(_interval(values.get(metric)) for values in variants.values())]
            for metric in sorted(metrics, key=lambda metric: metric != primary)
        ]
        out.table(f"{name}: {scored['n']} rows, 95 % intervals", ["metric", *variants], rows)
        for pair in scored["comparisons"]:
            if pair["metric"] == primary and pair["a"] == "base":
                out.say(_comparison(pair))
    for text in summary["left_out"]:
        out.note(f"not comparable, so left out: {text}")
    if summary["gate"]:
        passed = summary["gate"]["passed"]
        out.say(f"Gate {'passed' if passed else 'FAILED'}: {summary['gate']['reason']}", "green" if passed else "red")


def _comparison(pair: dict[str, Any]) -> str:
    low, high = pair["ci95"]
    return (
        f"{pair['b']} - {pair['a']}: {100 * pair['difference']:+.1f} points {pair['metric']} "
        f"[{100 * low:+.1f}, {100 * high:+.1f}], {pair['wins']} won, {pair['losses']} lost, {pair['ties']} tied"
    )


def _interval(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    low, high = value["ci95"]
    return f"{value['mean']:.3f} [{low:.3f}, {high:.3f}]"


def predict(
    out: Output, run: Prepared, data: str | None, prompt: str | None, output: Path | None, variant: str | None
) -> int:
    """Answer new rows or one prompt; with gold answers in the rows, score them too."""
    from surefit.cli.predict import answer, rows_to_answer

    examples = rows_to_answer(run, data, prompt)
    with out.progress("answering") as on_progress:
        chosen, records = answer(run, examples, variant, on_progress)
    lines = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
    if output is not None:
        write_atomic(output, lines)
        out.say(f"Wrote {output}: {len(records)} answers by {chosen}")
    elif prompt is not None:
        out.say(records[0]["text"])
    else:
        out.say(lines.rstrip("\n"))
    out.result({"variant": chosen, "n": len(records), "output": str(output) if output else None,
                "answers": None if output else records})  # fmt: skip
    return EXIT_OK


def report(out: Output, directory: RunDir) -> int:
    """Write report.html."""
    from surefit.report.build import build_report

    with noted(directory, "report"):
        path = build_report(directory)
    out.say(f"Wrote {path} ({bytes_text(path.stat().st_size)}): open it in a browser, it needs no network")
    out.result({"report": str(path)})
    return EXIT_OK


def run(
    out: Output,
    prepared: Prepared,
    *,
    resume: bool,
    overwrite: bool,
    training: Callable[[bool, bool], int] | None = None,
) -> int:
    """All stages in order; the first that fails stops the rest, but a failed gate still gets its page.

    With `resume`, a trained and a merged model are not made again.
    """
    each = out.without_result()
    planned: dict[str, Any] = {}

    def plan() -> int:
        planned.update(planned_run(prepared))
        return say_plan(each, planned)

    verbs: dict[str, Callable[[], int]] = {
        "check": lambda: check(each, prepared.gathered),
        "plan": plan,
        "train": lambda: (
            training(resume, overwrite)
            if training
            else train(each, prepared, resume=resume, overwrite=overwrite, planned=planned)
        ),
        "merge": lambda: merge(each, prepared),
        "evaluate": lambda: evaluate(each, prepared, None),
        "report": lambda: report(each, prepared.run),
    }
    worst = EXIT_OK
    for number, (stage, verb) in enumerate(verbs.items(), start=1):
        done = resume and stage in ("train", "merge") and _finished(prepared.run, stage)
        out.heading(f"{number}/{len(verbs)} {stage}{': done before' if done else ''}")
        code = EXIT_OK if done else verb()
        worst = max(worst, code)
        if code != EXIT_OK and stage != "evaluate":
            break
    scores = read_json(prepared.run.eval_summary) if prepared.run.eval_summary.exists() else None
    out.result(
        {"run": str(prepared.run.path), "exit_code": worst, "report": str(prepared.run.report), "scores": scores}
    )
    return worst


def _finished(directory: RunDir, stage: str) -> bool:
    """Whether the stage's last event says that it finished, and what it wrote is there."""
    events = [event["event"] for event in read_jsonl(directory.events) if event["stage"] == stage]
    written = trained(directory) if stage == "train" else directory.certificate.exists()
    return bool(events) and events[-1] == "finished" and written
