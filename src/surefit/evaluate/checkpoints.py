"""Every checkpoint of a run on the held-out rows: which is the best, and whether its lead is more than chance.

Any number of processes may do this at once, on one machine or many, while training still runs: each takes the next
checkpoint that nobody has scored or is scoring (the claim is a lock of the kernel, so it ends with the process), and
each writes the summary of all that is there when it is done, so that the last one's is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from surefit.checkpoint import manager
from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.core.lock import DirectoryInUse, hold_lock
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import RunDir, write_atomic, write_json
from surefit.data.rows.layouts import Examples
from surefit.data.rows.shorten import build_prompt_cutter
from surefit.evaluate.answers import GRAMMAR, checkpoint_step
from surefit.evaluate.curve import draw_checkpoint_curve
from surefit.evaluate.distributed import score_distributed
from surefit.evaluate.generation_settings import GenerationSettings, list_generation_settings
from surefit.evaluate.inference import LocalModel
from surefit.evaluate.paired import paired_differences
from surefit.evaluate.record import ResultStore
from surefit.evaluate.rows import EvalRows, require_scorable, select_eval_rows
from surefit.evaluate.settings import require_evaluation_settings
from surefit.evaluate.variants import CheckpointModel
from surefit.parallel.process_group import World, all_gather, run_on_rank0
from surefit.task import Scores, TaskRecipe

SET = "eval"
CONFIDENCE = 0.95
"""That the best is not called better than any of the others by chance: shared out between the comparisons."""


def score_checkpoints(
    config: Config,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    held_out: Examples,
    on_progress: OnProgress = ignore_progress,
    world: World | None = None,
) -> dict[str, Any]:
    """Score each checkpoint as the variant step-N; write eval/eval/step-N.json with its predictions, and
    eval/checkpoints.json and .svg.

    What has been scored already, of the same weights in the same way, is kept, also where the checkpoint is gone.
    Checkpoints that come while this runs are scored too; one that goes is passed over and named. None is deleted.

    Args:
        config: nothing in it is "auto"; where answers are scored with and without a grammar, without.
        recipe: judges the answers.
        hardware: where the model is loaded; there is one, which gets the weights of each checkpoint in turn.
        held_out: the rows.
        on_progress: called with (rows done, rows, what is being scored).
        world: the processes that share the rows; all of them call this, and the first writes.

    Returns:
        As in eval/checkpoints.json, with "passed_over": what this call did not score, and why.

    Raises:
        ConfigError: there is no checkpoint, or settings exclude each other.
        DataError: a row cannot be scored.
        ModelError: a checkpoint is not one of this model.
        MachineError: not enough GPU memory, or the disk.
    """
    world = world or World()
    rows = run_on_rank0(world, partial(_rows, config, recipe, run, held_out))
    way = list_generation_settings(config, recipe)[0]
    queue = _Queue(ResultStore(config, recipe, run), way, rows)
    opened: CheckpointModel | None = None
    while (taken := run_on_rank0(world, queue.take)) is not None:
        path, sha256, before, total = taken
        opened = opened or CheckpointModel(config, hardware, run)
        if not all(all_gather(opened.become(path), world)):
            queue.gone(path)
            continue
        name = way.of(path.name)
        kept = queue.files.kept(SET, path.name, way, sha256, world.rank)
        respondent = LocalModel(opened.model, opened.tokenizer, recipe, build_prompt_cutter(config, opened.tokenizer))
        part = _part_of(on_progress, before * len(rows), total * len(rows), name)
        scored = score_distributed(name, respondent, recipe, rows, way, kept, world, part)
        if world.is_first:
            queue.files.write(SET, scored)
            kept.forget()
            queue.release()
    found = run_on_rank0(world, partial(write_checkpoint_scores, queue.files, way, rows))
    return found | {"passed_over": run_on_rank0(world, lambda: queue.passed_over)}


def _rows(config: Config, recipe: TaskRecipe, run: RunDir, held_out: Examples) -> EvalRows:
    require_evaluation_settings(config.evaluate, recipe)
    if not manager.list_steps(run.checkpoints) and not any((run.eval / SET).glob("step-*.json")):
        raise ConfigError(
            "there is no checkpoint in this run yet",
            code="E7008",
            path=run.checkpoints,
            help="`surefit train` writes them; checkpoint.save_total_limit says how many are kept",
        )
    rows = select_eval_rows(SET, held_out, config.evaluate.max_examples)
    require_scorable(rows, recipe, config.evaluate.samples)
    return rows


def _part_of(on_progress: OnProgress, before: int, total: int, label: str) -> OnProgress:
    return lambda done, _, text: on_progress(before + done, total, f"{label} {text}".rstrip())


class _Queue:
    """The checkpoints that are still to be scored, for the first process of a call; others may be at work beside it.

    Attributes:
        passed_over: what was not scored, with the reason.
    """

    def __init__(self, files: ResultStore, way: GenerationSettings, rows: EvalRows) -> None:
        self.files, self.way, self.rows = files, way, rows
        self.passed_over: list[str] = []
        self._seen: set[str] = set()
        self._done = 0
        self._claim = contextlib.ExitStack()

    def take(self) -> tuple[Path, str | None, int, int] | None:
        """The next one, claimed, with its identity, how many were done before and how many there are."""
        for path in self._unseen():
            self._seen.add(path.name)
            try:
                self._claim.enter_context(hold_lock(self._lock(path), "evaluate --all-checkpoints"))
            except DirectoryInUse:
                self.passed_over.append(f"{path.name}: another process is scoring it")
                continue
            if self._is_scored(path):
                self._done += 1
            elif fault := manager.find_checkpoint_damage(path, hashes=True):
                self.passed_over.append(f"{path.name}: {fault if path.is_dir() else GONE}")
            else:
                waiting = sum(1 for _ in self._unseen())
                return path, self.files.identity(path.name), self._done, self._done + 1 + waiting
            self.release(done=False)
        return None

    def _unseen(self) -> Iterator[Path]:
        found = manager.list_steps(self.files.run.checkpoints)
        return (path for _, path in found if path.name not in self._seen)

    def _is_scored(self, path: Path) -> bool:
        name = self.way.of(path.name)
        return isinstance(self.files.read(SET, name, self.way.settings, self.rows), tuple)

    def _lock(self, path: Path) -> Path:
        return self.files.run.eval / SET / f".{path.name}.lock"

    def release(self, done: bool = True) -> None:
        """Let go of the claim."""
        self._done += done
        self._claim.close()

    def gone(self, path: Path) -> None:
        """A checkpoint that was taken is no longer there."""
        self.passed_over.append(f"{path.name}: {GONE}")
        self.release(done=False)


GONE = "deleted before it was scored (training keeps checkpoint.save_total_limit of them)"


def write_checkpoint_scores(files: ResultStore, way: GenerationSettings, rows: EvalRows) -> dict[str, Any]:
    """Write eval/checkpoints.json and .svg of all scores that are there, one process at a time; returns the first."""
    run = files.run
    with hold_lock(run.eval / ".checkpoints.lock", "evaluate --all-checkpoints", wait=True):
        found = _summary(files, way, rows)
        write_json(run.eval / "checkpoints.json", found)
        if found["checkpoints"]:
            write_atomic(run.eval / "checkpoints.svg", draw_checkpoint_curve(found))
    return found


def _summary(files: ResultStore, way: GenerationSettings, rows: EvalRows) -> dict[str, Any]:
    recipe, metric = files.recipe, files.recipe.primary_metric
    points: list[dict[str, Any]] = []
    scores: dict[str, list[Scores]] = {}
    left_out = []
    for variant in _scored_steps(files.run, way):
        read = files.read(SET, variant, way.settings, rows)
        if isinstance(read, str):
            left_out.append(f"{variant}: {read}")
        elif read is not None:
            record, lines = read
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
    """The variants that are checkpoints and were asked in this way, by step."""
    names = [path.name.removesuffix(".json") for path in (run.eval / SET).glob("step-*.json")]
    mine = [
        name for name in names if checkpoint_step(name) is not None and name.endswith(GRAMMAR) == bool(way.constrained)
    ]
    return sorted(mine, key=lambda name: checkpoint_step(name) or 0)


def _point(variant: str, record: Mapping[str, Any], metric: str, run: RunDir) -> dict[str, Any]:
    about = {key: record[key] for key in ("truncated", "unparsed")}
    step = checkpoint_step(variant)
    there = (run.checkpoints / f"step-{step}").is_dir()
    return {"step": step, "variant": variant, **_estimate(record, metric), **about, "there": there}


def _estimate(record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    found: Mapping[str, Any] = record["metrics"][metric]
    return {"mean": found["mean"], "ci95": found["ci95"]}


def _best(
    points: Sequence[Mapping[str, Any]], scores: Mapping[str, list[Scores]], recipe: TaskRecipe
) -> dict[str, Any] | None:
    """The highest mean (of equals the earlier), and its lead over every other one.

    As many comparisons as there are others are made, and all have to hold at once: each has an interval of confidence
    1 − 0.05 / others (Bonferroni).
    """
    if not points:
        return None
    best = max(points, key=lambda point: (point["mean"], -point["step"]))["variant"]
    others = [point["variant"] for point in points if point["variant"] != best]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    over = []
    for other in others:
        found = paired_differences(other, best, scores[other], scores[best], recipe, confidence)[recipe.primary_metric]
        lead = {"difference": found.difference, "interval": [found.low, found.high], "more_than_chance": found.low > 0}
        over.append({"variant": other, **lead, "wins": found.wins, "losses": found.losses, "ties": found.ties})
    sure = all(one["more_than_chance"] for one in over) if over else None
    return {"variant": best, "confidence": confidence, "over": over, "more_than_chance": sure}
