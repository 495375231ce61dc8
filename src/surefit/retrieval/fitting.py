"""Training of LRURec: seeded, resumable, with weights selected on the validation items and never on the test."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefit.core.errors import MachineError, ModelError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import write_atomic
from surefit.metrics.ranking import mean_ranking
from surefit.retrieval.interactions import Interactions
from surefit.retrieval.lrurec import PAD, LRURec, LRURecSize, next_item_loss
from surefit.retrieval.ranking import RECENT, Floats, Histories, rank_items


@dataclass(frozen=True)
class FitSettings:
    """Training settings of LRURec.

    Attributes:
        learning_rate, weight_decay: AdamW's; biases and norms are not decayed.
        batch: histories per step.
        clip: the maximum gradient norm.
        averaged: decay of the exponential moving average of the weights, which is validated and kept (0: the weights
            themselves).
        most_steps, every, patience: stop after `most_steps` steps, or after `patience` validations, `every` steps
            apart, without a better NDCG@10.
        seed: seed of the initialization, the order and dropout.
    """

    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    batch: int = 16
    clip: float = 5.0
    averaged: float = 0.98
    most_steps: int = 2400
    every: int = 200
    patience: int = 2
    seed: int = 0


class LRURecRetriever:
    """A retriever around a trained model, computing on `device`."""

    def __init__(self, model: LRURec, device: str = "cpu") -> None:
        self.model, self.device = model.to(device).eval(), device

    @torch.inference_mode()
    def scores(self, histories: Histories) -> Floats:
        recent = [history[-RECENT:] or (PAD,) for history in histories]
        last = torch.tensor([len(history) - 1 for history in recent], device=self.device)
        vectors = self.model(pad_histories(recent).to(self.device))[torch.arange(len(recent), device=self.device), last]
        scores: Floats = self.model.logits(vectors).float().cpu().numpy()
        return scores


@dataclass(frozen=True)
class FitResult:
    """The result of a training: `steps` of the best validation, its scores, all validations and the seconds taken."""

    retriever: LRURecRetriever
    fitting: FitSettings
    shape: LRURecSize
    steps: int
    valid: dict[str, float]
    log: list[dict[str, float]]
    seconds: float


def fit_lrurec(
    interactions: Interactions,
    fitting: FitSettings = FitSettings(),
    shape: LRURecSize | None = None,
    device: str = "cpu",
    checkpoint: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> FitResult:
    """Train until the validation no longer improves; return the best weights.

    Args:
        shape: size of the model; by default LRURec's own for this number of items.
        checkpoint: a file that is written at every validation. If it exists, and was written by the same call on the
            same data, training continues from it, to the same result as without the interruption.
        on_progress: called after every step.

    Raises:
        MachineError: the checkpoint cannot be read.
        ModelError: the loss is NaN.
    """
    shape = shape or LRURecSize(len(interactions.items))
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        torch.manual_seed(fitting.seed)
        run = _Run(interactions, fitting, shape, device, checkpoint)
        run.go_on()
        run.train(on_progress)
    return run.fitted()


def pad_histories(histories: Sequence[Sequence[int]]) -> Tensor:
    """Return the histories as a tensor (histories, longest), padded on the right."""
    items = torch.full((len(histories), max(map(len, histories))), PAD)
    for row, history in zip(items, histories, strict=True):
        row[: len(history)] = torch.as_tensor(history)
    return items


def pieces(history: Sequence[int], length: int = RECENT) -> Iterator[tuple[int, ...]]:
    """Yield a history in pieces of at most `length` items to predict, cut from its end; each but the first also has the
    item before it, which is input only."""
    padded = (PAD, *history)
    for end in range(len(padded), 1, -length):
        yield tuple(padded[max(0, end - length - 1) : end])


class _Run:
    def __init__(
        self, interactions: Interactions, fitting: FitSettings, shape: LRURecSize, device: str, checkpoint: Path | None
    ) -> None:
        self.fitting, self.device, self.checkpoint = fitting, device, checkpoint
        self.pieces = [piece for history in interactions.trained for piece in pieces(history)]
        self.asked = interactions.questions("valid")
        self.model = LRURec(shape).to(device)
        self.average = copy.deepcopy(self.model)
        self.best = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=fitting.learning_rate, eps=1e-9)
        self.identity = _identity(interactions, fitting, shape)
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, float]] = []

    def _groups(self) -> list[dict[str, Any]]:
        decayed = [p for name, p in self.model.named_parameters() if "bias" not in name and "norm" not in name]
        not_decayed = [p for name, p in self.model.named_parameters() if "bias" in name or "norm" in name]
        return [
            {"params": decayed, "weight_decay": self.fitting.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
        ]

    def train(self, on_progress: OnProgress) -> None:
        max_steps, losses, earlier_seconds, started = self.fitting.most_steps, [], self.seconds, time.perf_counter()
        while self.step < max_steps and not self._waited_enough():
            losses.append(self._one_step(self._batch()))
            self.step += 1
            self.seconds = earlier_seconds + time.perf_counter() - started
            if self.step % self.fitting.every == 0 or self.step == max_steps:
                self._validate(sum(losses) / len(losses))
                losses.clear()
                self._save()
            on_progress(self.step, max_steps, self._told())

    def _batch(self) -> Tensor:
        """Return the pieces of this step: each epoch's order depends only on the seed and the epoch's number."""
        steps_per_epoch = -(-len(self.pieces) // self.fitting.batch)
        epoch, place = divmod(self.step, steps_per_epoch)
        order = np.random.default_rng((self.fitting.seed, epoch)).permutation(len(self.pieces))
        chosen = order[place * self.fitting.batch : (place + 1) * self.fitting.batch]
        return pad_histories([self.pieces[n] for n in chosen]).to(self.device)

    def _one_step(self, items: Tensor) -> float:
        self.model.train()
        loss = next_item_loss(self.model, items[:, :-1], items[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.fitting.clip)
        self.optimizer.step()
        # Early on the average would be mostly the initialization.
        decay = min(self.fitting.averaged, (1 + self.step) / (10 + self.step)) if self.fitting.averaged else 0.0
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 1 - decay)
        value = loss.item()
        if value != value:
            raise ModelError(
                f"the loss is NaN after {self.step} steps",
                code="E7141",
                help="lower the learning rate, or try another seed",
            )
        return value

    def _validate(self, loss: float) -> None:
        histories, targets = self.asked
        ranks = rank_items(LRURecRetriever(self.average, self.device), histories, targets).ranks
        scores = mean_ranking(ranks.tolist())
        self.log.append({"step": self.step, "loss": round(loss, 4), **scores})
        if scores["ndcg@10"] >= max(line["ndcg@10"] for line in self.log):
            self.best.load_state_dict(self.average.state_dict())

    def _best_line(self) -> dict[str, float]:
        return max(reversed(self.log), key=lambda line: line["ndcg@10"])

    def _waited_enough(self) -> bool:
        if not self.log:
            return False
        return self.log[-1]["step"] - self._best_line()["step"] >= self.fitting.patience * self.fitting.every

    def _told(self) -> str:
        if not self.log:
            return f"step {self.step}"
        return f"validation NDCG@10 {self.log[-1]['ndcg@10']:.4f}, best {self._best_line()['ndcg@10']:.4f}"

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        state = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.device != "cpu" else None,
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(self.checkpoint, buffer.getvalue())

    def go_on(self) -> None:
        """Resume from the checkpoint, if it is this run's."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, weights_only=True)
        except Exception as error:  # a damaged pickle raises any exception
            raise MachineError(
                f"the checkpoint cannot be read: {type(error).__name__}",
                code="E7142",
                path=self.checkpoint,
                help="delete it",
            ) from error
        if state.get("identity") != self.identity:
            return
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.best.load_state_dict(state["best"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"])
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]

    def fitted(self) -> FitResult:
        best = self._best_line()
        valid = {name: value for name, value in best.items() if name not in ("step", "loss")}
        return FitResult(
            LRURecRetriever(self.best, self.device), self.fitting, self.best.shape, int(best["step"]), valid, self.log,
            round(self.seconds, 1),
        )  # fmt: skip


def build_manifest_settings(fitted: FitResult) -> dict[str, Any]:
    """Return how a model was trained, for a manifest."""
    return {
        **asdict(fitted.shape),
        **asdict(fitted.fitting),
        "device": fitted.retriever.device,
        "best_step": fitted.steps,
        "steps": fitted.log[-1]["step"],
    }


def _identity(interactions: Interactions, fitting: FitSettings, shape: LRURecSize) -> str:
    """Return a hash of all that the result depends on."""
    text = json.dumps([asdict(fitting), asdict(shape), interactions.histories], default=str)
    return hashlib.sha256(text.encode()).hexdigest()
