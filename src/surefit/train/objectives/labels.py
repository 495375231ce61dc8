"""The objective on labelled answers as `train_step` uses it: from the tokens' losses of a micro batch to its part of
the loss, with a baseline that is known before the first backward pass.

All numbers are normalized over the global batch: the loss is a mean over its rows, and the baseline a mean over the
mismatched answers of all of them. So one micro batch of eight rows equals eight micro batches of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from surefit.config.schema import ObjectiveSection, decided
from surefit.metrics.auc import area_under_curve
from surefit.parallel.engine import Engine, LossFunction
from surefit.parallel.process_group import all_gather
from surefit.train.loss import token_losses
from surefit.train.objectives.kto import clamp_baseline, kto_losses
from surefit.train.objectives.pairs import Measured, sum_documents

Batch = Mapping[str, Any]
SUMS = ("term", "chosen", "rejected", "chosen_logps", "rejected_logps")
"""Sums over the rows of a micro batch that the metrics are made of; TRL calls desirable answers chosen."""


class LabelTotals(NamedTuple):
    """Counts over the global batch: rows, desirable ones among them, and supervised tokens."""

    divisor: int
    desirable: int
    supervised: int


@dataclass(frozen=True)
class LabelledSums:
    """Sums of the answers of some rows.

    Attributes:
        log_probs: (rows,) summed log-probabilities in nats.
        reference: the reference's.
        signs: 1 where the answer is desirable, −1 where it is not.
    """

    log_probs: torch.Tensor
    reference: torch.Tensor
    signs: torch.Tensor

    @property
    def ratios(self) -> torch.Tensor:
        return self.log_probs - self.reference


@dataclass(frozen=True)
class LabelObjective:
    """kto, from the resolved section `objective`.

    Attributes:
        baseline: z of the global batch (train/objectives/kto.py), from `for_batch`; None before it is known.
    """

    section: ObjectiveSection
    baseline: float | None = None

    @property
    def summed(self) -> int:
        """Number of sums that `loss_of` adds up."""
        return len(SUMS)

    def totals(self, batches: Iterable[Batch]) -> LabelTotals:
        """Return the counts of some micro batches."""
        parts = [(batch["desirable"], batch["answer_targets"]) for batch in batches]
        rows, desirable = sum(len(labels) for labels, _ in parts), sum(sum(labels) for labels, _ in parts)
        return LabelTotals(rows, desirable, sum(sum(targets) for _, targets in parts))

    @torch.no_grad()
    def for_batch(
        self, model: torch.nn.Module, batches: Iterable[Batch], totals: Sequence[int], chunked: bool, engine: Engine
    ) -> LabelObjective:
        """Return the objective with the baseline of a global batch, from a forward pass over its mismatched answers.

        Args:
            batches: this process's micro batches.
            totals: over the global batch.
        """
        log_ratio = partial(_mismatched_log_ratio, chunked=chunked)
        parts = (part for batch in batches for part in batch["mismatched"])
        total = engine.total(math.fsum(engine.measure(model, part, log_ratio) for part in parts))
        return replace(self, baseline=clamp_baseline(total / max(1, totals[0])))

    def loss_of(
        self, totals: Sequence[int], chunked: bool, balance: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> LossFunction:
        """Return the function of a micro batch's part of the loss, to be divided by the number of rows.

        Args:
            totals: over the global batch.
            balance: receives the router's part (`train.loss.loss_sum`).
            sums: receives the micro batch's `SUMS`, detached.
        """
        return partial(self._loss, chunked=chunked, balance=balance, sums=sums)

    def _loss(
        self,
        model: torch.nn.Module,
        batch: Batch,
        chunked: bool,
        balance: list[torch.Tensor],
        sums: list[torch.Tensor],
    ) -> torch.Tensor:
        losses, router_loss = token_losses(model, batch, chunked)
        answers = sum_labelled(-losses, batch)
        terms = self.terms(answers)
        sums.append(self._detached_sums(terms, answers))
        # An empty micro batch keeps the processes in lockstep, through the same graph.
        loss = terms.sum() if len(terms) else losses.sum()
        if router_loss is not None:
            balance.append((router_loss * len(terms)).detach())
            loss = loss + router_loss * len(terms)
        return loss

    def terms(self, answers: LabelledSums) -> torch.Tensor:
        """Return the loss of each answer, (rows,)."""
        assert self.baseline is not None, "for_batch comes first"
        section, signs = self.section, answers.signs
        weights = torch.where(signs > 0, section.desirable_weight, section.undesirable_weight).to(signs.dtype)
        return kto_losses(answers.ratios, signs, weights, self.baseline, decided(section.beta))

    def _detached_sums(self, terms: torch.Tensor, answers: LabelledSums) -> torch.Tensor:
        with torch.no_grad():
            desirable = (answers.signs > 0).to(terms.dtype)
            rewards = decided(self.section.beta) * answers.ratios
            kinds = [
                (values * kind).sum() for values in (rewards, answers.log_probs) for kind in (desirable, 1 - desirable)
            ]
            return torch.stack([terms.sum(), *kinds]).detach()

    def loss_and_metrics(self, sums: Sequence[float], totals: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics, by TRL's names, from the added-up `SUMS` of all micro batches. A batch
        without a row of one kind has none of its metrics."""
        assert self.baseline is not None
        named, (rows, desirable, *_) = dict(zip(SUMS, sums, strict=True)), totals
        metrics = {}
        for kind, count in (("chosen", desirable), ("rejected", rows - desirable)):
            if count:
                metrics[f"rewards/{kind}"] = named[kind] / count
                metrics[f"logps/{kind}"] = named[f"{kind}_logps"] / count
        if 0 < desirable < rows:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return named["term"] / rows, metrics | {"kl": self.baseline}

    @torch.no_grad()
    def measure(
        self, model: torch.nn.Module, batches: Iterable[Batch], stop: Callable[[], bool], chunked: bool, engine: Engine
    ) -> Measured | None:
        """Measure the mean loss and the metrics on some micro batches, with the baseline of all of them together; None
        if `stop` canceled it, or without rows.

        The model's mode is the caller's.
        """
        rows: list[tuple[float, float, float]] = []
        mismatched = tokens = 0.0
        for batch in batches:
            if stop():
                return None
            engine.measure(model, batch, partial(_collect_rows, chunked=chunked, rows=rows))
            parts = batch["mismatched"]
            mismatched += math.fsum(
                engine.measure(model, part, partial(_mismatched_log_ratio, chunked=chunked)) for part in parts
            )
            tokens += sum(batch["answer_targets"])
        if engine.data_size > 1:
            rows = [row for part in all_gather(rows, engine.world) for row in part]
        if not rows:
            return None
        baseline = clamp_baseline(engine.total(mismatched) / len(rows))
        loss, metrics = replace(self, baseline=baseline).summarize(rows)
        return Measured(loss, int(engine.total(tokens)), metrics)

    def summarize(self, rows: Sequence[tuple[float, float, float]]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics of held-out rows: those of `loss_and_metrics`, the numbers of both
        kinds, and the AUC, the probability that a desirable answer has a higher reward than an undesirable one.

        Args:
            rows: log-probability, the reference's, and sign of each.
        """
        answers = LabelledSums(*torch.tensor(rows, dtype=torch.float64).unbind(1))
        desirable = int((answers.signs > 0).sum())
        sums = self._detached_sums(self.terms(answers), answers).tolist()
        loss, metrics = self.loss_and_metrics(sums, (len(rows), desirable, 0))
        kinds = [answers.ratios[kind].tolist() for kind in (answers.signs > 0, answers.signs < 0)]
        counts: dict[str, float] = {"desirable": desirable, "undesirable": len(rows) - desirable}
        if all(kinds):
            metrics["rewards/auc"] = area_under_curve(*kinds)
        return loss, metrics | counts


def sum_labelled(log_probs: torch.Tensor, batch: Batch) -> LabelledSums:
    """Return the sums of a micro batch's answers, from the log-probability of each supervised token, (n,)."""
    signs = torch.tensor([1.0 if label else -1.0 for label in batch["desirable"]], dtype=log_probs.dtype)
    reference = batch["reference_log_probs"][:, 0]
    sums = sum_documents(log_probs, batch["answer_targets"])
    reference = reference.to(sums.device, sums.dtype, non_blocking=True)
    return LabelledSums(sums, reference, signs.to(sums.device, non_blocking=True))


@torch.no_grad()
def answer_and_mismatched(model: torch.nn.Module, batch: Batch, chunked: bool) -> torch.Tensor:
    """Return the summed log-probabilities of a micro batch's answers and of their mismatched ones, (rows, 2): what the
    stored reference has of each row."""
    columns = [
        torch.cat([sum_documents(-token_losses(model, part, chunked)[0], part["answer_targets"]) for part in parts])
        for parts in ((batch,), batch["mismatched"])
    ]
    return torch.stack(columns, dim=1)


def _mismatched_log_ratio(model: torch.nn.Module, part: Batch, chunked: bool) -> torch.Tensor:
    """Return the summed log-ratio of some mismatched answers, 0-d."""
    losses, _ = token_losses(model, part, chunked)
    sums = sum_documents(-losses, part["answer_targets"])
    reference: torch.Tensor = part["reference_log_probs"]
    return (sums - reference.to(sums.device, sums.dtype, non_blocking=True)).sum()


def _collect_rows(
    model: torch.nn.Module, batch: Batch, chunked: bool, rows: list[tuple[float, float, float]]
) -> torch.Tensor:
    """Append (log-probability, the reference's, sign) of a held-out micro batch's rows."""
    losses, _ = token_losses(model, batch, chunked)
    answers = sum_labelled(-losses, batch)
    columns = (answers.log_probs.tolist(), answers.reference.tolist(), answers.signs.tolist())
    rows += zip(*columns, strict=True)
    return losses.sum()
