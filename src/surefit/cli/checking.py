"""The verb `check`. Torch-free, but for the tokenizer that `--show` needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.findings import UNREAD, say_report, without_facts
from surefit.core.errors import ConfigError, DataError, SureFitError
from surefit.core.units import plural, quoted
from surefit.stages.checking import checked
from surefit.stages.eval_prompts import SAMPLED_ROWS, SAMPLED_TEXT, scored_sources
from surefit.stages.run_context import Gathered, config_file, gather

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
    """The verb: a file, the rules that were chosen, what can be fixed, in the format that was asked for."""
    from surefit.cli.annotations import DOCUMENTS, error_report
    from surefit.cli.checking_foreign import check_foreign, is_foreign
    from surefit.config.load import load_text
    from surefit.facts.hub import PATIENCE_S
    from surefit.lint.engine import choose_rules

    rules = choose_rules(select, ignore)
    try:
        if is_foreign(target):
            unusable = [name for name, given in (("--set", overrides), ("--fix", fix), ("--show", show)) if given]
            return check_foreign(out, target, rules, style, unusable)
        if fix:
            from surefit.cli.fixing import rename_keys

            rename_keys(out, config_file(target), dry_run)
        found = gather(target, overrides, patience=PATIENCE_S, look=True)
        report = checked(found, rules)
        if fix:
            from surefit.cli.fixing import fix_config

            def judged(text: str) -> list[dict[str, Any]]:
                changed = load_text(text, found.loaded.path, overrides or ())
                again: list[dict[str, Any]] = checked(gather(changed, patience=PATIENCE_S, look=True), rules)[
                    "findings"
                ]
                return again

            changes = fix_config(out, found.loaded, report["findings"], dry_run, judged)
            if changes["written"]:
                found = gather(target, overrides, patience=PATIENCE_S, look=True)
                report = checked(found, rules)
            report |= changes
        return _say_check(out, found, report, show, style)
    except SureFitError as error:
        if style not in DOCUMENTS:
            raise
        out.document(DOCUMENTS[style](error_report(error), target))
        return error.exit_code


def check(out: Output, found: Gathered) -> int:
    """Every finding at once."""
    return _say_check(out, found, checked(found))


def _say_check(out: Output, found: Gathered, report: dict[str, Any], show: int = 0, style: str = "text") -> int:
    if show:
        _show_examples(out, found, show)
    notes = [*found.adopted.lines(), *_not_looked_at(found, report)]
    fixable = sum(each["fix"] is not None for each in report["findings"])
    if fixable:
        notes.append(
            f"{plural(fixable, 'finding')} with one right answer: `surefit check {quoted(found.loaded.path)} --fix`"
        )
    return say_report(out, report, found.loaded.path, notes, style)


def _not_looked_at(found: Gathered, report: dict[str, Any]) -> list[str]:
    """What a clean check does not speak for."""
    from surefit.data.read.sources import is_local

    notes = []
    config = found.loaded.config
    named = (config.data.train, *config.data.mix, *scored_sources(config).values())
    elsewhere = [text for text in named if not is_local(text)]
    if elsewhere:
        whole = "not looked at: " if is_local(config.data.train) else UNREAD
        notes.append(f"{whole}the rows of {', '.join(elsewhere)} are not on this machine")
    if (
        found.rows is None
        and found.looked
        and is_local(config.data.train)
        and not found.problems
        and not found.prepared
    ):
        notes.append(f"not looked at: {config.data.train}, which can only be read whole; JSON Lines can be sampled")
    if found.rows is not None:
        looked = len(found.rows.sample(SAMPLED_ROWS, SAMPLED_TEXT))
        if looked < found.rows.total:
            notes.append(f"looked at {looked} of {found.rows.estimated or f'{found.rows.total:,} rows'}")
    rendered = report.get("rendered", {"rows": 0, "of": 0})
    if rendered["rows"] < rendered["of"]:
        notes.append(
            f"compared {rendered['rows']} of {rendered['of']} rows with what the model gets of them; "
            "`surefit audit` compares all"
        )
    return [*notes, *without_facts(report["skipped"])]


def _show_examples(out: Output, found: Gathered, count: int) -> None:
    from surefit.data.rows.layouts import placed, to_examples
    from surefit.data.rows.reasoning import with_thinking
    from surefit.data.tokens.show import segments
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
    examples = with_thinking(examples, section.thinking)
    for example, where in zip(examples, examples.where, strict=True):
        try:
            shown = segments(example, tokenizer)
        except DataError as error:
            raise placed(error, where) from None
        for number, one in enumerate(shown, start=1):
            part = f", example {number} of {len(shown)} (the template rewrites earlier turns)" if len(shown) > 1 else ""
            out.heading(f"{where}{part}: the loss falls on the marked text")
            out.segments(one)
