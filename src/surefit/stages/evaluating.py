"""The stage `evaluate`: scores of each variant of a run's model on the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefit.core.errors import ConfigError
from surefit.stages.concluding import report_stage_to_trackers
from surefit.stages.events import lock_and_record_stage, require_trained
from surefit.stages.placing import require_inputs_apart
from surefit.stages.progress_listener import ProgressListener
from surefit.stages.run_context import CheckedRun, load_held_out_examples

if TYPE_CHECKING:
    from surefit.config.schema import SureFitConfig
    from surefit.core.rundir import RunDir
    from surefit.data.rows.layouts import Examples
    from surefit.parallel.process_group import World


def evaluate_run(
    run: CheckedRun, watcher: ProgressListener, variants: Sequence[str] | None = None, world: World | None = None
) -> dict[str, Any] | None:
    """Score the variants on the held-out rows and on the sets of `evaluate.extra_sets`.

    Args:
        variants: the variants to score; by default all for the run's training method.
        world: the processes that share the rows; only the first one writes and reports.

    Returns:
        The content of eval/summary.json; None in processes that are not the first.

    Raises:
        ConfigError: nothing is trained yet, and the trained model was requested; or there is no row to score.
    """
    from surefit.evaluate.runner import score_variants
    from surefit.parallel.process_group import World, run_on_rank0

    world = world or World()
    run_on_rank0(world, lambda: require_inputs_apart(run, run.run.eval))
    config = run_on_rank0(world, lambda: evaluation_config(run, variants))
    with (
        report_stage_to_trackers(run.run, "evaluate", watcher, config.telemetry, world.is_first),
        lock_and_record_stage(watcher, run.run, "evaluate", world.is_first),
        watcher.progress("evaluating") as on_progress,
    ):
        sets = run_on_rank0(world, lambda: load_eval_sets(run))
        summary = score_variants(config, run.recipe, run.hardware, run.run, sets, variants or None, on_progress, world)
    return summary if world.is_first else None


def evaluation_config(run: CheckedRun, variants: Sequence[str] | None) -> SureFitConfig:
    """Return the config to score these variants with: without a gate if it would have nothing to judge.

    Raises:
        ConfigError: nothing is trained yet, and the trained model was requested.
    """
    config = run.resolved.config
    if is_trained_model_scored(variants):
        require_trained(run.run, run.loaded.path)
    elif not _has_scored_result(run.run):
        return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"gate": None})})
    return config


def _has_scored_result(run: RunDir) -> bool:
    """Return whether answers of a trained model already exist, beside which others are scored."""
    return any((run.eval / "eval" / f"{name}.predictions.jsonl").exists() for name in ("adapter", "merged", "model"))


def is_trained_model_scored(variants: Sequence[str] | None) -> bool:
    """Return whether the final trained model is to be scored; the base and checkpoints exist without it."""
    from surefit.evaluate.answers import checkpoint_step

    return not variants or any(name != "base" and checkpoint_step(name) is None for name in variants)


def require_held_out(config: SureFitConfig, what: str) -> None:
    """Raise if no rows are held out.

    Raises:
        ConfigError: nothing is held out, so there are no rows for `what`.
    """
    if config.data.holds_nothing_out:
        raise ConfigError(
            f"no rows are held out (data.eval is 0), so there are none for {what}",
            code="E8700",
            field="data.eval",
            help="name a file with rows that were not used for training: --set data.eval=test.jsonl",
        )


def load_eval_sets(run: CheckedRun) -> dict[str, Examples]:
    """Load the rows to score: "eval", if any are held out, and the sets of `evaluate.extra_sets`.

    Raises:
        ConfigError: there is neither, or a gate has no held-out rows.
    """
    from surefit.data.read.load import load_rows
    from surefit.data.rows.layouts import recipe_of_scored_rows, to_examples, without_undesirable
    from surefit.data.rows.reasoning import apply_reasoning_mode
    from surefit.data.tokens.dataset import drop_untokenizable, eval_key
    from surefit.model.tokenizer import load_tokenizer

    config = run.resolved.config
    if config.evaluate.gate or not config.evaluate.extra_sets:
        require_held_out(config, "evaluate.gate" if config.evaluate.gate else "scoring")
    tokenizer = load_tokenizer(config.model) if config.data.bad_rows == "skip" else None
    sets: dict[str, Examples] = {}
    if not config.data.holds_nothing_out:
        sets["eval"] = without_undesirable(load_held_out_examples(run))
    for name, source in config.evaluate.extra_sets.items():
        rows = load_rows(source, split=config.data.split)
        recipe = recipe_of_scored_rows(run.recipe, rows.columns)
        examples = to_examples(rows, recipe, config.data.format, config.data.bad_rows)
        sets[name] = without_undesirable(apply_reasoning_mode(examples, config.data.thinking))
    if tokenizer is None:
        return sets
    keys = {name: f"evaluate.extra_sets.{name}" for name in sets} | {"eval": eval_key(config.data)}
    return {
        name: drop_untokenizable(examples, tokenizer, config.data.bad_rows, keys[name])
        for name, examples in sets.items()
    }
