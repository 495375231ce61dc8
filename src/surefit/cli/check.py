"""The verb `check`. Torch-free, except for the tokenizer that `--show` needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surefit.cli.exits import run_verb
from surefit.cli.findings import UNREAD, say_report
from surefit.cli.options import AnyConfigFile, Json, Overrides, repeat_option
from surefit.cli.render import Output
from surefit.core.errors import SET_OPTION, ConfigError, DataError, SureFitError
from surefit.core.units import plural
from surefit.data.rows.sampling import sample_rows
from surefit.lint.skipped import DATA_FACTS, Why
from surefit.stages.eval_prompts import list_eval_sources

if TYPE_CHECKING:
    from surefit.lint.rule import Rule
    from surefit.stages.run_context import RunContext


def check(
    config: AnyConfigFile,
    overrides: Overrides = None,
    select: Annotated[str | None, typer.Option(metavar="CODES", help="Run only these rules, e.g. MEM,SCH001.")] = None,
    ignore: Annotated[str | None, typer.Option(metavar="CODES", help="Run all rules except these.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write the changes that have one right answer.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: show the changes, write nothing.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Show this many examples, with what is trained marked.")] = 0,
    style: Annotated[
        Literal["text", "json", "sarif", "github"],
        typer.Option("--format", help="Output format; sarif and github are for CI."),
    ] = "text",
    as_json: Json = False,
) -> None:
    """Say what will break: config, model and data, in two seconds and without loading anything heavy."""
    if dry_run and not fix:
        raise typer.BadParameter("--dry-run needs --fix")
    if as_json and style not in ("text", "json"):
        raise typer.BadParameter(f"--json is not --format {style}")
    output_format = "json" if as_json else style

    def work(out: Output) -> int:
        from surefit.cli.annotations import DOCUMENTS, error_report
        from surefit.cli.other_tools import check_other_tool_config, is_other_tool_config
        from surefit.lint.engine import choose_rules

        rules = choose_rules(select, ignore)
        try:
            if is_other_tool_config(config):
                unusable = [name for name, value in (("--set", overrides), ("--fix", fix), ("--show", show)) if value]
                return check_other_tool_config(out, config, rules, output_format, unusable)
            run_context, report = _check(out, config, overrides or (), rules, fix, dry_run)
            code = _say_check(out, run_context, report, show, output_format, overrides or ())
            say_next_after_check(out, report, config, overrides or ())
            return code
        except SureFitError as error:
            if output_format not in DOCUMENTS:
                raise
            out.document(DOCUMENTS[output_format](error_report(error), config))
            return error.exit_code

    run_verb(output_format != "text", work, with_result=output_format in ("text", "json"))


def say_next_after_check(out: Output, report: dict[str, Any], target: Path, overrides: Sequence[str]) -> None:
    """Print what follows a check: plan and train, or what an error means."""
    errors = [finding["code"] for finding in report["findings"] if finding["severity"] == "error"]
    if errors:
        out.next_step(["explain", errors[0]])
    else:
        changes = repeat_option("--set", overrides)
        out.next_step(["plan", target, *changes], ["train", target, *changes])


def _check(
    out: Output, target: Path, overrides: Sequence[str], rules: Sequence[Rule], fix: bool, dry_run: bool
) -> tuple[RunContext, dict[str, Any]]:
    """Return what is known of a run and the content of check.json; with `fix`, first write its fixes or print them."""
    from surefit.cli.config_fixes import fix_config, rename_keys
    from surefit.config.load import load_text
    from surefit.facts.hub import PATIENCE_S
    from surefit.stages.checking import run_check
    from surefit.stages.run_context import find_config_file, load_run_context

    if fix:
        rename_keys(out, find_config_file(target), dry_run)
    run_context = load_run_context(target, overrides, patience=PATIENCE_S, look=True)
    report = run_check(run_context, rules)
    if not fix:
        return run_context, report

    def check_text(text: str) -> Sequence[dict[str, Any]]:
        changed = load_text(text, run_context.loaded.path, overrides)
        findings: list[dict[str, Any]] = run_check(load_run_context(changed, patience=PATIENCE_S, look=True), rules)[
            "findings"
        ]
        return findings

    changes = fix_config(out, run_context.loaded, report["findings"], dry_run, check_text)
    if changes["written"]:
        run_context = load_run_context(target, overrides, patience=PATIENCE_S, look=True)
        report = run_check(run_context, rules)
    return run_context, report | changes


def check_and_show(out: Output, context: RunContext) -> int:
    """Check a run with every rule and print all findings at once; return the exit code."""
    from surefit.stages.checking import run_check

    return _say_check(out, context, run_check(context))


def _say_check(
    out: Output,
    context: RunContext,
    report: dict[str, Any],
    show: int = 0,
    style: str = "text",
    overrides: Sequence[str] = (),
) -> int:
    if show:
        _show_examples(out, context, show)
    notes = [*context.adopted.lines(), *_not_looked_at(context, report)]
    # A value of the command line is not in the file that --fix writes.
    fixable = sum(finding["fix"] is not None and finding["path"] != SET_OPTION for finding in report["findings"])
    if fixable:
        notes.append(
            f"{plural(fixable, 'finding')} with one right answer: "
            f"`surefit {shlex.join(['check', str(context.loaded.path), *repeat_option('--set', overrides), '--fix'])}`"
        )
    return say_report(out, report, context.loaded.path, notes, style, why_facts_are_missing(context, report))


def why_facts_are_missing(context: RunContext, report: dict[str, Any]) -> dict[str, Why]:
    """Return, by fact, why the check does not know it; a fact that is left out is on another machine."""
    from surefit.data.read.sources import is_local

    # The errors of reading; a rule's own finding needs the facts that it is about.
    errors = [
        finding["field"] or ""
        for finding in report["findings"]
        if finding["error"] is not None and finding["severity"] == "error"
    ]
    reasons: dict[str, Why] = {}
    if is_local(context.loaded.config.data.train) or context.prepared:
        # An unknown recipe or GPU leaves rows unread that are here and in order.
        unreadable = any(field.startswith("data.") for field in errors) or any(
            isinstance(problem, DataError) for problem in context.problems
        )
        reasons |= dict.fromkeys(DATA_FACTS, "unreadable" if unreadable else "unread")
    if any(field.startswith("model.") for field in errors):
        reasons |= {"ModelFacts": "unreadable", "TokenizerFacts": "unreadable"}
    if context.hardware is None:
        reasons["HardwareFacts"] = "unreadable"
    return reasons


def _not_looked_at(context: RunContext, report: dict[str, Any]) -> list[str]:
    """Return notes on what the check did not cover."""
    from surefit.data.read.sources import is_local

    notes = []
    config = context.loaded.config
    sources = (config.data.train, *config.data.mix, *list_eval_sources(config).values())
    remote_sources = [text for text in sources if not is_local(text)]
    if remote_sources:
        prefix = "not looked at: " if is_local(config.data.train) else UNREAD
        notes.append(f"{prefix}the rows of {', '.join(remote_sources)} are not on this machine")
    if (
        context.rows is None
        and context.looked
        and is_local(config.data.train)
        and not context.problems
        and not context.prepared
    ):
        notes.append(f"not looked at: {config.data.train}, which can only be read whole; JSON Lines can be sampled")
    if context.rows is not None:
        sampled = len(sample_rows(context.rows))
        if sampled < context.rows.total:
            notes.append(f"looked at {sampled} of {context.rows.estimated or f'{context.rows.total:,} rows'}")
    rendered = report.get("rendered", {"rows": 0, "of": 0})
    if rendered["rows"] < rendered["of"]:
        notes.append(
            f"compared {rendered['rows']} of {rendered['of']} rows with what the model gets of them; "
            "`surefit audit` compares all"
        )
    return notes


def _show_examples(out: Output, context: RunContext, count: int) -> None:
    from surefit.data.rows.layouts import to_examples, with_place
    from surefit.data.rows.reasoning import apply_reasoning_mode
    from surefit.data.tokens.show import decode_pair, decode_segments
    from surefit.stages.tokenizers import load_installed_tokenizer

    if context.rows is None and context.problems:
        raise context.problems[0]
    if context.rows is None or context.recipe is None:
        raise ConfigError(
            "there are no local rows to show", code="E1010", field="data.train", help="name a file of rows"
        )
    tokenizer = load_installed_tokenizer(context.loaded.config.model)
    section = context.loaded.config.data
    examples = to_examples(context.rows.sample(count), context.recipe, section.format, section.bad_rows)
    examples = apply_reasoning_mode(examples, section.thinking)
    for example, where in zip(examples, examples.where, strict=True):
        try:
            if example.rejected is not None:
                for name, runs in zip(("chosen", "rejected"), decode_pair(example, tokenizer), strict=True):
                    out.heading(f"{where}, {name}: the marked text is the answer, and in it what the other has not")
                    out.segments(runs)
                continue
            segment_lists = decode_segments(example, tokenizer)
        except DataError as error:
            raise with_place(error, where) from None
        for number, segments in enumerate(segment_lists, start=1):
            suffix = (
                f", example {number} of {len(segment_lists)} (the template rewrites earlier turns)"
                if len(segment_lists) > 1
                else ""
            )
            label = {None: "", True: ", a desirable answer", False: ", an undesirable answer"}[example.desirable]
            out.heading(f"{where}{suffix}{label}: the loss falls on the marked text")
            out.segments((text, trained, False) for text, trained in segments)
