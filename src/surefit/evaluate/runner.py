"""Every variant of a run answers the same held-out prompts, and every answer counts.

The denominator is the number of rows: an answer that does not parse, or that the token limit cut, is a row with the
recipe's zeros, never one that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import RunDir, write_json
from surefit.data.rows.layouts import Examples
from surefit.data.rows.shorten import build_prompt_cutter
from surefit.evaluate.answers import BASELINE, checkpoint_step
from surefit.evaluate.distributed import score_distributed
from surefit.evaluate.gate import require_reference
from surefit.evaluate.generation_settings import list_generation_settings
from surefit.evaluate.inference import LocalModel, PromptModel, ServerModel
from surefit.evaluate.judging import score_baseline
from surefit.evaluate.record import ResultStore
from surefit.evaluate.rows import EvalRows, require_scorable, select_eval_rows
from surefit.evaluate.settings import require_evaluation_settings
from surefit.evaluate.summary import summarize_evaluation
from surefit.evaluate.variants import SERVED, open_variants, select_variants
from surefit.parallel.process_group import World, run_on_rank0
from surefit.task import TaskRecipe


def score_variants(
    config: Config,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    sets: Mapping[str, Examples],
    variants: Sequence[str] | None = None,
    on_progress: OnProgress = ignore_progress,
    world: World | None = None,
) -> dict[str, Any]:
    """Score variants on sets; write eval/SET/VARIANT.json with its predictions, and eval/summary.json.

    Killed, it goes on where it was when it is called again: answers are kept as they come. The summary also holds what
    earlier calls scored, where it is still comparable: the same model, rows, recipe version and settings. What is not
    is named under "left_out". Scores of another recipe, on other rows or with other settings are never overwritten:
    they are moved to eval/earlier/ and named under "set_aside".

    Args:
        config: nothing in it is "auto".
        recipe: judges the answers.
        hardware: where the models are loaded, one at a time; base and adapter are one model.
        sets: name → rows, "eval" (the held-out rows) among them.
        variants: which to score now; all of the run's kind by default.
        on_progress: called with (rows done, rows, what is being scored).
        world: the processes that share the rows; all of them call this, and the first writes.

    Returns:
        The summary, as in eval/summary.json. Its "gate" is None, or says whether it passed and why.

    Raises:
        ConfigError: a variant that this run does not have (yet), settings that exclude each other, or a gate on what
            the recipe does not give.
        DataError: a set is empty, or a row cannot be scored.
        GateError: merged/ is not the model that its certificate was given for.
        MachineError: not enough GPU memory, the disk, or the server.
    """
    world = world or World()
    chosen, picked = run_on_rank0(world, partial(_select_variants_and_rows, config, recipe, run, sets, variants))
    files = ResultStore(config, recipe, run, [name for name in chosen if checkpoint_step(name) is not None])
    if world.is_first:
        files.set_aside_other_recipes()
        _score_baselines(files, recipe, picked, config.evaluate.samples)
    asked = list_generation_settings(config, recipe)
    total, done = len(chosen) * len(asked) * sum(len(rows) for rows in picked.values()), 0
    for variant, respondent in open_prompt_models(config, recipe, hardware, run, chosen):
        model = run_on_rank0(world, partial(files.identity, variant))
        for way in asked:
            for name, rows in picked.items():
                name_now = way.of(variant)
                kept = files.kept(name, variant, way, model, world.rank)
                part = _part_of(on_progress, done, total, f"{name_now} on {name}")
                scored = score_distributed(name_now, respondent, recipe, rows, way, kept, world, part)
                if world.is_first:
                    files.write(name, scored)
                    kept.forget()
                done += len(rows)
        del respondent  # the next variant needs the memory
    return run_on_rank0(world, partial(_write_summary, files, picked))


def _select_variants_and_rows(
    config: Config, recipe: TaskRecipe, run: RunDir, sets: Mapping[str, Examples], variants: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, EvalRows]]:
    """The variants and the rows, once it is clear that they can be scored."""
    require_evaluation_settings(config.evaluate, recipe)
    if config.evaluate.gate:
        require_reference(config.evaluate.gate, recipe)
    chosen = select_variants(config, run, variants)
    picked = {name: select_eval_rows(name, examples, config.evaluate.max_examples) for name, examples in sets.items()}
    for rows in picked.values():
        require_scorable(rows, recipe, config.evaluate.samples)
    return chosen, picked


def _score_baselines(files: ResultStore, recipe: TaskRecipe, picked: Mapping[str, EvalRows], samples: int) -> None:
    for name, rows in picked.items():
        for baseline in recipe.baselines:
            if not files.has(name, BASELINE + baseline, rows):
                files.write(name, score_baseline(baseline, recipe, rows, samples))


def _write_summary(files: ResultStore, picked: Mapping[str, EvalRows]) -> dict[str, Any]:
    """eval/summary.json, written."""
    scored, about, left_out = files.comparable(picked)
    summary = summarize_evaluation(
        files.recipe, files.config.evaluate.gate, scored, left_out, files.run, files.set_aside
    )
    for name, found in about.items():
        summary["sets"][name]["answers"] = found
        if unanswered := picked[name].unanswered:
            summary["sets"][name]["unanswered"] = unanswered
    write_json(files.run.eval_summary, summary)
    return summary


def open_prompt_models(
    config: Config, recipe: TaskRecipe, hardware: HardwareLike, run: RunDir, chosen: Sequence[str]
) -> Iterator[tuple[str, PromptModel]]:
    """(variant, what answers for it), one after the other. Let go of each before asking for the next: it is a model."""
    for name, model, tokenizer in open_variants(config, hardware, run, chosen):
        yield name, LocalModel(model, tokenizer, recipe, build_prompt_cutter(config, tokenizer))
        del model
    if SERVED in chosen:
        from surefit.generate.server import ServedModel

        assert config.evaluate.server is not None  # `select_variants` has looked
        yield (
            SERVED,
            ServerModel(ServedModel(config.evaluate.server, switches=config.evaluate.chat_template_kwargs), recipe),
        )


def _part_of(on_progress: OnProgress, before: int, total: int, label: str) -> OnProgress:
    return lambda done, _, text: on_progress(before + done, total, f"{label} {text}".rstrip())
