"""The verb `check`. Torch-free, except for the tokenizer that `--show` needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.findings import UNREAD, say_report, skipped_rules_note
from surefit.core.errors import ConfigError, DataError, SureFitError
from surefit.core.units import plural, shell_quote
from surefit.stages.checking import run_check
from surefit.stages.eval_prompts import SAMPLED_ROWS, SAMPLED_TEXT, list_eval_sources
from surefit.stages.run_context import RunContext, find_config_file, load_run_context

if TYPE_CHECKING:
    from surefit.cli.render import Output


def check_file(
    out: Output,
    target: Path,
    overrides: Sequence[str] | None = None,
    *,
    show: int = 0,
    select: str | None = None,
    ignore: str | None = None,
    fix: bool = False,
    dry_run: bool = False,
    style: str = "text",
) -> int:
    """Check a config with the selected rules, fix it with `fix`, print in the selected format; return the exit code."""
    from surefit.cli.annotations import DOCUMENTS, error_report
    from surefit.cli.checking_foreign import check_other_tool_config, is_other_tool_config
    from surefit.config.load import load_text
    from surefit.facts.hub import PATIENCE_S
    from surefit.lint.engine import choose_rules

    rules = choose_rules(select, ignore)
    try:
        if is_other_tool_config(target):
            unusable = [name for name, value in (("--set", overrides), ("--fix", fix), ("--show", show)) if value]
            return check_other_tool_config(out, target, rules, style, unusable)
        if fix:
            from surefit.cli.fixing import rename_keys

            rename_keys(out, find_config_file(target), dry_run)
        run_context = load_run_context(target, overrides, patience=PATIENCE_S, look=True)
        report = run_check(run_context, rules)
        if fix:
            from surefit.cli.fixing import fix_config

            def judged(text: str) -> list[dict[str, Any]]:
                changed = load_text(text, run_context.loaded.path, overrides or ())
                findings: list[dict[str, Any]] = run_check(
                    load_run_context(changed, patience=PATIENCE_S, look=True), rules
                )["findings"]
                return findings

            changes = fix_config(out, run_context.loaded, report["findings"], dry_run, judged)
            if changes["written"]:
                run_context = load_run_context(target, overrides, patience=PATIENCE_S, look=True)
                report = run_check(run_context, rules)
            report |= changes
        return _say_check(out, run_context, report, show, style)
    except SureFitError as error:
        if style not in DOCUMENTS:
            raise
        out.document(DOCUMENTS[style](error_report(error), target))
        return error.exit_code


def check_and_show(out: Output, found: RunContext) -> int:
    """Check a run with every rule and print all findings at once; return the exit code."""
    return _say_check(out, found, run_check(found))


def _say_check(out: Output, found: RunContext, report: dict[str, Any], show: int = 0, style: str = "text") -> int:
    if show:
        _show_examples(out, found, show)
    notes = [*found.adopted.lines(), *_not_looked_at(found, report)]
    fixable = sum(finding["fix"] is not None for finding in report["findings"])
    if fixable:
        notes.append(
            f"{plural(fixable, 'finding')} with one right answer: "
            f"`surefit check {shell_quote(found.loaded.path)} --fix`"
        )
    return say_report(out, report, found.loaded.path, notes, style)


def _not_looked_at(found: RunContext, report: dict[str, Any]) -> list[str]:
    """Return notes on what the check did not cover."""
    from surefit.data.read.sources import is_local

    notes = []
    config = found.loaded.config
    sources = (config.data.train, *config.data.mix, *list_eval_sources(config).values())
    remote_sources = [text for text in sources if not is_local(text)]
    if remote_sources:
        prefix = "not looked at: " if is_local(config.data.train) else UNREAD
        notes.append(f"{prefix}the rows of {', '.join(remote_sources)} are not on this machine")
    if (
        found.rows is None
        and found.looked
        and is_local(config.data.train)
        and not found.problems
        and not found.prepared
    ):
        notes.append(f"not looked at: {config.data.train}, which can only be read whole; JSON Lines can be sampled")
    if found.rows is not None:
        sampled = len(found.rows.sample(SAMPLED_ROWS, SAMPLED_TEXT))
        if sampled < found.rows.total:
            notes.append(f"looked at {sampled} of {found.rows.estimated or f'{found.rows.total:,} rows'}")
    rendered = report.get("rendered", {"rows": 0, "of": 0})
    if rendered["rows"] < rendered["of"]:
        notes.append(
            f"compared {rendered['rows']} of {rendered['of']} rows with what the model gets of them; "
            "`surefit audit` compares all"
        )
    return [*notes, *skipped_rules_note(report["skipped"])]


def _show_examples(out: Output, found: RunContext, count: int) -> None:
    from surefit.data.rows.layouts import to_examples, with_place
    from surefit.data.rows.reasoning import apply_reasoning_mode
    from surefit.data.tokens.show import decode_segments
    from surefit.model.tokenizer import load_tokenizer

    if found.rows is None and found.problems:
        raise found.problems[0]
    if found.rows is None or found.recipe is None:
        raise ConfigError(
            "there are no local rows to show", code="E1010", field="data.train", help="name a file of rows"
        )
    tokenizer = load_tokenizer(found.loaded.config.model)
    section = found.loaded.config.data
    examples = to_examples(found.rows.sample(count), found.recipe, section.format, section.bad_rows)
    examples = apply_reasoning_mode(examples, section.thinking)
    for example, where in zip(examples, examples.where, strict=True):
        try:
            segment_lists = decode_segments(example, tokenizer)
        except DataError as error:
            raise with_place(error, where) from None
        for number, segments in enumerate(segment_lists, start=1):
            suffix = (
                f", example {number} of {len(segment_lists)} (the template rewrites earlier turns)"
                if len(segment_lists) > 1
                else ""
            )
            out.heading(f"{where}{suffix}: the loss falls on the marked text")
            out.segments(segments)
