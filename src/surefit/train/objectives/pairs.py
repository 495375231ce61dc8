"""An objective on pairs as `train_step` uses it: from the tokens' losses of a micro batch to its part of the loss.

All numbers are normalized over the global batch: the preference term is a mean over its pairs, the SFT term a mean over
the tokens of its chosen answers. So one micro batch of eight pairs equals eight micro batches of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from surefit.config.schema import ObjectiveSection, decided
from surefit.parallel.engine import BatchFunction, Engine, LossFunction
from surefit.train.loss import token_losses
from surefit.train.objectives.dpo import ipo_losses, sigmoid_losses, sigmoid_norm_losses
from surefit.train.objectives.orpo import odds_ratio_losses
from surefit.train.objectives.simpo import simpo_losses

Batch = Mapping[str, Any]
SUMS = ("term", "chosen", "rejected", "accuracies", "chosen_logps", "rejected_logps", "nll")
"""Sums over the pairs of a micro batch that the metrics are made of."""


class PairTotals(NamedTuple):
    """Counts over the global batch: pairs, tokens of the chosen answers, and supervised tokens in all."""

    divisor: int
    chosen: int
    supervised: int


class Measured(NamedTuple):
    """Result of a measurement on held-out rows: the mean loss, the supervised tokens, and metrics by name."""

    loss: float
    tokens: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class AnswerSums:
    """Sums of the answers of some pairs.

    Attributes:
        log_probs: (pairs, 2) summed log-probabilities in nats, chosen and rejected.
        tokens: (pairs, 2) numbers of tokens that they sum.
        reference: `log_probs` of the reference, (pairs, 2); None without a reference.
        share: part of all numbers that this process counts: less than 1 where others have computed the same sums.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    reference: torch.Tensor | None = None
    share: float = 1.0


@dataclass(frozen=True)
class PairObjective:
    """dpo, orpo or simpo, from the resolved section `objective`."""

    section: ObjectiveSection

    @property
    def summed(self) -> int:
        """Number of sums that `loss_of` adds up."""
        return len(SUMS)

    @property
    def sft_weight(self) -> float:
        """Weight of the cross-entropy of the chosen answers."""
        return 1.0 if self.section.name == "orpo" else self.section.sft_weight

    def totals(self, batches: Iterable[Batch]) -> PairTotals:
        """Return the counts of some micro batches."""
        counts = [batch["answer_targets"] for batch in batches]
        pairs, chosen = sum(len(part) // 2 for part in counts), sum(sum(part[::2]) for part in counts)
        return PairTotals(pairs, chosen, sum(map(sum, counts)))

    def loss_of(
        self, totals: Sequence[int], chunked: bool, balance: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> LossFunction:
        """Return the function of a micro batch's part of the loss, to be divided by the number of pairs in `totals`.

        Args:
            totals: over the global batch.
            balance: receives the router's part (`train.loss.loss_sum`).
            sums: receives the micro batch's `SUMS`, detached.
        """
        per_token = self.sft_weight * totals[0] / max(1, totals[1])
        return partial(self._loss, sft_factor=per_token, chunked=chunked, balance=balance, sums=sums)

    def _loss(
        self,
        model: torch.nn.Module,
        batch: Batch,
        sft_factor: float,
        chunked: bool,
        balance: list[torch.Tensor],
        sums: list[torch.Tensor],
    ) -> torch.Tensor:
        losses, router_loss = token_losses(model, batch, chunked)
        answers = sum_answers(-losses, batch)
        terms, rewards = self.terms(answers)
        nll = -answers.log_probs[:, 0].sum()
        sums.append(_detached_sums(terms, rewards, answers, nll))
        loss = terms.sum() if sft_factor == 0 else terms.sum() + sft_factor * nll
        if answers.share != 1:
            loss = loss * answers.share
        if not len(terms):
            loss = losses.sum()  # an empty micro batch keeps the processes in lockstep, through the same graph
        if router_loss is not None:
            balance.append((router_loss * len(terms)).detach())
            loss = loss + router_loss * len(terms)
        return loss

    def terms(self, answers: AnswerSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the preference term of each pair, (pairs,), and the rewards of its answers, (pairs, 2), whose
        difference the term is a function of."""
        section, beta = self.section, decided(self.section.beta)
        if section.name != "dpo":
            means = answers.log_probs / answers.tokens
            chosen, rejected = means.unbind(1)
            if section.name == "orpo":
                return odds_ratio_losses(chosen, rejected, beta), beta * means
            return simpo_losses(chosen, rejected, beta, section.gamma_beta_ratio), beta * means
        assert answers.reference is not None
        ratios = answers.log_probs - answers.reference
        if section.loss_type == "sigmoid":
            return sigmoid_losses(ratios[:, 0], ratios[:, 1], beta, section.label_smoothing), beta * ratios
        ratios = ratios / answers.tokens
        losses = ipo_losses if section.loss_type == "ipo" else sigmoid_norm_losses
        return losses(ratios[:, 0], ratios[:, 1], beta), beta * ratios

    def loss_and_metrics(self, sums: Sequence[float], totals: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics, by TRL's names, from the added-up `SUMS` of all micro batches."""
        named, pairs = dict(zip(SUMS, sums, strict=True)), totals[0]
        nll = named["nll"] / max(1, totals[1])
        metrics = {
            "rewards/chosen": named["chosen"] / pairs,
            "rewards/rejected": named["rejected"] / pairs,
            "rewards/margins": (named["chosen"] - named["rejected"]) / pairs,
            "rewards/accuracies": named["accuracies"] / pairs,
            "logps/chosen": named["chosen_logps"] / pairs,
            "logps/rejected": named["rejected_logps"] / pairs,
        }
        if self.sft_weight:
            metrics["nll"] = nll
        return named["term"] / pairs + self.sft_weight * nll, metrics

    @torch.no_grad()
    def measure(
        self, model: torch.nn.Module, batches: Iterable[Batch], stop: Callable[[], bool], chunked: bool, engine: Engine
    ) -> Measured | None:
        """Measure the mean loss and the metrics on some micro batches; None if `stop` canceled it, or without pairs.

        The model's mode is the caller's.
        """
        sums, counts = [0.0] * len(SUMS), [0, 0, 0]
        for batch in batches:
            if stop():
                return None
            totals = self.totals([batch])
            new_sums = engine.evaluate(model, batch, partial(self._sums, totals, chunked), len(SUMS))
            sums = [old + new for old, new in zip(sums, new_sums.tolist(), strict=True)]
            counts = [old + new for old, new in zip(counts, totals, strict=True)]
        sums, counts = [engine.total(value) for value in sums], [int(engine.total(value)) for value in counts]
        if not counts[0]:
            return None
        loss, metrics = self.loss_and_metrics(sums, counts)
        return Measured(loss, counts[2], metrics)

    def _sums(self, totals: PairTotals, chunked: bool, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the `SUMS` of a micro batch."""
        sums: list[torch.Tensor] = []
        self.loss_of(totals, chunked, [], sums)(model, batch)
        return sums[0]


def sum_answers(log_probs: torch.Tensor, batch: Batch) -> AnswerSums:
    """Return the sums of a micro batch's answers, from the log-probability of each supervised token, (n,).

    Where several processes share the tokens, each has the log-probabilities of its own, and all get the whole sums.
    """
    if not batch["answer_targets"]:
        none = log_probs.new_zeros(0, 2)
        return AnswerSums(none, none, none)
    counts: Sequence[int] = batch.get("own_targets", batch["answer_targets"])
    sums = sum_documents(log_probs, counts).view(-1, 2)
    shared = batch.get("shared_sums")
    return answer_sums(sums, batch) if shared is None else answer_sums(shared.add(sums), batch, 1 / shared.processes)


def sum_documents(log_probs: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sum of each document's numbers, (documents,). Each is summed on its own, which gives the same bits in
    every run; atomic additions would not."""
    if not counts:
        return log_probs.new_zeros(0)
    return torch.stack([part.sum() for part in torch.split(log_probs, list(counts))])


def answer_sums(log_probs: torch.Tensor, batch: Batch, share: float = 1.0) -> AnswerSums:
    """Return what an objective reads of a micro batch's answers, whose log-probabilities, (pairs, 2), are known."""
    device, dtype = log_probs.device, log_probs.dtype
    tokens = torch.tensor(batch["answer_targets"], dtype=dtype).to(device, non_blocking=True).view(-1, 2)
    reference = batch.get("reference_log_probs")
    if reference is not None:
        reference = reference.to(device, dtype, non_blocking=True)
    return AnswerSums(log_probs, tokens, reference, share)


def evaluate_answers(engine: Engine, model: torch.nn.Module, batch: Batch, losses_of: BatchFunction) -> AnswerSums:
    """Return the sums of a micro batch's answers, the same in every process that reads it; called under `no_grad`, by
    all processes equally often.

    Args:
        losses_of: returns the cross-entropy of each supervised token, (n,), as `train.loss.token_losses` does.
    """

    def log_probs_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        answers = sum_answers(-losses_of(model, batch), batch)
        return answers.log_probs * answers.share

    values = engine.evaluate(model, batch, log_probs_of, len(batch["answer_targets"]))
    return answer_sums(values.view(-1, 2), batch)


def _detached_sums(terms: torch.Tensor, rewards: torch.Tensor, answers: AnswerSums, nll: torch.Tensor) -> torch.Tensor:
    """Return `SUMS` of a micro batch."""
    with torch.no_grad():
        accuracies = (1 + torch.sign(rewards[:, 0] - rewards[:, 1])).sum() / 2  # a tie is half a right answer
        sums = [terms.sum(), *rewards.sum(0).unbind(), accuracies, *answers.log_probs.sum(0).unbind(), nll]
        return torch.stack(sums).detach() * answers.share
