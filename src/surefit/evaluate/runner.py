"""Evaluation of a run: every variant answers the same held-out prompts, and every answer counts.

The denominator is the number of rows: an answer that does not parse, or that the token limit truncated, gets the
recipe's zero scores and is never omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from surefit.config.resolve import HardwareLike
from surefit.config.schema import SureFitConfig
from surefit.core.progress import OnProgress, ignore_progress, offset_progress
from surefit.core.rundir import RunDir, write_json
from surefit.data.rows.layouts import Examples
from surefit.data.rows.shorten import build_prompt_cutter
from surefit.evaluate.answers import BASELINE, base_variant, checkpoint_step
from surefit.evaluate.distributed import score_distributed
from surefit.evaluate.free_text import MetricChoice, choose_metric, describe_fit
from surefit.evaluate.gate import require_reference
from surefit.evaluate.generation_settings import list_generation_settings
from surefit.evaluate.inference import LocalModel, PromptModel, ServerModel
from surefit.evaluate.judging import score_baseline
from surefit.evaluate.likelihood import pair_with_other_prompts
from surefit.evaluate.record import ResultStore, VariantResult
from surefit.evaluate.rewards import add_rewards, reference_rows, summarize_pairs
from surefit.evaluate.rows import EvalRows, require_scorable, select_eval_rows
from surefit.evaluate.settings import require_evaluation_settings
from surefit.evaluate.show_more import suggest_more
from surefit.evaluate.summary import summarize_evaluation
from surefit.evaluate.variants import SERVED, open_variants, select_variants
from surefit.parallel.process_group import World, run_on_rank0
from surefit.task import Scores, TaskRecipe


def score_variants(
    config: SureFitConfig,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    sets: Mapping[str, Examples],
    variants: Sequence[str] | None = None,
    on_progress: OnProgress = ignore_progress,
    world: World | None = None,
) -> dict[str, Any]:
    """Score variants on sets; write eval/SET/VARIANT.json with its predictions, and eval/summary.json.

    After a kill the next call continues, because answers are cached as they are generated. The summary also contains
    the scores of earlier calls that are still comparable: same model, rows, recipe version and settings. The others are
    listed under "left_out". Scores of another recipe, other rows or other settings are never overwritten: they are
    moved to eval/earlier/ and listed under "set_aside".

    Args:
        config: resolved: no setting is "auto".
        recipe: scores the answers.
        hardware: hardware that the models are loaded on, one at a time; base and adapter are one model.
        sets: name → rows, "eval" (the held-out rows) included.
        variants: variants to score now; by default all of the run's training method.
        on_progress: called with (rows done, rows, variant and set).
        world: the processes that share the rows; all of them call this, and rank 0 writes.

    Returns:
        The summary, as in eval/summary.json. Its "gate" is None, or says whether it passed and why.

    Raises:
        ConfigError: a variant that this run does not have (yet), settings that contradict each other, or a gate on a
            metric that the recipe lacks.
        DataError: a set is empty, or a row cannot be scored.
        GateError: merged/ is not the model that its certificate was given for.
        MachineError: not enough GPU memory, a disk error, or a server error.
    """
    world = world or World()
    selected, rows_by_set = run_on_rank0(world, partial(select_variants_and_rows, config, recipe, run, sets, variants))
    choices = {
        name: choose_metric(recipe, rows.examples, bool(config.evaluate.server)) for name, rows in rows_by_set.items()
    }
    files = ResultStore(config, recipe, run, [name for name in selected if checkpoint_step(name) is not None])
    if world.is_first:
        files.set_aside_other_recipes()
        _score_baselines(files, recipe, rows_by_set, config.evaluate.samples)
    all_settings = list_generation_settings(config, recipe)
    total, done = len(selected) * len(all_settings) * sum(len(rows) for rows in rows_by_set.values()), 0
    for variant, respondent in open_prompt_models(config, recipe, hardware, run, selected):
        model = run_on_rank0(world, partial(files.identity, variant))
        for settings in all_settings:
            for name, rows in rows_by_set.items():
                label = settings.of(variant)
                cache = files.kept(name, variant, settings, model, world.rank)
                report_progress = offset_progress(on_progress, done, total, f"{label} on {name}")
                result = score_distributed(label, respondent, recipe, rows, settings, cache, world, report_progress)
                if world.is_first:
                    result = _with_rewards(files, name, result, rows)
                    files.write(name, result, choices[name].recipe.primary_metric)
                    cache.forget()
                done += len(rows)
        del respondent  # the next variant needs the memory
    return run_on_rank0(world, partial(_write_summary, files, rows_by_set, choices))


def select_variants_and_rows(
    config: SureFitConfig, recipe: TaskRecipe, run: RunDir, sets: Mapping[str, Examples], variants: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, EvalRows]]:
    """Return the variants and the rows of each set, after checking that they can be scored.

    Raises:
        ConfigError: a variant that this run does not have (yet), or settings that contradict each other.
        DataError: a set is empty, or a row cannot be scored.
    """
    require_evaluation_settings(config.evaluate, recipe)
    if config.evaluate.gate:
        require_reference(config.evaluate.gate, recipe)
    selected = select_variants(config, run, variants)
    rows_by_set = {
        name: select_eval_rows(name, examples, config.evaluate.max_examples) for name, examples in sets.items()
    }
    for rows in rows_by_set.values():
        require_scorable(rows, recipe, config.evaluate.samples)
    if recipe.measures_likelihood:
        rows_by_set = {name: pair_with_other_prompts(rows) for name, rows in rows_by_set.items()}
    return selected, rows_by_set


def _with_rewards(files: ResultStore, name: str, result: VariantResult, rows: EvalRows) -> VariantResult:
    """Return a variant's result with the rewards of its pairs; unchanged for a run on single answers."""
    config = files.config
    if not config.objective.paired:
        return result
    scores = [line["scores"] for line in result.lines]
    before = base_variant(result.variant)
    stored = files.read_current(name, before, rows) if result.variant != before else None
    base = None if stored is None else [line["scores"] for line in stored]
    told = add_rewards(config.objective, scores, reference_rows(config, files.run, name, result.variant, scores, base))
    lines = [line | {"scores": row} for line, row in zip(result.lines, told, strict=True)]
    return replace(result, lines=lines)


def _rewarded(files: ResultStore, name: str, variants: Mapping[str, list[Scores]]) -> dict[str, list[Scores]]:
    """Return the scores of a set's variants with the rewards of its pairs."""
    config, found = files.config, {}
    for variant, rows in variants.items():
        base = variants.get(base_variant(variant))
        found[variant] = add_rewards(
            config.objective, rows, reference_rows(config, files.run, name, variant, rows, base)
        )
    return found


def _score_baselines(files: ResultStore, recipe: TaskRecipe, picked: Mapping[str, EvalRows], samples: int) -> None:
    for name, rows in picked.items():
        for baseline in recipe.baselines:
            if not files.has(name, BASELINE + baseline, rows):
                files.write(name, score_baseline(baseline, recipe, rows, samples))


def _write_summary(
    files: ResultStore, picked: Mapping[str, EvalRows], choices: Mapping[str, MetricChoice]
) -> dict[str, Any]:
    """Write eval/summary.json, and return its content."""
    scores, answer_counts, left_out = files.comparable(picked)
    if files.config.objective.paired:  # again: the base may have been scored after the model
        scores = {name: _rewarded(files, name, variants) for name, variants in scores.items()}
    recipes = {name: choice.recipe for name, choice in choices.items()}
    gate, decided = files.config.evaluate.gate, recipes.get("eval", files.recipe)
    summary = summarize_evaluation(decided, gate, scores, left_out, files.run, files.set_aside, recipes)
    for name, counts in answer_counts.items():
        found = summary["sets"][name]
        found["answers"] = counts
        if pairs := summarize_pairs(files.config, scores[name]):
            found["pairs"] = pairs
        if unanswered := picked[name].unanswered:
            found["unanswered"] = unanswered
        if fit := describe_fit(choices[name], scores[name], found["variants"], found["comparisons"]):
            show_more = suggest_more(found, fit, files.run, files.config.evaluate.max_new_tokens)
            found["fit"] = fit | {"show_more": show_more}
    write_json(files.run.eval_summary, summary)
    return summary


def open_prompt_models(
    config: SureFitConfig, recipe: TaskRecipe, hardware: HardwareLike, run: RunDir, chosen: Sequence[str]
) -> Iterator[tuple[str, PromptModel]]:
    """Yield (variant, model that answers for it). Drop each before the next one is requested: it holds a model in
    memory."""
    for name, model, tokenizer in open_variants(config, hardware, run, chosen):
        cut, as_trained = build_prompt_cutter(config, tokenizer), config.answering == config.model
        yield name, LocalModel(model, tokenizer, recipe, cut, config.data.max_length, reads_pairs=as_trained)
        del model
    if SERVED in chosen:
        from surefit.generate.server import ServedModel

        assert config.evaluate.server is not None  # `select_variants` has checked
        yield (
            SERVED,
            ServerModel(ServedModel(config.evaluate.server, switches=config.evaluate.chat_template_kwargs), recipe),
        )
