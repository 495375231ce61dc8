"""Losses and gradients of SureFit's objectives on pairs beside TRL's, on the same model and the same batch.

python benchmarks/preference.py        needs trl (tested with 1.16); prints a table, exits 1 where something differs
python benchmarks/preference.py --speed        tokens/s and memory beside TRL's DPOTrainer (preference_speed.py)

TRL's own code computes its side: `DPOTrainer._compute_loss` and `KTOTrainer._compute_loss` with the reference's
log-probabilities given (KTO's in one micro batch, with which alone TRL's baseline is the global batch's), and of the
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
from surefit.data.tokens.collate import collate, collate_packed, count_targets, describe_labelled, describe_pairs
from surefit.model import attention
from surefit.train.mismatched import choose_partners, mismatch
from surefit.train.objectives.build import build_objective
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
    "kto": ({"name": "kto", "beta": 0.1}, {"beta": 0.1}),
    "kto weighted": (
        {"name": "kto", "beta": 0.3, "desirable_weight": 1.33, "undesirable_weight": 0.8},
        {"beta": 0.3, "desirable_weight": 1.33, "undesirable_weight": 0.8},
    ),
}  # fmt: skip
"""Name → our section, and TRL's settings."""
PAIRS, LIMIT = 8, 1e-6
Result = tuple[float, dict[str, torch.Tensor]]


def rows_of(name: str) -> list[Any]:
    """Return the rows of a case: pairs, or labelled answers."""
    return tiny_run.labelled(PAIRS) if name.startswith("kto") else tiny_run.pairs(PAIRS)


def mismatched_rows(rows: list[Any]) -> list[Any]:
    """Return the mismatched rows of labelled answers, as training makes them."""
    return [mismatch(row, rows[partner], 64) for row, partner in zip(rows, choose_partners(rows, 0), strict=True)]


def reference_values() -> np.ndarray:
    """Log-probabilities of a reference, as far from the model as training takes it."""
    return np.random.default_rng(5).normal(-25, 6, (PAIRS, 2)).astype(np.float32)


def our_numbers(section: Mapping[str, Any], rows: list[Any], values: np.ndarray, packed: bool) -> Result:
    """Return our loss and gradients."""
    model = tiny_run.llama(**({"attn_implementation": attention.NAME} if packed else {})).train()
    optimizer = MasterAdamW(model)
    kept: dict[str, torch.Tensor] = {}
    put = collate_packed if packed else lambda items: collate(items, 0)
    if section["name"] == "kto":
        others = mismatched_rows(rows)
        counts = {"answer_targets": count_targets(others), "reference_log_probs": torch.as_tensor(values[:, 1])}
        batch = put(rows) | describe_labelled(rows, rows.desirable, values, [put(others) | counts])
    else:
        batch = put(rows) | describe_pairs(rows, values)
    with patch.object(optimizer, "step", lambda factor: kept.update(_gradients(model))):
        objective = build_objective(ObjectiveSection.model_validate(section))
        result = train_step(model, [batch], optimizer, 1e9, objective=objective)
    return result.loss, kept


def trl_numbers(name: str, settings: Mapping[str, Any], rows: list[Any], values: np.ndarray) -> Result:
    """Return TRL's loss and gradients."""
    model = tiny_run.llama().train()
    with tempfile.TemporaryDirectory() as folder:
        kind = name.partition(" ")[0]
        losses: dict[str, Callable[..., torch.Tensor]] = {"dpo": _dpo, "orpo": _orpo, "simpo": _simpo, "kto": _kto}
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


def _kto(model: Any, settings: Mapping[str, Any], rows: Any, values: np.ndarray, folder: str) -> torch.Tensor:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(
        output_dir=folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=len(rows), **settings,
    )  # fmt: skip
    texts = [{"prompt": "1 2", "completion": " 3 4", "label": n % 2 == 0} for n in range(len(rows))]
    trainer = KTOTrainer(
        model, ref_model=tiny_run.llama(), args=args, train_dataset=Dataset.from_list(texts),
        processing_class=_tokenizer(),
    )  # fmt: skip
    trainer.precompute_ref_logps = True
    inputs = {"label": torch.as_tensor(rows.desirable)}
    for prefix, items, column in (("", rows, 0), ("KL_", mismatched_rows(rows), 1)):
        batch = collate(items, 0)
        inputs |= {f"{prefix}{key}": batch[key] for key in ("input_ids", "attention_mask")}
        inputs[f"{prefix}completion_mask"] = (batch["labels"] != -100).long()
        inputs[f"ref_{prefix}logps"] = torch.as_tensor(values[:, column])
    loss: torch.Tensor = trainer._compute_loss(trainer.model, inputs, False)
    assert trainer._metrics["train"]["kl"][-1] > 0, "a baseline of 0 would compare nothing"
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
    rows, values = rows_of(name), reference_values()
    (ours, our_gradients), (theirs, their_gradients) = (
        our_numbers(section, rows, values, packed), trl_numbers(name, settings, rows, values),
    )  # fmt: skip
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(1.0, *(float(gradient.abs().max()) for gradient in their_gradients.values()))
    difference = max(float((our_gradients[key] - their_gradients[key]).abs().max()) for key in their_gradients)
    return theirs, abs(ours - theirs) / max(1.0, abs(theirs)), difference / largest


def main() -> int:
    if "--speed" in sys.argv[1:]:
        import preference_speed

        return preference_speed.main([word for word in sys.argv[1:] if word != "--speed"])
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
