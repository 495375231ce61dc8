"""The first batch of preferences as a certificate: before any update the loss has a value that is known beforehand.

Where the reference is the start of the run (dpo, kto), every reward is 0 and the loss is the objective's closed form
there. A reference of another model, dropout, another template or a damaged file would all show as another loss. Without
a reference (orpo, simpo) the loss is computed again in float64, from the logits of the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from surefit.config.schema import ObjectiveSection, SureFitConfig, decided
from surefit.core.errors import GateError
from surefit.core.rundir import RunDir, write_json
from surefit.parallel.engine import Engine
from surefit.parallel.process_group import all_gather
from surefit.train.loss import exact_token_losses
from surefit.train.objectives.labels import LabelObjective, LabelTotals, answer_and_mismatched
from surefit.train.objectives.pairs import Batch, PairObjective, PairTotals, evaluate_answers
from surefit.train.sampler import dropout_seed

LOSS_TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest accepted difference of the loss, relative where the loss is above 1, by the dtype of the computation; and
of an answer's log-probability from the reference's, in nats per token. The same tensors go through the same model, so
that only the order of additions differs; another model is off by tenths."""


@dataclass(frozen=True)
class FirstBatch:
    """Result of the check.

    Attributes:
        objective: the objective's name, and `loss_type` of dpo.
        pairs: pairs, or labelled answers, of the first step that were checked.
        loss, expected: in training mode before any update; and its value as known beforehand, from `basis`.
        tolerance: largest accepted difference of both.
        offset: largest difference of an answer's log-probability from the reference's, in nats per token; None without
            a reference. `offset_tolerance` is the largest accepted one.
        passed: whether both are within their tolerance.
        baseline: kto's KL baseline in nats, which is 0 as well; None for another objective.
    """

    objective: str
    pairs: int
    loss: float
    expected: float
    basis: str
    tolerance: float
    offset: float | None
    offset_tolerance: float
    passed: bool
    baseline: float | None = None

    def text(self) -> str:
        """Return the result as one line."""
        rewards = "" if self.offset is None else f"rewards 0 (to {self.offset:.1e} nats per token), "
        what = "pairs"
        if self.baseline is not None:
            what, rewards = "answers", f"{rewards}KL {self.baseline:.1e}, "
        return (
            f"first batch: {self.objective}, {self.pairs} {what}: {rewards}loss {self.loss:.6f} = {self.basis} "
            f"{self.expected:.6f} (± {self.tolerance:.0e})"
        )

    def write(self, run: RunDir) -> None:
        """Write the result into first_batch.json and events.jsonl."""
        write_json(run.first_batch, asdict(self))
        run.note("train", "first batch", **asdict(self))


def closed_form(section: ObjectiveSection) -> float | None:
    """Return the preference term of a pair where the model is the reference; None for an objective without one.

    dpo's sigmoid is ln 2 for every `label_smoothing`, and so is sigmoid_norm; ipo is 1 / (4 β²).
    """
    if section.name != "dpo":
        return None
    return 1 / (4 * decided(section.beta) ** 2) if section.loss_type == "ipo" else math.log(2)


@torch.no_grad()
def check_first_batch(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    objective: PairObjective,
    config: SureFitConfig,
    engine: Engine,
) -> FirstBatch:
    """Compare the loss of some micro batches of the first step with its known value.

    Args:
        model: in training mode, before any update; torch's random state is restored.
        batches: this process's; together with the other processes' at least one pair.
    """
    section, chunked = objective.section, config.speed.chunked_loss
    totals = PairTotals(*(int(engine.total(count)) for count in objective.totals(batches)))
    loss = term = nll = offset = 0.0
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for batch in batches:
            sums: list[torch.Tensor] = []
            torch.manual_seed(dropout_seed(config.train.seed, 0, engine.data_rank))
            loss += engine.measure(model, batch, objective.loss_of(totals, chunked, [], sums))
            torch.manual_seed(dropout_seed(config.train.seed, 0, engine.data_rank))
            answers = evaluate_answers(engine, model, batch, partial(exact_token_losses, chunked=chunked))
            term += float(objective.terms(answers)[0].sum())
            nll -= float(answers.log_probs[:, 0].sum())
            if answers.reference is not None and len(answers.tokens):
                offsets = (answers.log_probs - answers.reference).abs() / answers.tokens
                offset = max(offset, float(offsets.nan_to_num(nan=math.inf).max()))
    loss, term, nll = (engine.total(value) for value in (loss, term, nll))
    offset = max(all_gather(offset, engine.world))  # all processes judge alike: one that goes on alone would wait
    form = closed_form(section)
    sft = objective.sft_weight * nll / max(1, totals.chosen)
    expected = (term / totals.divisor if form is None else form) + sft
    tolerance = LOSS_TOLERANCE[config.model.dtype] * max(1.0, abs(expected))
    return _judge(section, totals, loss / totals.divisor, expected, tolerance, offset, config, sft)


def _judge(
    section: ObjectiveSection,
    totals: PairTotals,
    loss: float,
    expected: float,
    tolerance: float,
    offset: float,
    config: SureFitConfig,
    sft: float,
) -> FirstBatch:
    ipo = section.loss_type == "ipo"
    basis = ("1/(4β²)" if ipo else "ln 2") if section.has_reference else "float64 from the same logits"
    basis += f" + {sft:.6f} of SFT" if section.has_reference and sft else ""
    limit = LOSS_TOLERANCE[config.model.dtype]
    close = abs(loss - expected) <= tolerance  # False for NaN
    passed = close and (offset <= limit or not section.has_reference)
    name = f"dpo {section.loss_type}" if section.name == "dpo" else section.name
    measured = offset if section.has_reference else None
    return FirstBatch(name, totals.divisor, loss, expected, basis, tolerance, measured, limit, passed)


@torch.no_grad()
def check_first_labelled_batch(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    objective: LabelObjective,
    config: SureFitConfig,
    engine: Engine,
) -> FirstBatch:
    """Compare the loss of some micro batches of the first step of kto with its closed form, half the mean weight: every
    reward and the KL baseline are 0.

    Args:
        model: in training mode, before any update; torch's random state is restored.
        batches: this process's; together with the other processes' at least one row.
    """
    section, chunked = objective.section, config.speed.chunked_loss
    totals = LabelTotals(*(int(engine.total(count)) for count in objective.totals(batches)))
    loss = offset = 0.0
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(dropout_seed(config.train.seed, 0, engine.data_rank))
        objective = objective.for_batch(model, batches, totals, chunked, engine)
        for batch in batches:
            torch.manual_seed(dropout_seed(config.train.seed, 0, engine.data_rank))
            loss += engine.measure(model, batch, objective.loss_of(totals, chunked, [], []))
            if not batch["desirable"]:
                continue
            log_probs = answer_and_mismatched(model, batch, chunked).cpu()
            targets = [batch["answer_targets"], [n for part in batch["mismatched"] for n in part["answer_targets"]]]
            offsets = (log_probs - batch["reference_log_probs"]).abs() / torch.tensor(targets).T
            offset = max(offset, float(offsets.nan_to_num(nan=math.inf).max()))
    offset = max(all_gather(offset, engine.world))  # all processes judge alike: one that goes on alone would wait
    undesirable = totals.divisor - totals.desirable
    weights = section.desirable_weight * totals.desirable + section.undesirable_weight * undesirable
    loss, expected = engine.total(loss) / totals.divisor, weights / (2 * totals.divisor)
    limit = LOSS_TOLERANCE[config.model.dtype]
    tolerance = limit * max(1.0, expected)
    passed = abs(loss - expected) <= tolerance and offset <= limit  # False for NaN
    basis, baseline = "half the mean weight", objective.baseline
    return FirstBatch(section.name, totals.divisor, loss, expected, basis, tolerance, offset, limit, passed, baseline)


def failed_first_batch(result: FirstBatch, model: torch.nn.Module, run: RunDir) -> GateError:
    """Return the error that says what differs, and what may be the cause."""
    if result.offset is not None and not result.offset <= result.offset_tolerance:
        problem = (
            f"the model does not start at its reference: an answer of the first batch is {result.offset:.3g} nats per "
            f"token away from the stored log-probability (accepted: {result.offset_tolerance:g}), so that the loss is "
            f"{result.loss:.6f} instead of {result.expected:.6f}"
        )
    else:
        problem = (
            f"the loss of the first batch is {result.loss:.6f}, and {result.expected:.6f} by {result.basis}: they "
            f"differ by more than {result.tolerance:g}"
        )
    active = _active_dropout(model)
    cause = (
        f"{active[0]} drops numbers in training mode: set its probability to 0 in the model's config.json"
        if active
        else f"delete {run.reference.name} so that it is computed again; if that does not help, the model computes "
        "something else in training mode"
    )
    return GateError(problem, code="E5840", path=run.path, field="objective", help=f"{cause}; no step was taken")


def _active_dropout(model: Any) -> list[str]:
    """Return the names of the modules that drop something."""
    kind = torch.nn.modules.dropout._DropoutNd
    return [name for name, module in model.named_modules() if isinstance(module, kind) and module.p > 0]
