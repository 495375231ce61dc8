"""The stage `check`: every rule over all that is known of a run. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit import __version__
from surefit.core.errors import EXIT_ENVIRONMENT, GateError, SureFitError
from surefit.core.units import plural
from surefit.stages.eval_prompts import (
    SAMPLED_ROWS,
    SAMPLED_TEXT,
    divided_rows,
    scored_facts,
    scored_sources,
    tasks_without_rows,
)
from surefit.stages.run_context import Gathered, row_counts

if TYPE_CHECKING:
    from surefit.config.load import Loaded
    from surefit.config.schema import Config
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.data.rows.template_checks import SharedLook
    from surefit.facts.audit import AuditFacts, Observation
    from surefit.facts.dataset import DatasetFacts
    from surefit.facts.examples import ExampleFacts
    from surefit.facts.tokenizer import TokenizerFacts
    from surefit.lint.rule import Rule
    from surefit.task import TaskRecipe


def checked(found: Gathered, rules: Sequence[Rule] | None = None) -> dict[str, Any]:
    """The content of check.json, by these rules or by all."""
    from surefit.data.rows.special_tokens import SPECIAL
    from surefit.data.rows.template_checks import SharedLook
    from surefit.facts.audit import AuditFacts
    from surefit.facts.environment import environment_facts
    from surefit.facts.setup import setup_of
    from surefit.facts.stack import stack_facts
    from surefit.lint.engine import run_rules
    from surefit.lint.rule import LintContext

    start = time.monotonic()
    loaded, recipe, rows = found.loaded, found.recipe, found.rows
    columns = recipe.columns_in(rows.columns if rows else ()) if recipe else ()
    tokenizer, damaged = tokenizer_of(found)
    sample, unusable = _sample(found)
    sampled = len(sample or ())
    shared = SharedLook(tokenizer, loaded.config, 1 + len(found.mixed) + len(scored_sources(loaded.config)))
    sample, rendered, refused = _rendered(found, sample, tokenizer, shared)
    unusable += refused
    examples, more = _examples(found, sample, tokenizer)
    if rows is not None and recipe is not None:
        unusable += tasks_without_rows(recipe, "data.train", [rows, *found.mixed.values()])
    mixed = mixed_problems(found, tokenizer, SAMPLED_ROWS, shared)
    counted = loaded.config.evaluate.in_training
    others: dict[str, Rows] = {f"data.mix.{source}": more for source, more in found.mixed.items()}
    scored, unread = scored_facts(
        loaded.config,
        recipe,
        rows,
        sample,
        tokenizer,
        found.mixed,
        counted=counted,
        look=found.looked,
        kept=others,
        shared=shared,
    )
    if damaged:  # a template that the config names and that cannot be used has been said
        mixed, unread = ([each for each in found if each.code != "E4352"] for found in (mixed, unread))
    audit = _audit(rows, others, loaded.config, recipe) if rows else None
    if audit is None and shared.seen:
        audit = AuditFacts(loaded.config.data.train, 0, 0)
    if audit is not None:
        seen = {**audit.observations, **rendered, **_leaks(found, others)}
        audit = replace(audit, observations=seen, others=shared.seen)
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
        scored=scored,
        audit=audit,
        environment=environment_facts(),
        stack=stack_facts(),
        columns=columns,
        metrics=recipe.metrics if recipe else (),
        baselines=tuple(recipe.baselines) if recipe else (),
        problems=(*found.problems, *damaged, *unusable, *more, *mixed, *unread),
    )
    result = run_rules(context, rules)
    report = result.as_dict()
    report["findings"] = [_where_it_is_said(finding, loaded) for finding in report["findings"]]
    if SPECIAL in rendered:
        report["rendered"] = {"rows": rendered[SPECIAL].of, "of": sampled}
    return {"surefit": __version__, "seconds": time.monotonic() - start, **report}


def _where_it_is_said(finding: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """Point a finding about a value that another tool's file brings in at that file: the config cannot mend it."""
    place = loaded.adopted.get(finding["field"] or "")
    if place is None:
        return finding
    where, _, key = place.partition(" ")
    name, _, line = where.partition(":")
    parallel = loaded.config.parallel
    files = [file for file in (parallel.accelerate_config, parallel.deepspeed_config) if file is not None]
    path = next((file for file in files if Path(file).name == name), name)
    help_text = f"{finding['field']} comes from {place}: change it there, or take {key or 'it'} out"
    return finding | {"path": path, "line": int(line) if line else None, "help": help_text, "fix": None}


def _audit(rows: Rows, others: Mapping[str, Rows], config: Config, recipe: TaskRecipe | None) -> AuditFacts:
    """A sample of the training rows as an audit sees them, and how the other sources are written: not where there are
    several tasks, each of which has ways of its own."""
    from surefit.data.audit.sample import conventions_of, sample_audit

    several = recipe is not None and recipe.parts
    written = {} if several else {key: conventions_of(each, config.recipe) for key, each in others.items()}
    return replace(sample_audit(rows, config.recipe), conventions=written)


def _leaks(found: Gathered, others: Mapping[str, Rows]) -> dict[str, Observation]:
    """Scored rows whose prompt is in the training rows, where both were read whole."""
    from surefit.data.audit.leaks import LEAK, leaks

    if found.rows is None or found.recipe is None:
        return {}
    scored = {key: rows for key, rows in others.items() if not key.startswith("data.mix.")}
    seen = leaks(found.rows, scored, found.recipe, found.loaded.config.data.format)
    return {} if seen is None else {LEAK: seen}


def _dataset(found: Gathered, columns: Sequence[str]) -> DatasetFacts | None:
    """The training rows in numbers, and how many there are with those of `data.mix`."""
    from surefit.facts.dataset import dataset_facts

    config, recipe, rows = found.loaded.config, found.recipe, found.rows
    if not rows:
        return None
    facts = dataset_facts(rows.source, rows, rows.where, expected=None if recipe and recipe.parts else columns)
    count, added = row_counts(config, rows, found.mixed)
    divided = divided_rows(config, recipe, rows, found.mixed)
    return replace(
        facts,
        rows=rows.total,
        epoch_rows=None if count is None else count + round(added),
        divided=None if divided is None else sum(one.total for one in divided),
    )


def tokenizer_of(found: Gathered) -> tuple[TokenizerFacts | None, list[SureFitError]]:
    """The tokenizer of a model that is on this machine, and what reading it runs into."""
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
        except SureFitError as error:  # what the rules would say of the template, this has said better
            return facts.without_template(), [error]
    return facts, []


def _sample(found: Gathered) -> tuple[Examples | None, list[SureFitError]]:
    """What a sample of the rows becomes, and what converting it runs into."""
    from surefit.data.rows.layouts import to_examples
    from surefit.data.rows.reasoning import with_thinking

    if found.rows is None or found.recipe is None:
        return None, []
    section = found.loaded.config.data
    try:
        sample = to_examples(
            found.rows.sample(SAMPLED_ROWS, SAMPLED_TEXT), found.recipe, section.format, section.bad_rows
        )
        return with_thinking(sample, section.thinking), []
    except SureFitError as error:
        _name_the_recipe(error, found.rows.columns, found.recipe)
        return None, [error]


def _rendered(
    found: Gathered, sample: Examples | None, tokenizer: TokenizerFacts | None, shared: SharedLook
) -> tuple[Examples | None, Mapping[str, Observation], list[SureFitError]]:
    """The sample without the rows that the chat template does not take, what is seen of the others once they are
    rendered, and those rows as an error, where they are not to be left out."""
    from surefit.data.rows.layouts import WAY_OUT
    from surefit.data.rows.template_checks import left_out, refused_rows, without_refused
    from surefit.data.rows.unread_fields import unread_columns

    if sample is None or found.rows is None or found.recipe is None:
        return sample, {}, []
    config = found.loaded.config
    looked = shared.at(sample)
    seen = {**looked.observations, **unread_columns(found.rows, found.recipe, config.data.format, tokenizer)}
    kept = without_refused(sample, looked)
    problem = refused_rows(looked, sample, found.rows.source, WAY_OUT)
    if config.data.bad_rows == "skip" and kept:
        return kept, seen | left_out(kept), []
    return kept or None, seen, [problem] if problem else []


def _examples(
    found: Gathered, sample: Examples | None, tokenizer: TokenizerFacts | None
) -> tuple[ExampleFacts | None, list[SureFitError]]:
    """That sample in numbers, and what is wrong with it."""
    from surefit.data.rows.sample_checks import documents_missing, example_facts, not_divisible, tokens_missing

    if sample is None:
        return None, []
    config = found.loaded.config
    problems: list[SureFitError] = [
        *documents_missing(config.data, sample),
        *(not_divisible(config, sample, found.rows.total) if found.rows is not None else ()),
        *tokens_missing(config, "data.train", config.data.train, sample, tokenizer),
    ]
    return example_facts(sample, tokenizer, config.data.max_length), problems


def _name_the_recipe(error: SureFitError, columns: Sequence[str], recipe: TaskRecipe) -> None:
    """Where the columns are another recipe's, not this one's, the advice begins with that."""
    own = recipe.columns_in(columns)
    fits = fitting_recipe(columns)
    if fits not in (None, recipe.name, *recipe.parts) and not (own and all(column in columns for column in own)):
        advice = f"these are the columns of another recipe: write recipe: {fits}"
        error.help = f"{advice}; {error.help}" if error.help else advice


def fitting_recipe(columns: Sequence[str]) -> str | None:
    """The recipe whose own columns are all there, or the general one where they fit a known layout."""
    from surefit import recipes
    from surefit.data.rows.layouts import LAYOUTS

    for name in recipes.names():
        own = recipes.get(name).columns_in(columns)
        if own and all(column in columns for column in own):
            return name
    known = any(all(column in columns for column in layout.columns) for layout in LAYOUTS.values())
    return "chat" if known else None


def mixed_problems(
    found: Gathered,
    tokenizer: TokenizerFacts | None = None,
    limit: int | None = None,
    shared: SharedLook | None = None,
) -> list[SureFitError]:
    """What converting the rows of `data.mix` runs into, and tokens that the tokenizer does not have: all of them, or up
    to `limit` of each source, of which `shared` renders some."""
    from surefit.data.rows.layouts import to_examples
    from surefit.data.rows.sample_checks import template_missing, tokens_missing

    problems: list[SureFitError] = []
    section = found.loaded.config.data
    if found.recipe is None:
        return problems
    for source, rows in found.mixed.items():
        key = f"data.mix.{source}"
        try:
            examples = to_examples(
                rows.sample(limit or len(rows), SAMPLED_TEXT if limit else None),
                found.recipe,
                section.format,
                section.bad_rows,
            )
        except SureFitError as error:
            error.about(key)
            _name_the_mixed_recipe(error, rows.columns, found.recipe)
            problems.append(error)
        else:
            problems += tokens_missing(found.loaded.config, key, source, examples, tokenizer)
            problems += template_missing(key, source, examples, tokenizer)
            problems += shared.problems(key, source, examples) if shared else []
            if len(examples) + len(examples.skipped) == rows.total:
                problems += _none_taken(source, examples, found.loaded.config)
    return problems


def _none_taken(source: str, examples: Examples, config: Config) -> list[SureFitError]:
    """What is wrong where the share of a source takes none of its rows: known once all of them are."""
    from surefit.data.rows.layouts import mix_in

    nothing = examples.subset([])
    try:
        mix_in(nothing, examples, source, config.data.mix[source], nothing, config.train.seed)
    except SureFitError as error:
        return [error]
    return []


def _name_the_mixed_recipe(error: SureFitError, columns: Sequence[str], recipe: TaskRecipe) -> None:
    """Rows of another task are mixed in by naming both."""
    fits = fitting_recipe(columns)
    if fits not in (None, recipe.name, *recipe.parts):
        error.help = f"to train on both tasks in one run, write recipe: {recipe.name} + {fits}"


class Refused(GateError):
    """Findings of severity error: nothing was started.

    Attributes:
        findings: all of them, as check.json has them.
    """

    def __init__(self, findings: Sequence[dict[str, Any]]) -> None:
        errors = [finding for finding in findings if finding["severity"] == "error"]
        super().__init__(
            f"{plural(len(errors), 'finding')} of severity error: {', '.join(sorted({e['code'] for e in errors}))}",
            help="`surefit explain CODE` says what each means; nothing was started",
            code="E8042",
            also=map(_as_error, errors),
        )
        self.findings = findings
        if {error["code"] for error in errors} == {"DSK001"}:
            self.exit_code = EXIT_ENVIRONMENT  # nothing is wrong with the config: the machine lacks space


def require_no_errors(report: dict[str, Any]) -> None:
    """Raises:
    Refused: the report of a check has findings of severity error.
    """
    if any(finding["severity"] == "error" for finding in report["findings"]):
        raise Refused(report["findings"])


def _as_error(finding: dict[str, Any]) -> GateError:
    place = {key: finding[key] for key in ("path", "line", "field", "help")}
    return GateError(f"{finding['code']}: {finding['message']}", code="E8020", **place)
