"""Held-out loss and task scores measured during training, and whether they still improve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from surefit.checkpoint import best
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, did_you_mean
from surefit.parallel.engine import SINGLE, Engine
from surefit.parallel.process_group import run_on_rank0
from surefit.telemetry.jsonl import MetricsLog
from surefit.telemetry.memory import PhaseMemory
from surefit.train.batches import MicroBatcher
from surefit.train.signals import StopRequest
from surefit.train.step import CROSS_ENTROPY, Objective, measure

BETWEEN = "between_checkpoints"
"""Key of a metrics.jsonl line that was measured between checkpoints."""
ScoreFunction = Callable[[Any], Mapping[str, float]]
"""Computes the task's scores of the model by generation: metric → value. May leave the model in evaluation mode."""


class HeldOutEvaluation:
    """Held-out loss of a run, measured at its checkpoints and, if set, between them; and the task's scores at
    checkpoints, if set.

    Args:
        model: the trained model; its mode (training or evaluation) is restored after a measurement.
        batches: batches of the held-out rows; without rows nothing is measured.
        config: resolved: no setting is "auto".
        log: metrics.jsonl.
        memory: gets the phase "eval" during a measurement.
        score: computes the task's scores, on rank 0 only; None for none.
        engine: execution engine, which distributes the rows over processes.
        objective: what the loss is; the metrics of a preference objective are measured with it.

    Attributes:
        lines: log lines of all measurements of the run, those before a resume included.
        at_checkpoints: the lines that were measured at a checkpoint and so can select the best one.
        metric: metric that selects the best checkpoint and decides early stopping.

    Raises:
        ConfigError: `checkpoint.metric_for_best_model` names something that is not measured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batches: MicroBatcher,
        config: SureFitConfig,
        log: MetricsLog,
        memory: PhaseMemory,
        score: ScoreFunction | None = None,
        engine: Engine = SINGLE,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:
        self.engine, self.objective = engine, objective
        self.model, self.batches, self.log, self.memory, self.score = model, batches, log, memory, score
        self.chunked, self.patience = config.speed.chunked_loss, config.train.early_stopping_patience
        self.metric = config.checkpoint.metric_for_best_model or "eval_loss"
        self.lines: list[dict[str, Any]] = []
        self.at_checkpoints: list[dict[str, Any]] = []
        known = config.objective.always_measured
        if self.metric not in known and (score is None or self.metric in best.LOSSES):
            raise ConfigError(
                f"{self.metric} is not measured during training",
                code="E5102",
                field="checkpoint.metric_for_best_model",
                help="set evaluate.in_training: true for a metric of the recipe, or metric_for_best_model: "
                f"{' or '.join(known)}",
            )

    @property
    def loss(self) -> float | None:
        """Newest held-out loss, in nats per token; None before the first measurement."""
        return self.lines[-1]["eval_loss"] if self.lines else None

    @property
    def step(self) -> int | None:
        """Optimizer steps done when the newest held-out loss was measured; None before the first measurement."""
        return self.lines[-1]["step"] if self.lines else None

    @property
    def stopped_improving(self) -> bool:
        """Return whether `train.early_stopping_patience` measurements in a row were no better than the best before
        them."""
        points = best.eval_points(self.lines, self.metric)
        return self.patience is not None and best.count_evals_since_best(points, self.metric) >= self.patience

    def is_measured(self, step: int) -> bool:
        """Return whether the newest measurement in the log is the one after `step`."""
        return bool(self.lines) and self.lines[-1]["step"] == step

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Restore the measurements from the log lines that a resumed run keeps."""
        for line in lines:
            if "eval_loss" in line:
                self._note(dict(line))

    def _note(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if BETWEEN not in line:
            self.at_checkpoints.append(line)

    def measure(self, step: int, stop: StopRequest, at_checkpoint: bool = True) -> None:
        """Measure the held-out loss and log it; skipped on a stop request, since the resumed run measures it then.

        Args:
            at_checkpoint: whether an uninterrupted run also has a checkpoint at this step; otherwise only the loss is
                measured, and it does not count for the best checkpoint.
        """
        with self.memory.during("eval"):
            rank_batches = self.batches.all(self.engine.data_rank)
            measured = measure(
                self.model,
                rank_batches,
                stop.agreed,
                chunked=self.chunked,
                engine=self.engine,
                objective=self.objective,
            )
            if measured is None:
                return
            scores = self._scores() if at_checkpoint else {BETWEEN: True}
        loss, tokens, metrics = measured
        # The loss of pairs is no mean log-probability, so that it has no perplexity.
        more: dict[str, float] = {"eval_perplexity": perplexity(loss)}
        if metrics:
            more = {"eval_pairs": self.batches.examples} if self.batches.answers > 1 else {}
            more |= {f"eval_{name}": value for name, value in metrics.items()}
        line = {"step": step, "eval_loss": loss, "eval_tokens": tokens, **more}
        self._note(self.log.append(dict(scores) | line))

    def _scores(self) -> Mapping[str, float]:
        was_training = self.model.training
        score = self.score
        scores = run_on_rank0(self.engine.world, lambda: score(self.model)) if score is not None else {}
        self.model.train(was_training)  # otherwise the rest of the run would train without dropout
        if self.metric not in {*best.LOSSES, *scores}:
            raise ConfigError(
                f"{self.metric} was not measured; available: {', '.join([*best.LOSSES, *scores])}"
                + did_you_mean(self.metric, scores),
                code="E5103",
                field="checkpoint.metric_for_best_model",
                help="name one of these; --resume continues from the checkpoint that was just written",
            )
        return scores


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
