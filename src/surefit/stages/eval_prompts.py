"""A quick look at the rows that will be scored, before anything is started. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from surefit.core.errors import DataError, SureFitError
from surefit.stages.run_sources import RunSources
from surefit.task import task_of

if TYPE_CHECKING:
    from surefit.config.schema import SureFitConfig
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.data.rows.template_checks import TimedTemplateCheck
    from surefit.facts.eval_prompts import EvalPromptFacts
    from surefit.facts.tokenizer import TokenizerFacts
    from surefit.task import Example, TaskRecipe


def list_eval_sources(config: SureFitConfig) -> dict[str, str]:
    """Return the scored sets by config key: a separate file of held-out rows, and those in `evaluate.extra_sets`."""
    held_out = {"data.eval": config.data.eval} if isinstance(config.data.eval, str) else {}
    return held_out | {f"evaluate.extra_sets.{name}": source for name, source in config.evaluate.extra_sets.items()}


def load_eval_prompt_facts(
    config: SureFitConfig,
    recipe: TaskRecipe | None,
    rows: Rows | None,
    train: Examples | None,
    tokenizer: TokenizerFacts | None,
    mixed: Mapping[str, Rows] | None = None,
    *,
    counted: bool = False,
    look: bool = False,
    kept: dict[str, Rows] | None = None,
    shared: TimedTemplateCheck | None = None,
    sources: RunSources | None = None,
) -> tuple[EvalPromptFacts | None, list[SureFitError]]:
    """Return the facts of the evaluation prompts and the errors of those sets that are on this machine: errors of
    reading them and of converting a sample, and tokens that the tokenizer lacks. There are no facts without a recipe,
    or if there are errors.

    Args:
        rows: the training rows, of which the held-out ones may be a share; train: examples of some of them.
        mixed: the rows of `data.mix` that are on this machine, by source.
        counted: always tokenize the prompts (`data.rows.eval_prompts.measure_eval_prompts`).
        look: read only a sample of large sets (`data.read.quick_sample`).
        kept: filled with the rows of each set that was read, by config key.
        shared: renders a sample of each set.
        sources: reads the sets.
    """
    from surefit.data.rows.eval_prompts import measure_eval_prompts
    from surefit.data.rows.sample_checks import find_missing_template, find_unknown_tokens
    from surefit.facts.eval_prompts import EvalPromptFacts

    problems: list[SureFitError] = []
    sources = sources or RunSources()
    sets = []
    if config.data.share:
        split_rows = rows_to_split(config, recipe, rows, mixed or {})
        total = sum(source_rows.total for source_rows in split_rows) if split_rows else 0
        held_out = max(1, round(config.data.share * total)) if total else None
        examples = (
            train
            if split_rows is None or recipe is None or len(split_rows) == 1
            else _sample_examples(config, recipe, split_rows)
        )
        sets.append(measure_eval_prompts("eval", held_out, examples, config, tokenizer, counted=counted))
    for key, source in list_eval_sources(config).items():
        try:
            set_rows, examples = _read(config, recipe, key, source, rows if key == "data.eval" else None, look, sources)
        except SureFitError as error:
            error.about(key)
            problems.append(error)
            continue
        if kept is not None and set_rows is not None:
            kept[key] = set_rows
        count = None if set_rows is None else set_rows.total
        if examples is not None:
            problems += find_unknown_tokens(config, key, source, examples, tokenizer)
            problems += find_missing_template(key, source, examples, tokenizer)
            problems += shared.problems(key, source, examples) if shared else []
        name = "eval" if key == "data.eval" else key.removeprefix("evaluate.extra_sets.")
        sets.append(measure_eval_prompts(name, count, examples, config, tokenizer, counted=counted))
    if recipe is None or problems:
        return None, problems
    ranked, likelihood = recipe.choices is not None, recipe.measures_likelihood
    return EvalPromptFacts(tuple(sets), ranked, likelihood, recipe.free_text), problems


def rows_to_split(
    config: SureFitConfig, recipe: TaskRecipe | None, rows: Rows | None, mixed: Mapping[str, Rows]
) -> list[Rows] | None:
    """Return the rows that a share `data.eval` is held out of: the training rows and, with several tasks in one run,
    each source of `data.mix`, which may contain all rows of a task. None where not all of them are on this machine.
    """
    has_parts = recipe is not None and recipe.parts
    if rows is None or (has_parts and len(mixed) < len(config.data.mix)):
        return None
    return [rows, *mixed.values()] if has_parts else [rows]


def _sample_examples(config: SureFitConfig, recipe: TaskRecipe, sources: Sequence[Rows]) -> list[Example] | None:
    """Return examples of a sample of all sources, in proportion to their size; None where it cannot be converted, which
    other code reports.
    """
    from surefit.data.rows.layouts import to_examples
    from surefit.data.rows.sampling import SAMPLED_TEXT, sample_rows

    section, total = config.data, sum(source_rows.total for source_rows in sources)
    samples = [sample_rows(rows, rows.total / total, SAMPLED_TEXT // len(sources)) for rows in sources]
    with contextlib.suppress(SureFitError):
        return [
            example for sample in samples for example in to_examples(sample, recipe, section.format, section.bad_rows)
        ]
    return None


def _read(
    config: SureFitConfig,
    recipe: TaskRecipe | None,
    key: str,
    source: str,
    train: Rows | None,
    look: bool,
    sources: RunSources,
) -> tuple[Rows | None, Examples | None]:
    """Return (rows, examples of a sample of them); (None, None) for a set on the hub."""
    from surefit.data.read.load import require_distinct_rows
    from surefit.data.read.quick_sample import read_quick_sample
    from surefit.data.read.sources import is_local
    from surefit.data.rows.layouts import load_held_out, recipe_of_scored_rows
    from surefit.data.rows.sampling import sample_examples

    section = config.data
    if not is_local(source):
        return None, None
    load = partial(load_held_out, source, section.split, train, sources.load_rows)
    rows = read_quick_sample(source, section.split, load) if look else load()
    if rows is None:
        return None, None
    require_distinct_rows(rows, train, source)
    if recipe is None:
        return rows, None
    if key == "data.eval" and (missing := tasks_without_rows(recipe, key, [rows])):
        raise missing[0]
    if key.startswith("evaluate.extra_sets."):
        recipe = recipe_of_scored_rows(recipe, rows.columns)
    return rows, sample_examples(rows, recipe, section)


def tasks_without_rows(recipe: TaskRecipe, key: str, sources: Sequence[Rows]) -> list[SureFitError]:
    """Return an error for each task of a mixed recipe that no row of these sources belongs to; a row's columns decide
    its task.
    """
    if any(rows.total > len(rows) for rows in sources):
        return []  # a sample cannot prove that a task has no rows
    task_names: set[str] = set()
    layouts: set[tuple[str, ...]] = set()
    for row in (row for rows in sources for row in rows) if recipe.parts else ():
        layout = tuple(name for name, value in row.items() if value is not None)
        if layout not in layouts:
            layouts.add(layout)
            with contextlib.suppress(DataError):  # the conversion of the row reports this
                task_names.add(task_of(layout, recipe.parts).name)
    purpose = "to train on" if key == "data.train" else "held out"
    help_text = "add its rows to data.mix, or name a directory that contains them"
    if key == "data.eval":
        help_text = "name a directory with rows of every task, or a share such as 0.1, which is taken from every source"
    return [
        DataError(f"{name} has no rows {purpose}", code="E8032", field=key, help=help_text)
        for name in recipe.parts
        if name not in task_names
    ]
