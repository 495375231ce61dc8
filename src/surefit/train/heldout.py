"""What is measured on the held-out rows while training runs, and whether it still gets better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from surefit.checkpoint import best
from surefit.config.schema import Config
from surefit.core.errors import ConfigError, did_you_mean
from surefit.parallel.engine import SINGLE, Engine
from surefit.parallel.process_group import run_on_rank0
from surefit.telemetry.jsonl import MetricsLog
from surefit.telemetry.memory import PhaseMemory
from surefit.train.batches import MicroBatcher
from surefit.train.signals import StopRequest
from surefit.train.step import mean_loss

BETWEEN = "between_checkpoints"
"""What a line of the log has if the run has no checkpoint there."""
ScoreFunction = Callable[[Any], Mapping[str, float]]
"""The task's scores of the model, by generation: metric → value. May leave the model in evaluation mode."""


class HeldOutEvaluation:
    """The held-out loss of a run, measured where its checkpoints are and, if asked for, between them; and the task's
    scores at checkpoints, where they are asked for.

    Args:
        model: left in the mode it was in.
        batches: of the held-out rows; none: nothing is measured.
        config: nothing in it is "auto".
        log: metrics.jsonl.
        memory: told when a measurement begins and ends.
        score: measures the task's scores; None leaves them out. Only the first process does.
        engine: how several processes share the rows.

    Attributes:
        lines: every measurement of the run, as the log has it; what came before a resume, too.
        at_checkpoints: those of them that may choose the best checkpoint.
        metric: what decides which checkpoint is the best and whether the run still improves.

    Raises:
        ConfigError: `checkpoint.metric_for_best_model` names something that is not measured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batches: MicroBatcher,
        config: Config,
        log: MetricsLog,
        memory: PhaseMemory,
        score: ScoreFunction | None = None,
        engine: Engine = SINGLE,
    ) -> None:
        self.engine = engine
        self.model, self.batches, self.log, self.memory, self.score = model, batches, log, memory, score
        self.chunked, self.patience = config.speed.chunked_loss, config.train.early_stopping_patience
        self.metric = config.checkpoint.metric_for_best_model or "eval_loss"
        self.lines: list[dict[str, Any]] = []
        self.at_checkpoints: list[dict[str, Any]] = []
        if self.metric not in best.LOSSES and score is None:
            raise ConfigError(
                f"{self.metric} is not measured in training",
                code="E5102",
                field="checkpoint.metric_for_best_model",
                help="set evaluate.in_training: true for a metric of the recipe, or metric_for_best_model: eval_loss",
            )

    @property
    def loss(self) -> float | None:
        """The newest held-out loss, in nats per token; None as long as there is none."""
        return self.lines[-1]["eval_loss"] if self.lines else None

    @property
    def stopped_improving(self) -> bool:
        """Whether `train.early_stopping_patience` measurements in a row were no better than the best before them."""
        found = best.eval_points(self.lines, self.metric)
        return self.patience is not None and best.count_evals_since_best(found, self.metric) >= self.patience

    def is_measured(self, step: int) -> bool:
        """Whether the log has the measurement after a step."""
        return bool(self.lines) and self.lines[-1]["step"] == step

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Go on from the lines of the log that a resumed run keeps."""
        for line in lines:
            if "eval_loss" in line:
                self._note(dict(line))

    def _note(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if BETWEEN not in line:
            self.at_checkpoints.append(line)

    def measure(self, step: int, stop: StopRequest, at_checkpoint: bool = True) -> None:
        """Log the held-out loss, unless a stop is asked for: then the resumed run does.

        Args:
            at_checkpoint: the run has a checkpoint here whether it is interrupted or not; elsewhere the loss alone is
                measured, and says nothing about which checkpoint is the best.
        """
        with self.memory.during("eval"):
            mine = self.batches.all(self.engine.data_rank)
            measured = mean_loss(self.model, mine, stop.agreed, chunked=self.chunked, engine=self.engine)
            if measured is None:
                return
            scores = self._scores() if at_checkpoint else {BETWEEN: True}
        loss, tokens = measured
        line = {"step": step, "eval_loss": loss, "eval_tokens": tokens, "eval_perplexity": perplexity(loss)}
        self._note(self.log.append(dict(scores) | line))

    def _scores(self) -> Mapping[str, float]:
        was_training = self.model.training
        score = self.score
        scores = run_on_rank0(self.engine.world, lambda: score(self.model)) if score is not None else {}
        self.model.train(was_training)  # or the rest of the run would go without dropout
        if self.metric not in {*best.LOSSES, *scores}:
            raise ConfigError(
                f"{self.metric} is not among what was measured: {', '.join([*best.LOSSES, *scores])}"
                + did_you_mean(self.metric, scores),
                code="E5103",
                field="checkpoint.metric_for_best_model",
                help="name one of these; --resume goes on from the checkpoint that was just written",
            )
        return scores


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
