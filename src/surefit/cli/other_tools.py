"""Check the configs of other tools. Torch-free."""

from __future__ import annotations

import os.path
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefit import __version__
from surefit.cli.findings import say_report
from surefit.config.resolve import ResolvedConfig, resolve_config
from surefit.core.errors import EXIT_OK, ConfigError, SureFitError
from surefit.core.units import plural, shell_quote
from surefit.importers import TOOL_NAMES, ImportedConfig, UnmappedKey, find_tool, read_tool_config
from surefit.lint.rule import LintContext, Rule

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.data.read.load import Rows
    from surefit.facts.hardware import HardwareFacts
    from surefit.facts.model import ModelFacts
    from surefit.facts.setup import Setup
    from surefit.facts.tokenizer import TokenizerFacts
    from surefit.lint.engine import LintResult

T = TypeVar("T")
SHOWN = 20
"""Number of keys that a check lists as not looked at; the rest are counted."""
SLIP = 0.8
"""Minimum similarity of a column's name and the name in a script, for the difference to count as a typing error."""
SUREFITS_MEMORY = ("MEM", "DSK")
"""Rule families that estimate the memory and disk that SureFit itself would use."""


@dataclass(frozen=True)
class UnknownModel:
    """A model that is not on this machine, with the attributes that resolving a config needs."""

    parameters: int | None = None
    vocab_size: int = 0
    packing_obstacle: str | None = None
    padded_attention: str = "sdpa"
    router_loss: bool = False
    shares_prompts: bool = False


def is_other_tool_config(target: Path) -> bool:
    """Return whether a file is a config of another tool.

    Raises:
        ConfigError: it can be read, and is no config of a tool that SureFit knows.
    """
    return target.is_file() and find_tool(target) not in (None, "surefit")


def check_other_tool_config(
    out: Output, target: Path, rules: Sequence[Rule], style: str = "text", unusable: Sequence[str] = ()
) -> int:
    """Print every finding about another tool's config, and what could not be checked; return the exit code.

    Args:
        rules: rules to run.
        style: text, json, sarif or github.
        unusable: options on the command line that only make sense for SureFit's own configs.
    """
    imported = read_tool_config(target)
    if unusable:
        help_text = f"`surefit import {shell_quote(target)}` makes a SureFit config of it"
        tool = TOOL_NAMES.get(imported.tool, imported.tool)
        raise ConfigError(
            f"{', '.join(unusable)} needs a SureFit config, and this is {tool}'s",
            code="E1019",
            path=target,
            help=help_text,
        )
    start = time.monotonic()
    result, notes = run_applicable_rules(imported, rules)
    report = {
        "surefit": __version__,
        "seconds": time.monotonic() - start,
        **result.as_dict(),
        **unmapped_keys_document(imported),
    }
    for finding in report["findings"]:
        finding["fix"] = None  # SureFit does not edit other tools' files
    unread = [*_not_looked_at(imported.lost), *_reference_note(imported.setup), *notes]
    code = say_report(out, report, target, unread, style, "unread")
    if code == EXIT_OK and imported.loaded is not None:
        out.next_step(["import", target, "--output", f"{target.stem}-surefit.yaml"])
    elif report["findings"]:
        out.next_step(["explain", report["findings"][0]["code"]])
    return code


def run_applicable_rules(found: ImportedConfig, rules: Sequence[Rule]) -> tuple[LintResult, list[str]]:
    """Return the findings of the rules that apply to another tool's config, and notes on missing facts."""
    from surefit.lint.engine import run_rules

    context, notes = build_lint_context(found)
    return run_rules(context, [rule for rule in rules if _is_applicable(rule, context)]), notes


def unmapped_keys_document(found: ImportedConfig) -> dict[str, Any]:
    """Return the JSON fields about the file beside the findings."""
    keys = ("key", "line", "value", "why")
    return {
        "tool": found.tool,
        "not_looked_at": [{key: getattr(unmapped, key) for key in keys} for unmapped in found.lost],
    }


def _reference_note(setup: Setup) -> list[str]:
    """Return the line that says what DPO or KTO compares the model with; empty for other objectives."""
    return [f"the reference of {setup.objective} is {setup.reference}"] if setup.reference else []


def _not_looked_at(lost: Sequence[UnmappedKey]) -> list[str]:
    lines = [
        f"not looked at: {unmapped.key}{f' (line {unmapped.line})' if unmapped.line else ''}: {unmapped.why}"
        for unmapped in lost[:SHOWN]
    ]
    return [*lines, f"not looked at: {plural(len(lost) - SHOWN, 'more key')}"] if len(lost) > SHOWN else lines


def _is_applicable(rule: Rule, context: LintContext) -> bool:
    """Return whether a rule's estimate for SureFit's own run applies to this run: not with sharding or offloading."""
    setup = context.setup
    shared = setup is not None and (
        setup.quantization not in (None, "none")
        or setup.parallel not in (None, "none", "ddp")
        or bool(setup.cpu_offload)
    )
    return not (shared and rule.code[:3] in SUREFITS_MEMORY and ResolvedConfig in rule.needs)


def build_lint_context(found: ImportedConfig) -> tuple[LintContext, list[str]]:
    """Return all facts that rules may use, and notes on missing facts, which are no findings: the file is not at fault.

    The hardware is this machine's if it has a GPU, or if the run is set to use none: a run that is checked on a laptop
    is trained elsewhere.
    """
    from surefit.facts.environment import environment_facts
    from surefit.facts.hardware import hardware_facts
    from surefit.facts.stack import stack_facts
    from surefit.importers.trl import apply_row_columns
    from surefit.stages.advising import advise_where_too_large

    notes = [f"judged by {found.judged_by}"] if found.judged_by else []
    local_hardware = _attempt(lambda: hardware_facts("auto"), notes)
    hardware = local_hardware if local_hardware and (local_hardware.kind != "cpu" or found.setup.on_cpu) else None
    if hardware is None and found.loaded:
        notes.append("not looked at: GPU memory (no GPU on this machine)")
    model = _model(found, notes)
    rows = _rows(found, notes)
    setup = apply_row_columns(found.setup, rows[0]) if rows and found.tool == "trl" else found.setup
    resolved = resolve_other_tool_config(found, model, local_hardware, len(rows) if rows is not None else None)
    loaded = found.loaded
    context = LintContext(
        config=loaded.config if loaded else None,
        path=found.path,
        lines=loaded.lines if loaded else {},
        names=found.names,
        setup=setup,
        resolved=resolved,
        model=model,
        hardware=hardware,
        dataset=_dataset(rows),
        tokenizer=_tokenizer(setup, model, notes),
        environment=environment_facts(),
        stack=found.stack or stack_facts(),
        job=found.job,
        advice=advise_where_too_large(loaded, resolved, model, hardware),
        problems=(*found.problems, *_row_problems(found, rows), *_column_problems(found)),
    )
    return context, notes


def resolve_other_tool_config(
    found: ImportedConfig, model: ModelFacts | None, hardware: HardwareFacts | None, rows: int | None
) -> ResolvedConfig | None:
    """Return the run's decisions and steps, on one process; None if the file describes no whole run.

    Args:
        found: the imported file.
        model: None if the model is not on this machine.
        hardware: of this machine.
        rows: number of training rows, if all of them are known; packed rows are not counted.
    """
    if found.loaded is None or hardware is None:
        return None
    count = None if found.setup.packing or not found.rows_known else rows
    try:
        return resolve_config(found.loaded, model or UnknownModel(), hardware, count)
    except SureFitError:
        # Batch sizes that do not divide are BAT001's finding.
        return None


def _attempt(look: Callable[[], T], notes: list[str]) -> T | None:
    try:
        return look()
    except SureFitError as error:
        notes.append(f"not looked at: {error.where or 'the machine'}: {error.message}")
        return None


def _model(found: ImportedConfig, notes: list[str]) -> ModelFacts | None:
    from surefit.facts.hub import PATIENCE_S
    from surefit.facts.model import model_facts

    name = found.setup.base_model or (found.loaded.config.model.name_or_path if found.loaded else None)
    if name is None:
        return None
    revision = found.setup.base_revision
    return _attempt(lambda: model_facts(name, None if revision == "main" else revision, PATIENCE_S), notes)


def _tokenizer(setup: Setup, model: ModelFacts | None, notes: list[str]) -> TokenizerFacts | None:
    """Return the model's tokenizer, with its chat template only if the tool formats the rows with it."""
    from surefit.facts.tokenizer import facts_of_tokenizer

    facts = _attempt(lambda: facts_of_tokenizer(model), notes) if model else None
    uses_template = (setup.conversations or setup.loss_on == "assistant") and setup.chat_template is None
    return facts if facts is None or uses_template else facts.without_template()


def _rows(found: ImportedConfig, notes: list[str]) -> Rows | None:
    """Return the training rows if they are on this machine and laid out as SureFit reads them, else None."""
    from surefit.data.read.load import load_rows
    from surefit.data.read.sources import is_local

    if found.loaded is None:
        return None
    source, split = found.loaded.config.data.train, found.loaded.config.data.split
    if not found.rows_known:
        notes.append(f"not looked at: the rows of {source}, for SureFit reads them differently or not all of them")
        return None
    if not is_local(source) or not (os.path.exists(source) or source.startswith("surefit/")):
        notes.append(f"not looked at: the rows of {source} (not on this machine)")
        return None
    return _attempt(lambda: load_rows(source, split=split), notes)


def _dataset(rows: Rows | None) -> Any:
    from surefit.facts.dataset import dataset_facts

    return dataset_facts(rows.source, rows, rows.where, expected=()) if rows else None


def _row_problems(found: ImportedConfig, rows: Rows | None) -> list[SureFitError]:
    """Return the errors of converting a sample of the rows to examples."""
    from surefit import recipes
    from surefit.data.rows.sampling import sample_examples

    if rows is None or found.loaded is None:
        return []
    try:
        sample_examples(rows, recipes.get_recipe("chat"), found.loaded.config.data)
    except SureFitError as error:
        return [error]
    return []


def _column_problems(found: ImportedConfig) -> list[SureFitError]:
    """Return an error for each column that the file names and the rows on this machine do not have."""
    from surefit.core.errors import did_you_mean
    from surefit.data.read.load import load_rows
    from surefit.importers.columns import named_columns

    problems: list[SureFitError] = []
    columns: dict[str, list[str]] = {}
    for column in named_columns(found):
        if column.source not in columns:
            rows = _attempt(partial(load_rows, column.source), []) if os.path.isfile(column.source) else None
            columns[column.source] = sorted(rows.columns) if rows else []
        existing = columns[column.source]
        if found.tool == "python" and not get_close_matches(column.column, existing, n=1, cutoff=SLIP):
            continue  # a script may ask for a column that only some data sets have
        if existing and column.column not in existing:
            problems.append(
                ConfigError(
                    f"the rows of {column.source} have no column {column.column!r}"
                    f"{did_you_mean(column.column, existing)}",
                    code="E1020",
                    path=found.path,
                    line=found.line(column.key),
                    field=column.key,
                    help=f"their columns are {', '.join(existing)}",
                )
            )
    return problems
