"""The verb `evaluate`: scores of the variants, the gains in words, and example rows that were won and lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.intervals import interval_text
from surefit.cli.options import EachGpu, Overrides, Target, repeat_option
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, EXIT_UNDECIDED
from surefit.core.rundir import RunDir, read_json
from surefit.core.sampling import evenly_spaced
from surefit.core.units import plural, truncate_text
from surefit.evaluate.answers import (
    BASELINE,
    CUT,
    GRAMMAR,
    READ_COUNTS,
    base_variant,
    read_variant,
    select_tuned_variant,
)
from surefit.evaluate.free_text import SHOW_MORE
from surefit.facts.free_text import LIKELIHOOD_BESIDE_ANSWER, is_likelihood

if TYPE_CHECKING:
    from surefit.parallel.process_group import World
    from surefit.stages.run_context import CheckedRun

GATE_CODES = {"passed": EXIT_OK, "failed": EXIT_FINDINGS, "cannot tell": EXIT_UNDECIDED}
GATE_WORDS = {"passed": ("passed", "green"), "failed": ("FAILED", "red"), "cannot tell": ("CANNOT TELL", "yellow")}
SHOWN_TEXT = 300
"""Number of characters of a prompt's end and of an answer that `--show` prints."""


@verb
def evaluate(
    out: Output,
    target: Target,
    overrides: Overrides = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Score only this one: base, adapter, merged, model, served, or step-N (repeatable)."),
    ] = None,
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Answer under the recipe's grammar too, side by side.")
    ] = False,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Score at most this many rows of each set, spread evenly.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many rows that were won, and as many lost.")] = 0,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Score each checkpoint instead, also while training runs.")
    ] = False,
    gpus: EachGpu = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be generated; load no model.")] = False,
) -> int:
    """Score base, adapter and merged model on the held-out rows, with confidence intervals."""
    from surefit.cli.checkpoint_scores import score_all_checkpoints
    from surefit.cli.processes import distribute_rows
    from surefit.stages.run_context import load_checked_run

    if all_checkpoints and (variant or show):
        raise typer.BadParameter("--all-checkpoints cannot be combined with --variant or --show")
    changes = [
        *(overrides or ()),
        *(["evaluate.constrained=both"] if constrained else []),
        *([f"evaluate.max_examples={max_examples}"] if max_examples else []),
    ]

    def work(run: CheckedRun, world: World | None) -> int:
        if all_checkpoints:
            code = score_all_checkpoints(out, run, dry_run=dry_run, world=world)
        else:
            code = evaluate_and_show(out, run, variant, show=show, dry_run=dry_run, world=world)
        if dry_run:
            out.next_step(["evaluate", target, *repeat_option("--set", changes)])
        else:
            out.next_step(["report", run.run.path], ["chat", run.run.path])
        return code

    if dry_run:
        return work(load_checked_run(target, changes), None)
    command = ["evaluate", str(target), *repeat_option("--set", changes), *repeat_option("--variant", variant or ())]
    command += ["--all-checkpoints"] * all_checkpoints + ["--show", str(show)] * bool(show)
    return distribute_rows(out, target, changes, gpus, command, work)


def evaluate_and_show(
    out: Output,
    run: CheckedRun,
    variants: Sequence[str] | None,
    *,
    show: int = 0,
    dry_run: bool = False,
    world: World | None = None,
) -> int:
    """Score the variants and print their scores; return the exit code, which the gate decides.

    Args:
        show: number of rows to print that the tuned model won against the base, and as many that it lost.
        dry_run: only report what would be generated.
        world: the processes that share the rows, of which this is one; the first alone writes and prints.
    """
    from surefit.stages.evaluating import evaluate_run

    if dry_run:
        return _dry_run(out, run, variants)
    summary = evaluate_run(run, out, variants, world)
    if summary is None:
        return EXIT_OK
    say_scores(out, summary, run.run)
    for name in summary["sets"] if show else ():
        _say_rows(out, run.run, name, summary, show)
    out.result(summary)
    gate = summary["gate"]
    return EXIT_OK if gate is None else GATE_CODES[gate["outcome"]]


def _dry_run(out: Output, run: CheckedRun, variants: Sequence[str] | None) -> int:
    """Do everything short of loading a model: check settings, variants, and rows that cannot be scored."""
    from surefit.evaluate.generation_settings import list_generation_settings
    from surefit.evaluate.runner import select_variants_and_rows
    from surefit.stages.evaluating import evaluation_config, load_eval_sets

    config = evaluation_config(run, variants)
    section = config.evaluate
    models, rows_by_set = select_variants_and_rows(config, run.recipe, run.run, load_eval_sets(run), variants or None)
    settings_list = list_generation_settings(config, run.recipe)
    names = [*(BASELINE + name for name in run.recipe.baselines), *(w.of(v) for v in models for w in settings_list)]
    counts = {name: len(rows) for name, rows in rows_by_set.items()}
    sets = ", ".join(f"{name} ({plural(count, 'row')})" for name, count in counts.items())
    out.say(f"Would score {', '.join(names)} on {sets}")
    answers = len(models) * len(settings_list) * section.samples * sum(counts.values())
    settings = ", ".join(
        f"{key} {value}" for key, value in (settings_list[0].settings | settings_list[0].costs).items()
    )
    out.say(f"{plural(answers, 'answer')} by {plural(len(models), 'model')}: {settings}")
    out.result({"variants": names, "sets": counts, "answers": answers, "settings": settings_list[0].settings})
    return EXIT_OK


def say_scores(out: Output, summary: dict[str, Any], run: RunDir) -> None:
    """Print, per set, a table of the variants, a table of the other metrics, and the gains on the primary metric."""
    for name, set_summary in summary["sets"].items():
        primary, variants = set_summary["primary_metric"], set_summary["variants"]
        models = list(dict.fromkeys(variant.removesuffix(GRAMMAR) for variant in variants))
        grammar = any(variant.endswith(GRAMMAR) for variant in variants)
        free = any(not v.endswith(GRAMMAR) and not v.startswith(BASELINE) for v in variants)
        modes = [("", primary)] * (free or not grammar) + [(GRAMMAR, "with grammar" if free else primary)] * grammar
        records = {variant: read_json(run.eval / name / f"{variant}.json") for variant in variants}
        fit = set_summary.get("fit")
        rows = [
            [
                variant,
                *(interval_text(variants.get(_variant_label(variant, suffix), {}).get(primary)) for suffix, _ in modes),
                *(_both_losses(fit["losses"], variant, modes) if fit else ()),
                *(_both(records, variant, modes, key) for key in ("truncated", "unparsed", "tokens_per_second")),
            ]
            for variant in models
        ]
        columns = [
            "model",
            *(title for _, title in modes),
            *(["loss/token"] if fit else []),
            "cut off",
            "unparsed",
            "tokens/s",
        ]
        left_out = (
            f"; {set_summary['unanswered']:,} more have no answer to compare with"
            if set_summary.get("unanswered")
            else ""
        )
        out.table(f"{name}: {plural(set_summary['n'], 'row')}, {primary} with 95 % intervals{left_out}", columns, rows)
        _say_other_metrics(out, name, variants, primary)
        for pair in _comparisons_to_tell(set_summary["comparisons"], primary, variants):
            if not _is_told_as_fit(pair, fit):
                out.say(comparison_sentence(pair))
        if fit:
            _say_fit(out, fit, records)
        for sentence in set_summary.get("pairs", {}).get("sentences", ()):
            out.say(sentence)
    for text in summary["set_aside"]:
        out.note(f"kept, not overwritten: {text}")
    for text in summary["left_out"]:
        out.note(f"not comparable, so left out: {text}")
    if summary["gate"]:
        word, style = GATE_WORDS[summary["gate"]["outcome"]]
        out.paragraph(f"Gate {word}: {summary['gate']['reason']}", style)


def _variant_label(variant: str, suffix: str) -> str:
    return variant if variant.startswith(BASELINE) and suffix == "" else variant + suffix


def _both(about: dict[str, dict[str, Any]], variant: str, ways: Sequence[tuple[str, str]], key: str) -> str:
    """Return a figure without and with the grammar: 12 | 0."""
    values = [about[variant + suffix].get(key) for suffix, _ in ways if variant + suffix in about]
    return " | ".join("-" if value is None else f"{value:,.0f}" for value in values) or "-"


def _both_losses(losses: dict[str, float], variant: str, modes: Sequence[tuple[str, str]]) -> list[str]:
    values = [losses[variant + suffix] for suffix, _ in modes if variant + suffix in losses]
    return [f"{values[0]:.2f}" if values else "-"]  # a grammar changes no likelihood


def _is_told_as_fit(pair: dict[str, Any], fit: dict[str, Any] | None) -> bool:
    """Return whether `_say_fit` says what the comparison would: of likelihoods, or with what they show beside it."""
    effects = fit["effects"] if fit else []
    return (pair["a"], pair["b"]) in [(e["a"], e["b"]) for e in effects if (fit or {})["decides"] or e["metric_text"]]


def _say_fit(out: Output, fit: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    """Print which metric decides and why, what training did to the fit, and which answers were not read whole."""
    for effect in fit["effects"]:
        out.say(effect["sentence"])
    if fit["reason"]:
        out.note(f"{fit['reason']}")
    if fit.get("show_more"):
        out.note(f"{SHOW_MORE}: {'; '.join(fit['show_more'])}")
    counts = [{key: record.get(key, 0) for key in READ_COUNTS} for record in records.values() if CUT in record]
    cut, unread = (max((count[key] for count in counts), default=0) for key in READ_COUNTS)
    if cut:
        out.note(f"{plural(cut, 'answer')} longer than data.max_length or the model's context: its beginning was read")
    if unread:
        out.note(f"{plural(unread, 'row')} without a likelihood: an empty answer, or no room for one behind the prompt")


def _say_other_metrics(out: Output, name: str, variants: dict[str, Any], primary: str) -> None:
    metrics = dict.fromkeys(metric for values in variants.values() for metric in values if metric != primary)
    if metrics:
        rows = [[metric, *(interval_text(values.get(metric)) for values in variants.values())] for metric in metrics]
        out.table(f"{name}: the other metrics", ["metric", *variants], rows)


def _comparisons_to_tell(
    comparisons: Sequence[dict[str, Any]], primary: str, variants: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the comparisons to print.

    These are tuned models against the base, the released model against the baselines, and every model under a grammar
    against itself without.
    """
    tuned = select_tuned_variant(variants)
    reported = []
    for pair in comparisons:
        a, b = pair["a"], pair["b"]
        same_way = a.endswith(GRAMMAR) == b.endswith(GRAMMAR)
        against_base = a.removesuffix(GRAMMAR) == "base" and same_way
        if pair["metric"] == primary and (against_base or b == a + GRAMMAR or (a.startswith(BASELINE) and b == tuned)):
            reported.append(pair)
    return reported


def comparison_sentence(pair: dict[str, Any]) -> str:
    """Return a comparison as a sentence.

    >>> pair = {"a": "base", "b": "merged", "metric": "exact_match", "difference": 0.25, "ci95": [0.1, 0.4],
    ...         "wins": 30, "losses": 5, "ties": 65}
    >>> comparison_sentence(pair)
    'merged is better than base: +25.0 points exact_match [+10.0, +40.0]; rows: 30 won, 5 lost, 65 tied'
    """
    low, high = pair["ci95"]
    verdict = "is better than" if low > 0 else "is worse than" if high < 0 else "does not differ significantly from"
    return (
        f"{pair['b']} {verdict} {pair['a']}: {100 * pair['difference']:+.1f} points {pair['metric']} "
        f"[{100 * low:+.1f}, {100 * high:+.1f}]; rows: {pair['wins']} won, {pair['losses']} lost, {pair['ties']} tied"
    )


def _say_rows(out: Output, run: RunDir, name: str, summary: dict[str, Any], count: int) -> None:
    """Print rows that the tuned model won and lost against the base, spread evenly over all of them."""
    primary, variants = summary["sets"][name]["primary_metric"], summary["sets"][name]["variants"]
    tuned = select_tuned_variant(variants)
    base = base_variant(tuned) if tuned else "base"
    if tuned is None or base not in variants:
        out.note(f"{name}: no rows to show, for want of scores of both the base and a tuned model")
        return
    pairs = zip(read_variant(run, name, base).lines, read_variant(run, name, tuned).lines, strict=True)
    scored_pairs = [(a, b, b["scores"][primary] - a["scores"][primary]) for a, b in pairs if primary in a["scores"]]
    if is_likelihood(primary):
        out.note(LIKELIHOOD_BESIDE_ANSWER)
    for word, sign in (("won", 1), ("lost", -1)):
        rows = [(a, b) for a, b, difference in scored_pairs if sign * difference > 0]
        out.say(f"{name}: {plural(len(rows), 'row')} {word} by {tuned} against {base}", "bold")
        for row in evenly_spaced(rows, count):
            _say_row(out, primary, base, tuned, *row)


def _say_row(out: Output, primary: str, base: str, tuned: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    prompt = after["prompt"][-SHOWN_TEXT:].strip()
    out.say(f"{after['where']}", "bold")
    out.say(f"  prompt: {'… ' if len(after['prompt']) > SHOWN_TEXT else ''}{prompt}")
    out.say(f"  gold: {truncate_text(str(after['gold']), SHOWN_TEXT)}")
    for name, line in ((base, before), (tuned, after)):
        cut_text = " (cut off)" if line["truncated"] else ""
        out.say(f"  {name}, {line['scores'][primary]:g}{cut_text}: {truncate_text(line['text'], SHOWN_TEXT)}")
