"""What each verb does: gather, call the room that knows how, say what came out. No logic of its own.

Every function takes an `Output` and returns an exit code; the artefacts go into the run directory. torch is imported by
the rooms that these functions import when they run, never by `check`, `plan`, `doctor` or `runs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.checking import check, checked
from surefit.cli.planning import planned_run, say_plan
from surefit.cli.prepare import Prepared
from surefit.config.resolve import write_resolved
from surefit.core.env import redact
from surefit.core.errors import (
    EXIT_FINDINGS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    GateError,
    SureFitError,
)
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic, write_json
from surefit.core.units import bytes_text, count_text, duration_text, plural

if TYPE_CHECKING:
    from surefit.cli.render import Output


@contextlib.contextmanager
def noted(run: RunDir, stage: str) -> Iterator[None]:
    """Write into events.jsonl when a stage started and how it ended."""
    start = time.monotonic()
    run.create()
    run.note(stage, "started")
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", None) == EXIT_INTERRUPTED
        message = redact(error.message) if isinstance(error, SureFitError) else type(error).__name__
        with contextlib.suppress(SureFitError):  # a full disk must not hide the error that filled it
            run.note(stage, "interrupted" if stopped else "failed", seconds=time.monotonic() - start, error=message)
        raise
    run.note(stage, "finished", seconds=time.monotonic() - start)


def train(
    out: Output,
    run: Prepared,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool = False,
    planned: dict[str, Any] | None = None,
) -> int:
    """Check, then train; errors of the check stop it. `planned` is the plan, where it was made before."""
    report = checked(run.gathered)
    _stop_at_errors(out, report)
    if not dry_run:
        _open_run(run, report, resume, overwrite)
        write_json(run.run.plan, planned or planned_run(run))
    context = contextlib.nullcontext() if dry_run else noted(run.run, "train")
    with context:
        result = _train(out, run, resume, dry_run)
    out.result(result)
    return EXIT_OK


def _stop_at_errors(out: Output, report: dict[str, Any]) -> None:
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    if errors:
        out.findings(report["findings"])
        raise GateError(
            f"{plural(len(errors), 'finding')} of severity error: {', '.join(sorted({e['code'] for e in errors}))}",
            help="`surefit explain CODE` says what each means; nothing was started",
        )


def _open_run(run: Prepared, report: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the run directory, or take over the one that is there, and write what the run starts from."""
    from surefit.facts.record import environment_record

    directory = run.run
    if overwrite and not resume:
        _delete_run(directory)
    elif not resume and directory.resolved.exists() and (directory.checkpoints.exists() or _trained(directory)):
        raise ConfigError(
            "there is a run here already",
            path=directory.path,
            field="output_dir",
            help="--resume continues it, --overwrite deletes it first, or choose another output_dir",
        )
    directory.create()
    if run.loaded.path != directory.resolved:
        write_resolved(run.resolved, directory.resolved)
    write_json(directory.check, report)
    write_json(directory.environment, environment_record(run.hardware))


def _delete_run(directory: RunDir) -> None:
    """Delete what SureFit wrote there, and refuse to touch a directory that is not a run's."""
    if not directory.path.exists() or not any(directory.path.iterdir()):
        return
    if not directory.resolved.exists() and not directory.events.exists():
        raise ConfigError(
            "not a run directory, so it is not overwritten",
            path=directory.path,
            field="output_dir",
            help="choose another output_dir, or delete this one yourself",
        )
    for path in directory.artefacts():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _trained(directory: RunDir) -> bool:
    return directory.adapter.exists() or directory.model.exists()


def _train(out: Output, run: Prepared, resume: bool, dry_run: bool) -> dict[str, Any]:
    from surefit.data.formats import read_splits
    from surefit.data.tokenize import build_dataset
    from surefit.model.adapter import add_adapter, trainable_parameters
    from surefit.model.load import load_model, load_tokenizer
    from surefit.train.loop import Training

    config = run.resolved.config
    tokenizer = load_tokenizer(config.model)
    train_examples, eval_examples = read_splits(config.data, run.recipe, config.train.seed, run.rows)
    with out.progress("tokenising") as on_progress:
        rows, eval_rows = (
            build_dataset(
                examples,
                tokenizer,
                max_length=config.data.max_length,
                too_long=config.data.too_long,
                on_progress=on_progress,
            )
            for examples in (train_examples, eval_examples)
        )
    _say_what_was_left_out(out, rows, train_examples)
    model: Any = load_model(config.model, run.hardware)
    if config.adapter.kind == "lora":
        model = add_adapter(model, config.adapter, config.train.seed)
    trained, total = trainable_parameters(model)
    out.note(
        f"training {count_text(trained)} of {count_text(total)} parameters on {len(rows):,} examples, "
        f"{len(eval_rows):,} held out"
    )
    target = run.run.path  # its resolved.yaml also holds what was given with --set
    with out.training_progress() as on_step:
        job = Training(
            model,
            tokenizer,
            rows,
            eval_rows,
            config,
            run.run,
            conversations=all(example.text is None for example in train_examples),
            resume_command=f"surefit train {target} --resume",
            on_progress=on_step,
            on_note=out.note,
        )
        summary = {"rows": dataclasses.asdict(rows.stats), "total_steps": job.total_steps, "dry_run": dry_run}
        if dry_run:
            job.audit(write=False)
            out.say(f"Ready: {job.total_steps} optimizer steps; nothing was written")
            return summary
        result = job.fit(resume)
    out.say(
        f"Trained {result.counters.step} steps in {duration_text(result.counters.seconds)}: loss {result.loss:.4f}"
        + (f", held-out loss {result.eval_loss:.4f}" if result.eval_loss is not None else "")
        + (f", {result.counters.rejected} steps rejected" if result.counters.rejected else "")
        + f" → {result.output}"
    )
    return summary | {
        "output": str(result.output),
        "steps": result.counters.step,
        "seconds": result.counters.seconds,
        "loss": result.loss,
        "eval_loss": result.eval_loss,
        "rejected": result.counters.rejected,
        "resumed_from": result.resumed_from,
        "notes": result.notes,
    }


def _say_what_was_left_out(out: Output, rows: Any, examples: Any) -> None:
    stats = rows.stats
    left_out = (
        (stats.skipped, "rows could not be used"),
        (stats.dropped_too_long, "examples are over data.max_length"),
        (stats.dropped_unsupervised, "examples have nothing to learn"),
    )
    for number, why in left_out:
        if number:
            out.note(f"left out: {number:,} of {stats.rows:,} {why}")
    for place in examples.skipped[:3]:
        out.note(f"  {place}")


def merge(out: Output, run: Prepared) -> int:
    """Merge and certify."""
    from surefit.data.formats import read_splits
    from surefit.data.tokenize import build_dataset
    from surefit.merge.merge import merge as merge_run
    from surefit.model.load import load_tokenizer

    config = run.resolved.config
    _require_trained(run)
    with noted(run.run, "merge"), out.progress("merging") as on_progress:
        tokenizer = load_tokenizer(config.model)
        _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows)
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
    if not _trained(run.run):
        raise ConfigError("nothing is trained yet in this run", path=run.run.path, help="`surefit train` comes first")


def evaluate(out: Output, run: Prepared, variants: Sequence[str] | None) -> int:
    """Score the variants on the held-out rows and on the sets of `evaluate.also`; the gate becomes the exit code."""
    from surefit.data.formats import read_splits, to_examples
    from surefit.data.load import load_rows
    from surefit.evaluate.runner import evaluate as evaluate_run

    config = run.resolved.config
    _require_trained(run)
    with noted(run.run, "evaluate"), out.progress("evaluating") as on_progress:
        _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows)
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


def run(out: Output, prepared: Prepared, *, resume: bool, overwrite: bool) -> int:
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
        "train": lambda: train(each, prepared, resume=resume, overwrite=overwrite, planned=planned),
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
    written = _trained(directory) if stage == "train" else directory.certificate.exists()
    return bool(events) and events[-1] == "finished" and written
