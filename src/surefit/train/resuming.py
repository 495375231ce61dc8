"""Restoring a checkpoint: the newest one on resume, or the best one at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefit.checkpoint import manager
from surefit.core.rundir import read_jsonl
from surefit.parallel.engine import Engine
from surefit.parallel.process_group import run_on_rank0
from surefit.train.identity import HELD_OUT, build_run_identity, changed_settings, require_same, require_same_held_out
from surefit.train.optim import MasterOptimizer
from surefit.train.progress import Counters

if TYPE_CHECKING:
    from surefit.train.loop import Trainer


def resume_from_latest(job: Trainer) -> int | None:
    """Restore a run from its newest complete checkpoint, and return the checkpoint's step; None if there is none.

    Every process reads the checkpoint and keeps its own share. The number of processes may differ from the one that
    wrote it: which rows a step sees does not depend on it.

    Raises:
        ConfigError: the checkpoint belongs to other settings.
        ModelError: it belongs to another model, or all checkpoints are damaged.
    """
    latest = job.saving.latest()
    if latest.path is None:
        return None
    state = manager.load_checkpoint(latest.path)
    _require_same_identity(job, state)
    restore_optimizer_and_weights(state, job.optimizer, job.engine, latest.path)
    job.optimizer.load_tensors(
        job.engine.shares(state.optimizer, parameters_for_state(state.optimizer, job.optimizer.parameters))
    )
    if job.scaling is not None:
        job.scaling.restore(state.trainer["loss_scale"])
    job.counters = Counters(**state.trainer["counters"])
    for line in run_on_rank0(job.engine.world, lambda: job.log.rewind(latest.step)):
        if "loss" in line and not line["rejected"]:
            job.loss = line["loss"]
        job.held_out.remember([line])
    changes = changed_settings(state.trainer, job.config, job.engine.name, job.engine.data_size)
    for change in manager.changed_versions(latest.path) + changes:
        job.note(f"{change}: the last bits may differ from an uninterrupted run")
    if job.engine.world.is_first:
        job.run.note("train", "resumed", step=latest.step, skipped=[path.name for path, _ in latest.skipped])
    return latest.step


def require_resumable(job: Trainer) -> None:
    """Raise if the newest complete checkpoint belongs to other settings; nothing is restored.

    Raises:
        ConfigError, ModelError: as `resume_from_latest`.
    """
    if (path := job.saving.latest().path) is not None:
        _require_same_identity(job, manager.load_checkpoint(path))


def _require_same_identity(job: Trainer, state: manager.CheckpointState) -> None:
    now = build_run_identity(job.config, job.survey, job.held_out_survey, job.total_steps)
    run_on_rank0(job.engine.world, lambda: _require_same_run(job, state.trainer["identity"], now))


def _require_same_run(job: Trainer, before: dict[str, Any], now: dict[str, Any]) -> None:
    require_same(before, now, job.run.path)
    if HELD_OUT not in before and job.run.metrics.exists():
        require_same_held_out(read_jsonl(job.run.metrics), job.held_out_survey, job.run.path)


def load_best_checkpoint(job: Trainer) -> int | None:
    """Load the weights of the best checkpoint by `checkpoint.metric_for_best_model`, and return its step; None without
    one."""
    best = job.saving.best_complete()
    if best is None:
        return None
    score, path = best
    restore_optimizer_and_weights(manager.load_checkpoint(path), job.optimizer, job.engine, path)
    job.note(f"exporting step {score.step}, the best by {job.held_out.metric}: {score.value:.4f}")
    return score.step


def restore_optimizer_and_weights(
    state: manager.CheckpointState, optimizer: MasterOptimizer, engine: Engine, path: Path
) -> None:
    """Copy a checkpoint's weights into the model, or this process's share of them."""
    weights = engine.shares(state.weights, optimizer.parameters)
    manager.restore_weights(manager.CheckpointState(weights, {}, {}), optimizer.parameters, path)


def parameters_for_state(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the parameter that each tensor of an optimizer, named `KEY.PARAMETER_NAME`, belongs to; tensors without
    one are omitted."""
    owners = {name: parameters.get(name.partition(".")[2]) for name in tensors}
    return {name: owner for name, owner in owners.items() if owner is not None}
