"""Losses and gradients of SureFit's objectives on pairs beside TRL's, on the same model and the same batch.

python benchmarks/preference.py        needs trl (tested with 1.16); prints a table, exits 1 where something differs

TRL's own code computes its side: `DPOTrainer._compute_loss` with the reference's log-probabilities given, and of the
experimental trainers `ORPOTrainer.concatenated_forward` and `odds_ratio_loss`, and `CPOTrainer.get_batch_loss_metrics`
with `loss_type="simpo"` and `cpo_alpha=0`. Its ORPO adds the cross-entropy of prompt and answer; for the comparison the
answer's takes its place. TRL pads; SureFit's side is computed padded and packed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import tiny_run
import torch

from surefit.config.schema import ObjectiveSection
from surefit.data.tokens.collate import collate, collate_packed, describe_pairs
from surefit.model import attention
from surefit.train.objectives.pairs import PairObjective
from surefit.train.optim import MasterAdamW
from surefit.train.step import train_step

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo sigmoid": ({"name": "dpo", "beta": 0.1}, {"loss_type": "sigmoid"}),
    "dpo ipo": ({"name": "dpo", "loss_type": "ipo", "beta": 0.1}, {"loss_type": "ipo"}),
    "dpo sigmoid_norm": (
        {"name": "dpo", "loss_type": "sigmoid_norm", "beta": 5.0}, {"loss_type": "sigmoid_norm", "beta": 5.0},
    ),
    "dpo sigmoid + sft": (
        {"name": "dpo", "beta": 0.1, "sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "orpo": ({"name": "orpo", "beta": 0.1}, {"beta": 0.1}),
    "simpo": (
        {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
}  # fmt: skip
"""Name → our section, and TRL's settings."""
PAIRS, LIMIT = 8, 1e-6
Result = tuple[float, dict[str, torch.Tensor]]


def reference_values() -> np.ndarray:
    """Log-probabilities of a reference, as far from the model as training takes it."""
    return np.random.default_rng(5).normal(-25, 6, (PAIRS, 2)).astype(np.float32)


def our_numbers(section: Mapping[str, Any], rows: list[Any], values: np.ndarray, packed: bool) -> Result:
    """Return our loss and gradients."""
    model = tiny_run.llama(**({"attn_implementation": attention.NAME} if packed else {})).train()
    optimizer = MasterAdamW(model)
    kept: dict[str, torch.Tensor] = {}
    batch = (collate_packed(rows) if packed else collate(rows, 0)) | describe_pairs(rows, values)
    with patch.object(optimizer, "step", lambda factor: kept.update(_gradients(model))):
        objective = PairObjective(ObjectiveSection.model_validate(section))
        result = train_step(model, [batch], optimizer, 1e9, objective=objective)
    return result.loss, kept


def trl_numbers(name: str, settings: Mapping[str, Any], rows: list[Any], values: np.ndarray) -> Result:
    """Return TRL's loss and gradients."""
    model = tiny_run.llama().train()
    with tempfile.TemporaryDirectory() as folder:
        kind = name.partition(" ")[0]
        losses: dict[str, Callable[..., torch.Tensor]] = {"dpo": _dpo, "orpo": _orpo, "simpo": _simpo}
        loss = losses[kind](model, settings, rows, values, folder)
    loss.backward()
    return loss.item(), _gradients(model)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _texts() -> Any:
    """Rows that a trainer can be made with; the batch that it computes is given to it."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": "1 2", "chosen": " 3 4", "rejected": " 5 6"}] * 2)


def _tokenizer() -> Any:
    tokenizer = tiny_run.tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = "63"
    return tokenizer


def _dpo(model: Any, settings: Mapping[str, Any], rows: list[Any], values: np.ndarray, folder: str) -> torch.Tensor:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, **settings
    )
    trainer = DPOTrainer(
        model, ref_model=tiny_run.llama(), args=args, train_dataset=_texts(), processing_class=_tokenizer()
    )
    trainer.precompute_ref_logps = True
    batch = collate([*rows[::2], *rows[1::2]], 0)  # TRL's order: all chosen, then all rejected
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "completion_mask": (batch["labels"] != -100).long(),
        "ref_chosen_logps": torch.as_tensor(values[:, 0]),
        "ref_rejected_logps": torch.as_tensor(values[:, 1]),
    }
    loss: torch.Tensor = trainer._compute_loss(trainer.model, inputs, False)
    return loss


def _answer_batch(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch as the experimental trainers' collator makes it."""
    batch = {}
    for side, items in (("chosen", rows[::2]), ("rejected", rows[1::2])):
        padded = collate(items, 0)
        batch |= {f"{side}_{key}": padded[key] for key in ("input_ids", "attention_mask", "labels")}
    return batch


def _orpo(model: Any, settings: Mapping[str, Any], rows: list[Any], values: np.ndarray, folder: str) -> torch.Tensor:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args = ORPOConfig(output_dir=folder, report_to=[], use_cpu=True, bf16=False, max_length=64, **settings)
    trainer = ORPOTrainer(model, args=args, train_dataset=_texts(), processing_class=_tokenizer())
    chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, _answer_batch(rows))
    losses, *_ = trainer.odds_ratio_loss(chosen, rejected)
    tokens = torch.tensor([int((labels[1:] != -100).sum()) for _, labels in rows[::2]])
    nll: torch.Tensor = -(chosen * tokens).sum() / tokens.sum()
    return nll - losses.mean()


def _simpo(model: Any, settings: Mapping[str, Any], rows: list[Any], values: np.ndarray, folder: str) -> torch.Tensor:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(output_dir=folder, report_to=[], use_cpu=True, bf16=False, max_length=64, **settings)
    trainer = CPOTrainer(model, args=args, train_dataset=_texts(), processing_class=_tokenizer())
    loss: torch.Tensor = trainer.get_batch_loss_metrics(trainer.model, _answer_batch(rows), "train")[0]
    return loss


def compare(name: str, packed: bool) -> tuple[float, float, float]:
    """Return TRL's loss, the relative difference of ours, and the largest difference of a gradient in units of the
    largest gradient."""
    section, settings = CASES[name]
    rows, values = tiny_run.pairs(PAIRS), reference_values()
    (ours, our_gradients), (theirs, their_gradients) = (
        our_numbers(section, rows, values, packed), trl_numbers(name, settings, rows, values),
    )  # fmt: skip
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in their_gradients.values()))
    difference = max(float((our_gradients[key] - their_gradients[key]).abs().max()) for key in their_gradients)
    return theirs, abs(ours - theirs) / max(1.0, abs(theirs)), difference / largest


def main() -> int:
    import trl

    print(f"TRL {trl.__version__}, {PAIRS} pairs, float32, all weights trained")
    print("| objective | batch | loss by TRL | loss, difference | gradients, difference |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for name in CASES:
        for packed in (False, True):
            loss, loss_difference, gradient_difference = compare(name, packed)
            worst = max(worst, loss_difference, gradient_difference)
            how = "packed" if packed else "padded"
            print(f"| {name} | {how} | {loss:.6f} | {loss_difference:.1e} | {gradient_difference:.1e} |")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
