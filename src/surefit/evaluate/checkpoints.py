"""Scores every checkpoint of a run on the held-out rows: which one is best, and whether its lead is significant.

Any number of processes may do this at once, on one machine or many, while training still runs: each takes the next
checkpoint that no process has scored or is scoring (the claim is a kernel lock, so it ends with the process), and each
writes the summary of all existing scores when it is done, so that the last summary is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from surefit.checkpoint.files import find_checkpoint_damage, list_steps
from surefit.config.resolve import HardwareLike
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.core.lock import DirectoryInUse, hold_lock
from surefit.core.progress import OnProgress, ignore_progress, offset_progress
from surefit.core.rundir import RunDir, write_atomic, write_json
from surefit.data.rows.layouts import Examples
from surefit.data.rows.shorten import build_prompt_cutter
from surefit.evaluate.answers import GRAMMAR, checkpoint_step
from surefit.evaluate.curve import draw_checkpoint_curve
from surefit.evaluate.distributed import score_distributed
from surefit.evaluate.free_text import choose_metric
from surefit.evaluate.generation_settings import GenerationSettings, list_generation_settings
from surefit.evaluate.inference import LocalModel
from surefit.evaluate.likelihood import pair_with_other_prompts
from surefit.evaluate.paired import paired_differences
from surefit.evaluate.record import ResultStore
from surefit.evaluate.rows import EvalRows, require_scorable, select_eval_rows
from surefit.evaluate.settings import require_evaluation_settings
from surefit.evaluate.variants import CheckpointModel
from surefit.parallel.process_group import World, all_gather, run_on_rank0
from surefit.task import Scores, TaskRecipe

SET = "eval"
CONFIDENCE = 0.95
"""Confidence that none of the best checkpoint's significant leads is due to chance; divided among the comparisons."""


def score_checkpoints(
    config: SureFitConfig,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    held_out: Examples,
    on_progress: OnProgress = ignore_progress,
    world: World | None = None,
) -> dict[str, Any]:
    """Score each checkpoint as the variant step-N; write eval/eval/step-N.json with its predictions, and
    eval/checkpoints.json and .svg.

    Existing scores of the same weights and settings are kept, even if the checkpoint has been deleted. Checkpoints that
    are written meanwhile are scored, too; one that is deleted meanwhile is skipped and listed. This deletes none.

    Args:
        config: resolved: no setting is "auto"; if it scores with and without a grammar, only without is used.
        recipe: scores the answers.
        hardware: hardware that the model is loaded on, once; it gets the weights of each checkpoint in turn.
        held_out: the held-out rows.
        on_progress: called with (rows done, rows, variant).
        world: the processes that share the rows; all of them call this, and rank 0 writes.

    Returns:
        The content of eval/checkpoints.json, with "passed_over": the checkpoints not scored, with the reasons.

    Raises:
        ConfigError: there is no checkpoint, or settings contradict each other.
        DataError: a row cannot be scored.
        ModelError: a checkpoint belongs to another model.
        MachineError: not enough GPU memory, or a disk error.
    """
    world = world or World()
    rows = run_on_rank0(world, partial(_rows, config, recipe, run, held_out))
    recipe = choose_metric(recipe, rows.examples).recipe
    settings = list_generation_settings(config, recipe)[0]
    queue = _Queue(ResultStore(config, recipe, run), settings, rows)
    checkpoint_model: CheckpointModel | None = None
    while (claimed := run_on_rank0(world, queue.take)) is not None:
        path, sha256, done, total = claimed
        checkpoint_model = checkpoint_model or CheckpointModel(config, hardware, run)
        if not all(all_gather(checkpoint_model.become(path), world)):
            queue.gone(path)
            continue
        name = settings.of(path.name)
        cache = queue.files.kept(SET, path.name, settings, sha256, world.rank)
        respondent = LocalModel(
            checkpoint_model.model,
            checkpoint_model.tokenizer,
            recipe,
            build_prompt_cutter(config, checkpoint_model.tokenizer),
            config.data.max_length,
            reads_pairs=config.answering == config.model,
        )
        report_progress = offset_progress(on_progress, done * len(rows), total * len(rows), name)
        result = score_distributed(name, respondent, recipe, rows, settings, cache, world, report_progress)
        if world.is_first:
            queue.files.write(SET, result)
            cache.forget()
            queue.release()
    summary = run_on_rank0(world, partial(write_checkpoint_scores, queue.files, settings, rows))
    return summary | {"passed_over": run_on_rank0(world, lambda: queue.passed_over)}


def _rows(config: SureFitConfig, recipe: TaskRecipe, run: RunDir, held_out: Examples) -> EvalRows:
    require_evaluation_settings(config.evaluate, recipe)
    if not list_steps(run.checkpoints) and not any((run.eval / SET).glob("step-*.json")):
        raise ConfigError(
            "this run has no checkpoint yet",
            code="E7008",
            path=run.checkpoints,
            help="`surefit train` writes them; checkpoint.save_total_limit sets how many are kept",
        )
    rows = select_eval_rows(SET, held_out, config.evaluate.max_examples)
    require_scorable(rows, recipe, config.evaluate.samples)
    return pair_with_other_prompts(rows) if recipe.measures_likelihood else rows


class _Queue:
    """The checkpoints that are still to be scored, for rank 0 of a call; other calls may run at the same time.

    Attributes:
        passed_over: checkpoints that were not scored, with the reasons.
    """

    def __init__(self, files: ResultStore, way: GenerationSettings, rows: EvalRows) -> None:
        self.files, self.way, self.rows = files, way, rows
        self.passed_over: list[str] = []
        self._seen: set[str] = set()
        self._done = 0
        self._claim = contextlib.ExitStack()

    def take(self) -> tuple[Path, str | None, int, int] | None:
        """Claim the next checkpoint; return its path, its identity, the number scored before and the total. None if
        none is left."""
        for path in self._unseen():
            self._seen.add(path.name)
            try:
                self._claim.enter_context(hold_lock(self._lock(path), "evaluate --all-checkpoints"))
            except DirectoryInUse:
                self.passed_over.append(f"{path.name}: another process is scoring it")
                continue
            if self._is_scored(path):
                self._done += 1
            elif fault := find_checkpoint_damage(path, hashes=True):
                self.passed_over.append(f"{path.name}: {fault if path.is_dir() else GONE}")
            else:
                remaining = sum(1 for _ in self._unseen())
                return path, self.files.identity(path.name), self._done, self._done + 1 + remaining
            self.release(done=False)
        return None

    def _unseen(self) -> Iterator[Path]:
        checkpoints = list_steps(self.files.run.checkpoints)
        return (path for _, path in checkpoints if path.name not in self._seen)

    def _is_scored(self, path: Path) -> bool:
        name = self.way.of(path.name)
        return isinstance(self.files.read(SET, name, self.way.settings, self.rows), tuple)

    def _lock(self, path: Path) -> Path:
        return self.files.run.eval / SET / f".{path.name}.lock"

    def release(self, done: bool = True) -> None:
        """Release the claim."""
        self._done += done
        self._claim.close()

    def gone(self, path: Path) -> None:
        """Record that a claimed checkpoint no longer exists, and release it."""
        self.passed_over.append(f"{path.name}: {GONE}")
        self.release(done=False)


GONE = "deleted before it was scored (training keeps checkpoint.save_total_limit of them)"


def write_checkpoint_scores(files: ResultStore, way: GenerationSettings, rows: EvalRows) -> dict[str, Any]:
    """Write eval/checkpoints.json and .svg from all existing scores, one process at a time; return the content of the
    JSON file."""
    run = files.run
    with hold_lock(run.eval / ".checkpoints.lock", "evaluate --all-checkpoints", wait=True):
        summary = _summary(files, way, rows)
        write_json(run.eval / "checkpoints.json", summary)
        if summary["checkpoints"]:
            write_atomic(run.eval / "checkpoints.svg", draw_checkpoint_curve(summary))
    return summary


def _summary(files: ResultStore, way: GenerationSettings, rows: EvalRows) -> dict[str, Any]:
    recipe, metric = files.recipe, files.recipe.primary_metric
    points: list[dict[str, Any]] = []
    scores: dict[str, list[Scores]] = {}
    left_out = []
    for variant in _scored_steps(files.run, way):
        stored = files.read(SET, variant, way.settings, rows)
        if isinstance(stored, str):
            left_out.append(f"{variant}: {stored}")
        elif stored is not None:
            record, lines = stored
            points.append(_point(variant, record, metric, files.run))
            scores[variant] = [line["scores"] for line in lines]
    base = files.read(SET, way.of("base"), way.settings, rows)
    return {
        "set": SET,
        "metric": metric,
        "n": len(rows),
        "decoding": way.settings,
        "checkpoints": points,
        "base": _estimate(base[0], metric) if isinstance(base, tuple) else None,
        "best": _best(points, scores, recipe),
        "left_out": left_out,
    }


def _scored_steps(run: RunDir, way: GenerationSettings) -> list[str]:
    """Return the scored checkpoint variants with these generation settings, sorted by step."""
    names = [path.name.removesuffix(".json") for path in (run.eval / SET).glob("step-*.json")]
    matching = [
        name for name in names if checkpoint_step(name) is not None and name.endswith(GRAMMAR) == bool(way.constrained)
    ]
    return sorted(matching, key=lambda name: checkpoint_step(name) or 0)


def _point(variant: str, record: Mapping[str, Any], metric: str, run: RunDir) -> dict[str, Any]:
    counts = {key: record[key] for key in ("truncated", "unparsed")}
    step = checkpoint_step(variant)
    exists = (run.checkpoints / f"step-{step}").is_dir()
    return {"step": step, "variant": variant, **_estimate(record, metric), **counts, "there": exists}


def _estimate(record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    estimate: Mapping[str, Any] = record["metrics"][metric]
    return {"mean": estimate["mean"], "ci95": estimate["ci95"]}


def _best(
    points: Sequence[Mapping[str, Any]], scores: Mapping[str, list[Scores]], recipe: TaskRecipe
) -> dict[str, Any] | None:
    """Return the checkpoint with the highest mean (the earlier one if equal), and its lead over every other one.

    It is compared with each of the others, and all comparisons must hold at once: each has an interval of confidence
    1 − 0.05 / others (Bonferroni).
    """
    if not points:
        return None
    best = max(points, key=lambda point: (point["mean"], -point["step"]))["variant"]
    other_variants = [point["variant"] for point in points if point["variant"] != best]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(other_variants))
    comparisons = []
    for variant in other_variants:
        diff = paired_differences(variant, best, scores[variant], scores[best], recipe, confidence)[
            recipe.primary_metric
        ]
        lead = {"difference": diff.difference, "interval": [diff.low, diff.high], "more_than_chance": diff.low > 0}
        comparisons.append({"variant": variant, **lead, "wins": diff.wins, "losses": diff.losses, "ties": diff.ties})
    all_significant = all(comparison["more_than_chance"] for comparison in comparisons) if comparisons else None
    return {"variant": best, "confidence": confidence, "over": comparisons, "more_than_chance": all_significant}
