"""The stage `check`: every rule over all facts of a run. Torch-free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit import __version__
from surefit.core.errors import EXIT_ENVIRONMENT, DataError, GateError, SureFitError
from surefit.core.units import plural
from surefit.stages.advising import advise_where_too_large
from surefit.stages.eval_prompts import (
    list_eval_sources,
    load_eval_prompt_facts,
    rows_to_split,
    tasks_without_rows,
)
from surefit.stages.run_context import RunContext, count_training_rows, point_at_config

if TYPE_CHECKING:
    from surefit.config.load import LoadedConfig
    from surefit.config.schema import SureFitConfig
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.data.rows.template_checks import TimedTemplateCheck
    from surefit.facts.audit import AuditFacts, Observation
    from surefit.facts.dataset import DatasetFacts
    from surefit.facts.examples import ExampleFacts
    from surefit.facts.tokenizer import TokenizerFacts
    from surefit.lint.rule import Rule
    from surefit.task import TaskRecipe


TRIED_ROWS = 8
"""Rows that a proposed recipe must convert."""


def run_check(found: RunContext, rules: Sequence[Rule] | None = None) -> dict[str, Any]:
    """Run these rules, or all, and return the content of check.json."""
    from surefit.data.rows.special_tokens import SPECIAL
    from surefit.data.rows.template_checks import TimedTemplateCheck
    from surefit.facts.audit import AuditFacts
    from surefit.facts.environment import environment_facts
    from surefit.facts.setup import setup_of
    from surefit.facts.stack import stack_facts
    from surefit.lint.engine import run_rules
    from surefit.lint.rule import LintContext

    start = time.monotonic()
    loaded, recipe, rows = found.loaded, found.recipe, found.rows
    columns = recipe.columns_in(rows.columns if rows else ()) if recipe else ()
    tokenizer, tokenizer_errors = load_tokenizer_facts(found)
    sample, data_errors = _sample(found)
    sample_size = len(sample or ())
    shared = TimedTemplateCheck(tokenizer, loaded.config, 1 + len(found.mixed) + len(list_eval_sources(loaded.config)))
    sample, rendered, render_errors = _render_sample(found, sample, tokenizer, shared)
    data_errors += render_errors
    examples, example_errors = _examples(found, sample, tokenizer)
    if rows is not None and recipe is not None:
        data_errors += tasks_without_rows(recipe, "data.train", [rows, *found.mixed.values()])
    mix_errors = check_mixed_rows(found, tokenizer, sampled=True, shared=shared)
    tokenize_prompts = loaded.config.evaluate.in_training
    other_rows: dict[str, Rows] = {f"data.mix.{source}": source_rows for source, source_rows in found.mixed.items()}
    eval_facts, eval_errors = load_eval_prompt_facts(
        loaded.config,
        recipe,
        rows,
        sample,
        tokenizer,
        found.mixed,
        counted=tokenize_prompts,
        look=found.looked,
        kept=other_rows,
        shared=shared,
        sources=found.sources,
    )
    for error in (*mix_errors, *eval_errors):
        point_at_config(error, loaded)
    if tokenizer_errors:  # a chat template that cannot be used is reported already
        mix_errors, eval_errors = (
            [error for error in errors if error.code != "E4352"] for errors in (mix_errors, eval_errors)
        )
    audit = _audit(rows, other_rows, loaded.config, recipe) if rows else None
    if audit is None and shared.seen:
        audit = AuditFacts(loaded.config.data.train, 0, 0)
    if audit is not None:
        observations = {**audit.observations, **rendered, **_leaks(found, other_rows)}
        audit = replace(audit, observations=observations, others=shared.seen)
    context = LintContext(
        config=loaded.config,
        path=loaded.path,
        lines=loaded.lines,
        overridden=loaded.overridden,
        setup=setup_of(loaded.config, found.resolved),
        resolved=found.resolved,
        model=found.model,
        hardware=found.hardware,
        tokenizer=tokenizer,
        dataset=_dataset(found, columns),
        examples=examples,
        scored=eval_facts,
        audit=audit,
        environment=environment_facts(),
        stack=stack_facts(),
        columns=columns,
        metrics=recipe.metrics if recipe else (),
        baselines=tuple(recipe.baselines) if recipe else (),
        advice=advise_where_too_large(loaded, found.resolved, found.model, found.hardware, found),
        problems=(*found.problems, *tokenizer_errors, *data_errors, *example_errors, *mix_errors, *eval_errors),
    )
    result = run_rules(context, rules)
    report = result.as_dict()
    report["findings"] = [_point_at_tool_file(finding, loaded) for finding in report["findings"]]
    if SPECIAL in rendered:
        report["rendered"] = {"rows": rendered[SPECIAL].of, "of": sample_size}
    return {"surefit": __version__, "seconds": time.monotonic() - start, **report}


def _point_at_tool_file(finding: dict[str, Any], loaded: LoadedConfig) -> dict[str, Any]:
    """Redirect a finding about a value from another tool's file to that file, because the config cannot fix it."""
    position = loaded.adopted.get(finding["field"] or "")
    if position is None:
        return finding
    location, _, key = position.partition(" ")
    name, _, line = location.partition(":")
    parallel = loaded.config.parallel
    files = [file for file in (parallel.accelerate_config, parallel.deepspeed_config) if file is not None]
    path = next((file for file in files if Path(file).name == name), name)
    help_text = f"{finding['field']} comes from {position}: change it there, or remove {key or 'it'}"
    return finding | {"path": path, "line": int(line) if line else None, "help": help_text, "fix": None}


def _audit(rows: Rows, others: Mapping[str, Rows], config: SureFitConfig, recipe: TaskRecipe | None) -> AuditFacts:
    """Audit a sample of the training rows, and observe the conventions of the other sources; not with several tasks,
    each of which has conventions of its own.
    """
    from surefit.data.audit.sample import audit_sample, observe_conventions

    has_parts = recipe is not None and recipe.parts
    conventions = (
        {}
        if has_parts
        else {key: observe_conventions(source_rows, config.recipe) for key, source_rows in others.items()}
    )
    return replace(audit_sample(rows, config.recipe), conventions=conventions)


def _leaks(found: RunContext, others: Mapping[str, Rows]) -> dict[str, Observation]:
    """Find scored rows whose prompt is in the training rows, if both were read whole."""
    from surefit.data.audit.leaks import LEAK, find_leaks

    if found.rows is None or found.recipe is None:
        return {}
    eval_rows = {key: rows for key, rows in others.items() if not key.startswith("data.mix.")}
    leak = find_leaks(found.rows, eval_rows, found.recipe, found.loaded.config.data.format)
    return {} if leak is None else {LEAK: leak}


def _dataset(found: RunContext, columns: Sequence[str]) -> DatasetFacts | None:
    """Return the facts of the training rows, and their number including `data.mix`."""
    from surefit.facts.dataset import dataset_facts

    config, recipe, rows = found.loaded.config, found.recipe, found.rows
    if not rows:
        return None
    facts = dataset_facts(rows.source, rows, rows.where, expected=None if recipe and recipe.parts else columns)
    count, mixed_rows = count_training_rows(config, rows, found.mixed)
    split_rows = rows_to_split(config, recipe, rows, found.mixed)
    return replace(
        facts,
        rows=rows.total,
        epoch_rows=None if count is None else count + round(mixed_rows),
        divided=None if split_rows is None else sum(source_rows.total for source_rows in split_rows),
    )


def load_tokenizer_facts(found: RunContext) -> tuple[TokenizerFacts | None, list[SureFitError]]:
    """Return the facts of the tokenizer, if it is on this machine, and the errors of reading it."""
    from surefit.facts.chat_template import require_tokens
    from surefit.facts.tokenizer import facts_of_tokenizer

    try:
        facts = facts_of_tokenizer(found.model) if found.model else None
    except SureFitError as error:
        return None, [error]
    if facts is not None:
        try:
            vocabulary = facts.added if facts.file is not None else None
            require_tokens(found.loaded.config.model.chat_template, vocabulary, facts.eos_token)
        except SureFitError as error:  # this error explains more than the rules' findings on the template
            return facts.without_template(), [error]
    return facts, []


def _sample(found: RunContext) -> tuple[Examples | None, list[SureFitError]]:
    """Convert a sample of the rows to examples; also return the errors."""
    from surefit.data.rows.reasoning import apply_reasoning_mode
    from surefit.data.rows.sampling import sample_examples

    if found.rows is None or found.recipe is None:
        return None, []
    section = found.loaded.config.data
    try:
        sample = sample_examples(found.rows, found.recipe, section)
        return apply_reasoning_mode(sample, section.thinking), []
    except SureFitError as error:
        _name_the_recipe(error, found.rows, found.recipe)
        return None, [error]


def _render_sample(
    found: RunContext, sample: Examples | None, tokenizer: TokenizerFacts | None, shared: TimedTemplateCheck
) -> tuple[Examples | None, Mapping[str, Observation], list[SureFitError]]:
    """Return the sample without the rows that the chat template cannot render, the observations on the rendered ones,
    and an error for the others unless they may be skipped.
    """
    from surefit.data.rows.layouts import SKIP_ROWS_HELP
    from surefit.data.rows.template_checks import build_template_error, drop_unrenderable, observe_skipped_rows
    from surefit.data.rows.unread_fields import find_unread_columns

    if sample is None or found.rows is None or found.recipe is None:
        return sample, {}, []
    config = found.loaded.config
    check = shared.at(sample)
    observations = {
        **check.observations,
        **find_unread_columns(found.rows, found.recipe, config.data.format, tokenizer),
        **_pair_observations(found.rows, sample, found.recipe.column_names),
    }
    renderable_sample = drop_unrenderable(sample, check)
    problem = build_template_error(check, sample, found.rows.source, SKIP_ROWS_HELP)
    if config.data.bad_rows == "skip" and renderable_sample:
        return renderable_sample, observations | observe_skipped_rows(renderable_sample), []
    return renderable_sample or None, observations, [problem] if problem else []


def _pair_observations(rows: Rows, sample: Examples, names: Mapping[str, str]) -> Mapping[str, Observation]:
    """Return the observations on the sample's pairs of answers, and on its labelled ones; none where it has none."""
    from surefit.data.audit.labelled import observe_labels
    from surefit.data.audit.pairs import observe_pairs
    from surefit.data.rows.sampling import sample_rows

    sampled = sample_rows(rows)
    return observe_pairs(sample, sampled, sampled.where, names) | observe_labels(sample)


def _examples(
    found: RunContext, sample: Examples | None, tokenizer: TokenizerFacts | None
) -> tuple[ExampleFacts | None, list[SureFitError]]:
    """Return the facts of the sample, and its errors."""
    from surefit.data.rows.sample_checks import (
        example_facts,
        find_missing_documents,
        find_split_problems,
        find_unknown_tokens,
    )

    if sample is None:
        return None, []
    config = found.loaded.config
    problems: list[SureFitError] = [
        *find_missing_documents(config.data, sample),
        *(find_split_problems(config, sample, found.rows.total) if found.rows is not None else ()),
        *find_unknown_tokens(config, "data.train", config.data.train, sample, tokenizer),
    ]
    return example_facts(sample, tokenizer, config.data.max_length), problems


def _name_the_recipe(error: SureFitError, rows: Rows, recipe: TaskRecipe) -> None:
    """Prepend advice to an error if the rows are another recipe's, not this one's; or name their columns."""
    from surefit.data.rows.other_layouts import names_text, propose_names

    columns = rows.columns
    recipe_columns = recipe.columns_in(columns)
    fitting_recipe = find_fitting_recipe(columns, rows)
    if fitting_recipe not in (None, recipe.name, *recipe.parts) and not (
        recipe_columns and all(column in columns for column in recipe_columns)
    ):
        advice = f"these columns belong to another recipe: write recipe: {fitting_recipe}"
        error.help = f"{advice}; {error.help}" if error.help else advice
    elif error.field == "data.format" and not recipe_columns:
        with contextlib.suppress(DataError):  # two speakers of whom none is known to be the assistant
            if names := propose_names(rows):
                error.help = names_text(names)


def find_fitting_recipe(columns: Sequence[str], rows: Rows | None = None) -> str | None:
    """Return the recipe whose own columns are all present, or the general one if they fit a known layout.

    Args:
        rows: rows that the recipe must read too: `question` and `answer` alone do not make a GSM8K problem.
    """
    from surefit import recipes
    from surefit.data.rows.layouts import LAYOUTS

    for name in recipes.list_recipes():
        recipe_columns = recipes.get_recipe(name).columns_in(columns)
        if recipe_columns and all(column in columns for column in recipe_columns) and _reads(name, rows):
            return name
    has_known_layout = any(all(column in columns for column in layout.columns) for layout in LAYOUTS.values())
    return "chat" if has_known_layout else None


def _reads(recipe_name: str, rows: Rows | None) -> bool:
    """Return whether a recipe converts a few of these rows; True without rows."""
    from surefit import recipes
    from surefit.data.rows.layouts import to_examples

    if rows is None:
        return True
    try:
        return bool(to_examples(rows.sample(TRIED_ROWS), recipes.get_recipe(recipe_name)))
    except SureFitError:
        return False


def check_mixed_rows(
    found: RunContext,
    tokenizer: TokenizerFacts | None = None,
    sampled: bool = False,
    shared: TimedTemplateCheck | None = None,
) -> list[SureFitError]:
    """Return the errors of converting the rows of `data.mix`, and of tokens that the tokenizer lacks: for all rows, or
    a sample of each source, of which `shared` renders some.
    """
    from surefit.data.rows.layouts import to_examples
    from surefit.data.rows.sample_checks import find_missing_template, find_unknown_tokens
    from surefit.data.rows.sampling import sample_examples

    problems: list[SureFitError] = []
    section = found.loaded.config.data
    if found.recipe is None:
        return problems
    for source, rows in found.mixed.items():
        key = f"data.mix.{source}"
        try:
            examples = (
                sample_examples(rows, found.recipe, section)
                if sampled
                else to_examples(rows, found.recipe, section.format, section.bad_rows)
            )
        except SureFitError as error:
            error.about(key)
            _name_the_mixed_recipe(error, rows, found.recipe)
            problems.append(error)
        else:
            problems += find_unknown_tokens(found.loaded.config, key, source, examples, tokenizer)
            problems += find_missing_template(key, source, examples, tokenizer)
            problems += shared.problems(key, source, examples) if shared else []
            if len(examples) + len(examples.skipped) == rows.total:
                problems += _check_mix_share(source, examples, found.loaded.config)
    return problems


def _check_mix_share(source: str, examples: Examples, config: SureFitConfig) -> list[SureFitError]:
    """Return the error if a source's share selects none of its rows; needs all of its rows."""
    from surefit.data.rows.layouts import add_mixed_source

    no_examples = examples.subset([])
    try:
        add_mixed_source(no_examples, examples, source, config.data.mix[source], no_examples, config.train.seed)
    except SureFitError as error:
        return [error]
    return []


def _name_the_mixed_recipe(error: SureFitError, rows: Rows, recipe: TaskRecipe) -> None:
    """Advise to name both recipes if the rows are another task's."""
    fitting_recipe = find_fitting_recipe(rows.columns, rows)
    if fitting_recipe not in (None, recipe.name, *recipe.parts):
        error.help = f"to train on both tasks in one run, write recipe: {recipe.name} + {fitting_recipe}"


class CheckFailed(GateError):
    """The check has findings of severity error; nothing was started.

    Attributes:
        findings: all findings, as in check.json.
    """

    def __init__(self, findings: Sequence[dict[str, Any]]) -> None:
        errors = [finding for finding in findings if finding["severity"] == "error"]
        super().__init__(
            f"{plural(len(errors), 'finding')} of severity error: {', '.join(sorted({e['code'] for e in errors}))}",
            help="`surefit explain CODE` explains each; nothing was started",
            code="E8042",
            also=map(_as_error, errors),
        )
        self.findings = findings
        if {error["code"] for error in errors} == {"DSK001"}:
            self.exit_code = EXIT_ENVIRONMENT  # the config is correct: the machine lacks disk space


def require_no_errors(report: dict[str, Any]) -> None:
    """Raise if the report of a check has findings of severity error.

    Raises:
        CheckFailed: it has.
    """
    if any(finding["severity"] == "error" for finding in report["findings"]):
        raise CheckFailed(report["findings"])


def _as_error(finding: dict[str, Any]) -> GateError:
    location = {key: finding[key] for key in ("path", "line", "field", "help")}
    return GateError(f"{finding['code']}: {finding['message']}", code="E8020", **location)
