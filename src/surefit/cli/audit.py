"""The verb `audit`: examine every row of a config's data, or of a file, and write the passport."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.options import Overrides, repeat_option
from surefit.cli.render import Output
from surefit.core.env import redact
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, DataError, SureFitError
from surefit.core.output import json_with, output_file
from surefit.core.packaging import install_extra, is_installed
from surefit.core.rundir import RunDir, write_atomic
from surefit.core.units import duration_text, plural
from surefit.stages.eval_prompts import list_eval_sources

if TYPE_CHECKING:
    from surefit.config.schema import SureFitConfig
    from surefit.data.audit.chunk import AuditJob
    from surefit.data.audit.clean import Removals
    from surefit.data.audit.whole import AuditableRows
    from surefit.data.read.load import HasSha256
    from surefit.facts.audit import AuditFacts, Observation
    from surefit.facts.tokenizer import TokenizerFacts
    from surefit.lint.rule import LintContext
    from surefit.task import TaskRecipe

FAMILIES = ("AUD", "DAT", "TPL005", "TPL009")
BAR = 32
BLOCKS = " ▏▎▍▌▋▊▉█"


TRIED_ROWS = 64
"""Rows of a file without a config whose labels are read."""


@dataclass(frozen=True)
class AuditTarget:
    """Data to audit, with everything that the audit compares them with.

    Attributes:
        rows: None if they cannot be read; `problems` then has the reason.
        question: settings of the audit.
        context: for the rules, still without the audit's results.
        scored: the evaluation sets to compare with.
        expected: the recipe's columns; None for several tasks.
        passport: default file of the passport; None: only where the user names one.
        run: the run directory of a config.
        inputs: files and directories that are read, by name.
        conventions: how the rows of `data.mix` are written, by config key.
        mixed: the rows of `data.mix`, by config key.
        tokenizer: facts of the model's tokenizer, where it is on this machine.
    """

    rows: AuditableRows | None
    question: AuditJob
    context: LintContext
    scored: dict[str, AuditableRows] = field(default_factory=dict)
    expected: Sequence[str] | None = ()
    passport: Path | None = None
    run: RunDir | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict)
    conventions: dict[str, dict[str, Observation]] = field(default_factory=dict)
    mixed: dict[str, AuditableRows] = field(default_factory=dict)
    tokenizer: TokenizerFacts | None = None


@dataclass(frozen=True)
class CleanCopyOptions:
    """Options of `--fix`.

    Attributes:
        out: file of the copy; None: beside its source.
        dry_run: only report the rows that would be left out.
        overwrite: replace an earlier copy.
    """

    out: Path | None = None
    dry_run: bool = False
    overwrite: bool = False


@verb
def audit(
    out: Output,
    target: Annotated[str, typer.Argument(metavar="CONFIG|DATA", help="A config or run directory, or bare data.")],
    overrides: Overrides = None,
    passport: Annotated[
        Path | None, typer.Option("--passport", metavar="FILE", help="Write the passport to this .json file.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Look at this many rows, spread evenly.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes; default: one per core.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a copy without empty, too long, leaked and duplicate rows.")
    ] = False,
    clean_copy: Annotated[
        Path | None,
        typer.Option("--clean-copy", metavar="FILE", help="With --fix, write the copy here (.jsonl)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --fix, replace an earlier copy.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix, only say what would be left out.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", hidden=True)] = None,
    out_file: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
) -> int:
    """Look at every row: lengths, duplicates, leaks, damage; write the data set's passport."""
    from surefit.stages.events import record_stage

    if output or out_file:
        old_option, new_option = ("--output (-o)", "--passport") if output else ("--out", "--clean-copy")
        help_text = "--passport FILE writes what was found, --fix --clean-copy FILE the rows that remain"
        raise ConfigError(f"is now {new_option}", code="E1601", field=old_option, help=help_text)
    if not fix and (clean_copy or dry_run or overwrite):
        problem = "--clean-copy, --dry-run and --overwrite need --fix"
        raise ConfigError(problem, code="E1012", help="surefit audit DATA --fix --dry-run")
    options = CleanCopyOptions(clean_copy, dry_run, overwrite) if fix else None
    subject = _config_target(target, overrides) if _is_config(target) else _data_target(target)
    path = _passport_file(subject, passport)
    if options:
        _require_fixable(subject, options, max_rows)
    with record_stage(subject.run, "audit") if subject.run else contextlib.nullcontext():
        result = _run_audit(out, subject, max_rows, workers, options)
        if path is not None and "rows" in result:
            # Examples quote the rows, and a row may hold a key.
            write_atomic(path, redact(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)) + "\n")
            out.note(f"written: {path}")
            if not is_installed("py3langid"):
                out.note(f"without the rows' languages, which need py3langid: {install_extra('data')}")
    errors = [finding["code"] for finding in result["findings"] if finding["severity"] == "error"]
    _say_next(out, target, overrides or (), subject, errors, result.get("fix"))
    out.result(result)
    return EXIT_FINDINGS if errors and "fix" not in result else EXIT_OK


def _say_next(
    out: Output,
    target: str,
    overrides: Sequence[str],
    subject: AuditTarget,
    errors: Sequence[str],
    fix: Mapping[str, Any] | None,
) -> None:
    """Print what follows an audit: the config for these rows, or for their clean copy; or what an error means."""
    if fix is not None:
        again = ["audit", target, *repeat_option("--set", overrides), "--fix"]
        out.next_step(again if fix["dry_run"] else ["init", "--data", fix["out"]])
    elif errors:
        out.next_step(["explain", errors[0]])
    elif subject.context.config is not None:
        out.next_step(["plan", target, *repeat_option("--set", overrides)])
    elif subject.question.recipe_name is not None:  # `init` reads no other columns
        out.next_step(["init", "--data", target])


def _passport_file(subject: AuditTarget, asked: Path | None) -> Path | None:
    """Return the file of the passport, or None if it is not written.

    Raises:
        ConfigError: that file may not be overwritten, or has the extension of a file of rows.
    """
    from surefit.data.read.file_io import file_extensions
    from surefit.data.read.readers import ENDINGS

    path = asked or subject.passport
    if path is None:
        return None
    extension = file_extensions(path.name)[0]
    if extension in ENDINGS and extension != ".json":
        raise ConfigError(
            f"a passport is JSON, and {extension} is a file of rows",
            code="E1600",
            path=path,
            field="--passport",
            help="--passport FILE.json; the rows that remain go to --fix --clean-copy FILE.jsonl",
        )
    recognized = json_with("surefit", "source", "sha256", "findings")
    return output_file(path, subject.inputs, as_rows=True, earlier=recognized, option="--passport")


def _is_config(target: str) -> bool:
    return target.lower().endswith((".yaml", ".yml")) or RunDir(Path(target)).resolved.exists()


def _run_audit(
    out: Output, subject: AuditTarget, max_rows: int | None, workers: int | None, fix: CleanCopyOptions | None
) -> dict[str, Any]:
    """Return the content of passport.json; only the findings if the file is of a recognized kind that holds no rows.

    Raises:
        DataError: the rows cannot be read.
    """
    from surefit.data.audit.clean import Removals
    from surefit.data.audit.passport import build_passport
    from surefit.data.audit.sample import run_file_detectors
    from surefit.data.audit.whole import audit_rows
    from surefit.facts.audit import AuditFacts
    from surefit.facts.hardware import cpu_count

    start = time.monotonic()
    question, config = subject.question, subject.context.config
    of_files = run_file_detectors(question.source)
    if subject.rows is None:
        if not of_files:
            raise subject.context.problems[0]
        findings = _run_audit_rules(subject, audit=AuditFacts(question.source, 0, 0, of_files))
        out.findings(findings)
        return {"source": question.source, "findings": findings}
    rows = subject.rows.sample(max_rows) if max_rows is not None else subject.rows
    workers = workers or cpu_count()
    removals = Removals()
    with out.progress("auditing") as progress:
        audit = audit_rows(
            rows,
            question,
            scored=subject.scored,
            mixed=subject.mixed,
            expected=subject.expected,
            workers=workers,
            on_progress=progress,
            and_then=removals.find if fix else None,
        )
    conventions = {**subject.conventions, **audit.facts.conventions}
    observations = {**audit.facts.observations, **of_files, **_unread_columns(subject, rows)}
    facts = replace(audit.facts, observations=observations, conventions=conventions)
    problems = (*subject.context.problems, *_unusable(subject, facts))
    findings = _run_audit_rules(subject, audit=facts, dataset=audit.dataset, problems=problems)
    about = {
        "rows": len(subject.rows),
        "recipe": question.recipe_name,
        "tokenizer": config.model.name_or_path if config else None,
        "workers": audit.workers,
        "seconds": round(time.monotonic() - start, 2),
    }
    result = build_passport(replace(audit, facts=facts), rows, findings, about)
    _say(out, result, facts.observations)
    if fix:
        result["fix"] = _write_clean_copy(out, rows, removals, fix)
    return result


def _unread_columns(subject: AuditTarget, rows: AuditableRows) -> dict[str, Observation]:
    """Return observations on the columns, in a sample, that no recipe and no template reads; none without a recipe."""
    from surefit.data.rows.unread_fields import LOOKED_AT, find_unread_columns

    question = subject.question
    if question.recipe is None:
        return {}
    return find_unread_columns(rows.sample(LOOKED_AT), question.recipe(), question.fmt, subject.tokenizer)


def _require_fixable(subject: AuditTarget, fix: CleanCopyOptions, max_rows: int | None) -> None:
    """Raise unless all rows are audited: a clean copy covers all rows. Also check the files that the copy writes."""
    from surefit.data.audit.clean import clean_path, removed_path
    from surefit.data.read.sources import resolve_source

    config = subject.context.config
    if max_rows is not None or (config is not None and config.data.limit is not None):
        name = "--max-rows" if max_rows is not None else "data.limit"
        raise ConfigError(
            f"{name} selects some of the rows, but a clean copy covers all", code="E1005", help=f"leave {name} out"
        )
    if subject.rows is None:
        raise subject.context.problems[0]
    copy = clean_path(resolve_source(subject.question.source), fix.out)
    for path in (copy, removed_path(copy)):
        replace_it = "choose another name, or replace it with --overwrite"
        allowed = fix.overwrite or fix.dry_run
        output_file(path, subject.inputs, allowed, as_rows=True, option="--clean-copy", help=replace_it)


def _write_clean_copy(out: Output, rows: AuditableRows, removals: Removals, fix: CleanCopyOptions) -> dict[str, Any]:
    """Write the clean copy, or print what it would hold; return its statistics."""
    from surefit.data.audit.clean import clean_path, removed_path, write_clean
    from surefit.data.read.sources import resolve_source

    path, counts = clean_path(resolve_source(rows.source), fix.out), removals.counts()
    parts = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items())
    prefix = "would be " if fix.dry_run else ""
    out.say(f"{plural(len(removals), 'row')} of {len(rows):,} {prefix}left out{': ' if parts else ''}{parts}")
    if len(removals) == len(rows):
        raise DataError(
            "a clean copy would have no rows", code="E1006", path=rows.source, help="see what the audit found"
        )
    if not fix.dry_run:
        write_clean(rows, removals, path)
        out.note(f"written: {path}, and the removed rows: {removed_path(path)}")
    return {
        "dry_run": fix.dry_run,
        "rows": len(rows),
        "kept": len(rows) - len(removals),
        "removed": counts,
        "out": str(path),
        "list": str(removed_path(path)),
    }


def _run_audit_rules(subject: AuditTarget, **known: Any) -> list[dict[str, Any]]:
    """Return the findings of the data rules on these facts; without a config, a finding names no config key."""
    from surefit.lint.engine import all_rules, run_rules

    rules = [rule for rule in all_rules() if rule.code.startswith(FAMILIES)]
    findings: list[dict[str, Any]] = run_rules(replace(subject.context, **known), rules).as_dict()["findings"]
    return findings if subject.context.config else [finding | {"field": None} for finding in findings]


def _unusable(subject: AuditTarget, facts: AuditFacts) -> list[SureFitError]:
    """Return the sets with rows that training would stop at, as problems for DAT001."""
    config = subject.context.config
    unusable_rows: list[tuple[str | None, Observation | None]] = [(None, facts.seen("unusable_row"))]
    unusable_rows += [(key, observations.get("unusable_row")) for key, observations in facts.others.items()]
    reported_fields = {problem.field for problem in subject.context.problems}
    problems: list[SureFitError] = []
    for key, observation in unusable_rows:
        skips = config is not None and config.data.bad_rows == "skip"
        if (
            not (observation and observation.rows)
            or (skips and observation.rows < observation.of)
            or (key and key in reported_fields)
        ):
            continue
        problems.append(
            DataError(
                f"{observation.rows:,} of {observation.of:,} rows cannot be used, the first: {observation.examples[0]}",
                code="E1007",
                path=None if key else facts.source,
                field=key,
                help="fix them, or set data.bad_rows: skip to leave them out (counted)",
            )
        )
    return problems


# The data to audit


def _config_target(target: str, overrides: Sequence[str] | None) -> AuditTarget:
    from surefit.config.inputs import input_files
    from surefit.data.audit.sample import observe_conventions
    from surefit.data.audit.streamed import StreamedRows
    from surefit.facts.setup import setup_of
    from surefit.lint.rule import LintContext
    from surefit.stages.checking import check_mixed_rows, load_tokenizer_facts
    from surefit.stages.run_context import load_run_context

    run_context = load_run_context(Path(target), overrides, look=True)
    config = run_context.loaded.config
    if run_context.recipe is None:
        raise run_context.problems[0]
    rows: StreamedRows | None = None
    problems: list[SureFitError] = [problem for problem in run_context.problems if isinstance(problem, DataError)]
    if not problems:
        try:
            rows = StreamedRows(config.data.train, config.data.split, config.data.limit)
        except DataError as error:
            problems.append(error)
    eval_sets = load_eval_rows(config, rows, problems) if rows is not None else {}
    mixed_datasets = _mixed_rows(config, problems) if rows is not None else {}
    tokenizer = load_tokenizer_facts(run_context)[0]
    mixed_problems = check_mixed_rows(run_context, tokenizer)
    problems += [problem for problem in mixed_problems if isinstance(problem, DataError)]
    loaded = run_context.loaded
    context = LintContext(
        config=config,
        path=loaded.path,
        lines=loaded.lines,
        overridden=loaded.overridden,
        setup=setup_of(config, run_context.resolved),
        resolved=run_context.resolved,
        columns=run_context.recipe.columns_in(rows.columns if rows else ()),
        problems=tuple(problems),
    )
    question = build_audit_job(config)
    expected = None if run_context.recipe.parts else context.columns
    inputs = input_files(config, loaded.path)
    mixed_rows = {} if run_context.recipe.parts else run_context.mixed
    conventions = {
        f"data.mix.{name}": observe_conventions(dataset, config.recipe) for name, dataset in mixed_rows.items()
    }
    return AuditTarget(
        rows,
        question,
        context,
        eval_sets,
        expected,
        run_context.run.passport,
        run_context.run,
        inputs,
        conventions,
        mixed_datasets,
        tokenizer,
    )


def _recipe_of(config: SureFitConfig) -> TaskRecipe:
    """Return a config's recipe; a function that another process can call."""
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for

    return recipe_for(recipes.get_recipe(config.recipe), config)


def _pair_recipe(name: str) -> TaskRecipe:
    """Return a recipe that reads pairs; a function that another process can call."""
    from surefit import recipes

    return replace(recipes.get_recipe(name), pairs=True)


def _labelled_recipe(name: str) -> TaskRecipe:
    """Return a recipe that reads labelled answers; a function that another process can call."""
    from surefit import recipes

    return replace(recipes.get_recipe(name), labelled=True)


def build_audit_job(config: SureFitConfig) -> AuditJob:
    """Return the audit settings of a config's data."""
    from surefit.data.audit.chunk import AuditJob
    from surefit.stages.tokenizers import load_installed_tokenizer

    return AuditJob(
        source=config.data.train,
        columns=(),
        recipe=partial(_recipe_of, config),
        recipe_name=config.recipe,
        fmt=config.data.format,
        tokenizer=partial(load_installed_tokenizer, config.model),
        max_length=config.data.max_length,
        thinking=config.data.thinking,
    )


def load_eval_rows(config: SureFitConfig, rows: HasSha256, problems: list[SureFitError]) -> dict[str, AuditableRows]:
    """Return the rows of the evaluation sets, by config key; sets that cannot be read are added to `problems`."""
    from surefit.data.audit.streamed import StreamedRows
    from surefit.data.read.load import require_distinct_rows

    eval_sets: dict[str, AuditableRows] = {}
    for key, source in list_eval_sources(config).items():
        try:
            eval_rows = StreamedRows(source, config.data.split)
            require_distinct_rows(eval_rows, rows if key == "data.eval" else None, source)
            eval_sets[key] = eval_rows
        except SureFitError as error:
            error.about(key)
            problems.append(error)
    return eval_sets


def _mixed_rows(config: SureFitConfig, problems: list[SureFitError]) -> dict[str, AuditableRows]:
    """Return the rows of `data.mix`, by config key; sources that cannot be read are added to `problems`."""
    from surefit.data.audit.streamed import StreamedRows

    datasets: dict[str, AuditableRows] = {}
    for source in config.data.mix:
        try:
            datasets[f"data.mix.{source}"] = StreamedRows(source, config.data.split)
        except SureFitError as error:
            error.about(f"data.mix.{source}")
            problems.append(error)
    return datasets


def _data_target(target: str) -> AuditTarget:
    """Return the audit target of a file, a directory, a sample or a hub id, without config and model."""
    from surefit import recipes
    from surefit.config.inputs import row_files
    from surefit.data.audit.chunk import AuditJob
    from surefit.data.audit.streamed import StreamedRows
    from surefit.data.rows.labelled import find_verdicts
    from surefit.data.rows.layouts import has_pair_columns
    from surefit.lint.rule import LintContext
    from surefit.stages.checking import find_fitting_recipe

    problems: tuple[SureFitError, ...] = ()
    rows = None
    try:
        rows = StreamedRows(target)
    except DataError as error:
        problems = (error,)
    columns = rows.columns if rows else []
    pairs = has_pair_columns(columns)
    labelled = rows is not None and not pairs and find_verdicts(columns, rows.sample(TRIED_ROWS)) is not None
    name = recipes.GENERAL if pairs or labelled else find_fitting_recipe(columns)
    question = AuditJob(source=target, columns=(), recipe_name=name)
    expected: Sequence[str] = ()
    if name is not None:
        read = _pair_recipe if pairs else _labelled_recipe if labelled else recipes.get_recipe
        question = replace(question, recipe=partial(read, name))
        expected = recipes.get_recipe(name).columns_in(columns)
    context = LintContext(None, Path(target), problems=problems)
    return AuditTarget(rows, question, context, expected=expected, inputs=row_files("the data", target))


# The printed summary


def _say(out: Output, result: Mapping[str, Any], observations: Mapping[str, Observation]) -> None:
    lengths = result["lengths"]
    total_text = f" of {result['rows']:,}" if result["rows"] != result["audited"] else ""
    out.say(
        f"{result['source']}: {result['audited']:,}{total_text} rows, {result['usable']:,} usable as examples"
        + (f" of {result['recipe']}" if result["recipe"] else ""),
        "bold",
    )
    if "pair_longer" in observations:
        out.say(f"{result['examples']:,} conversations: each pair has two")
    elif result["examples"] != result["usable"]:
        out.say(f"{result['examples']:,} examples: the chat template rewrites earlier turns of a conversation")
    unit = result["unit"]
    length_rows = [[name, *_numbers(stats)] for name, stats in lengths.items() if stats["total"]]
    out.table(f"Length in {unit}", ["part", "total", "mean", "median", "95 %", "99 %", "longest"], length_rows)
    if lengths["whole"]["total"]:
        for line in _bars(lengths["whole"]["histogram"]):
            out.say(line)
        share = result["supervised_share"]
        out.say(f"{share:.1%} of the {unit} are learnt" if share is not None else f"no {unit}")
    observed = [
        [name, f"{observation.rows:,}", f"{observation.of:,}", _first(observation)]
        for name, observation in observations.items()
        if observation.rows
    ]
    if observed:
        out.table("Seen", ["observation", "rows", "of", "first"], observed)
    elif result["usable"] or not result["audited"]:
        out.say(f"{plural(len(observations), 'data check')}: no problems found", "green")
    if result["audited"] and not result["usable"] and not result["recipe"]:
        out.paragraph(
            f"no row was read as an example: nothing reads the columns {', '.join(result['columns'])}; a config names "
            "them, data.columns: {prompt: COLUMN, completion: COLUMN}",
            "yellow",
        )
    out.findings(result["findings"])
    errors, warnings = (sum(f["severity"] == s for f in result["findings"]) for s in ("error", "warning"))
    out.say(
        f"{result['source']}: {plural(errors, 'error')}, {plural(warnings, 'warning')} "
        f"in {duration_text(result['seconds'])} on {plural(result['workers'], 'core')}"
    )
    out.say(f"sha256 {result['sha256']}", "dim")


def _first(observation: Observation) -> str:
    return observation.examples[0] if observation.examples else observation.detail


def _numbers(part: Mapping[str, Any]) -> list[str]:
    return [f"{part[key]:,}" for key in ("total", "mean", "p50", "p95", "p99", "max")]


def _bars(histogram: Mapping[str, Any]) -> list[str]:
    """Return one line per bin, from the first bin that has rows: its lower length, a bar, the number of rows."""
    width, counts = histogram["width"], histogram["counts"]
    labels = [f"{n * width:,}" for n in range(len(counts))] + [f"{len(counts) * width:,}+"]
    room = max(len(label) for label in labels)
    highest = max(max(counts), histogram["over"], 1)
    rows = [*counts, histogram["over"]] if histogram["over"] else counts
    lines = [f"  {label:>{room}} {_bar(count / highest)} {count:,}" for label, count in zip(labels, rows, strict=False)]
    return lines[next((n for n, count in enumerate(rows) if count), 0) :]


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    return ("█" * (eighths // 8) + BLOCKS[eighths % 8].strip()).ljust(BAR)
