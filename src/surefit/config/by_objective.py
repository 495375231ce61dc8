"""Settings that the objective decides where the config leaves them open, and keys that it does not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefit.config.schema import ObjectiveSection, SureFitConfig
from surefit.core.errors import ConfigError

BETA = {
    "sigmoid": (0.1, "dpo's, in the paper and in every trainer"),
    "ipo": (0.1, "IPO's τ, as in TRL: the margin aimed at is 1 / (2 × 0.1) = 5 nats per token"),
    "sigmoid_norm": (5.0, "Tülu 3's: the ratios are per token, so that 0.1 would leave the sigmoid flat"),
    "orpo": (0.1, "the paper's λ"),
    "simpo": (2.0, "the paper's, from 2 to 2.5: at TRL's 0.1 the margin has no effect"),
    "kto": (0.1, "kto's, in the paper and in every trainer"),
}
"""Value and reason of `objective.beta` by `loss_type` for dpo, else by name."""
LEARNING_RATE = {
    ("dpo", "lora"): (1e-5, "for dpo with LoRA; sft's 2e-4 drives both answers' likelihood down"),
    ("dpo", "full"): (1e-6, "for dpo with all weights, as in the paper and in TRL"),
    ("orpo", "lora"): (8e-5, "for orpo with LoRA: ten times the paper's rate for all weights"),
    ("orpo", "full"): (8e-6, "for orpo with all weights, as in the paper"),
    ("simpo", "lora"): (1e-5, "for simpo with LoRA: ten times the paper's rate for all weights"),
    ("simpo", "full"): (1e-6, "for simpo with all weights: the paper's are from 3e-7 to 1e-6"),
    ("kto", "lora"): (1e-5, "for kto with LoRA: ten times the rate for all weights"),
    ("kto", "full"): (1e-6, "for kto with all weights: TRL recommends 5e-7 to 5e-6 at beta 0.1"),
}
"""Value and reason of `train.learning_rate` by the objective's name and `train.method`."""
PAIR_EPOCHS = 1.0, "a second pass over the same pairs mostly makes both answers less likely"
LABEL_EPOCHS = 1.0, "a second pass over the same answers mostly makes the bad ones less likely still"


def decide_by_objective(config: SureFitConfig, rate_is_open: bool) -> dict[str, tuple[Any, str]]:
    """Decide what the objective has defaults of its own for, with their reasons; nothing for sft.

    Args:
        rate_is_open: whether nothing sets `train.learning_rate`.
    """
    objective, train = config.objective, config.train
    if objective.name == "sft":
        return {}
    decisions: dict[str, tuple[Any, str]] = {}
    if objective.beta == "auto":
        decisions["objective.beta"] = BETA[objective.loss_type if objective.name == "dpo" else objective.name]
    if rate_is_open:
        decisions["train.learning_rate"] = LEARNING_RATE[objective.name, train.method]
    if train.num_train_epochs == "auto":
        decisions["train.num_train_epochs"] = LABEL_EPOCHS if objective.labelled else PAIR_EPOCHS
    return decisions


def require_several_rows(config: SureFitConfig) -> None:
    """Raise for kto with a batch of one: its baseline would be a single number, and not a mean.

    Raises:
        ConfigError: as said.
    """
    batch = config.train.global_batch_size
    if config.objective.labelled and isinstance(batch, int) and batch < 2:
        raise ConfigError(
            "kto compares each answer with what the model prefers on average over the batch, and a batch of one has no "
            "average",
            code="E2500",
            field="train.global_batch_size",
            help="write 16 or more; per_device_train_batch_size may be 1, since the average is over the whole batch",
        )


def find_unread_keys(objective: ObjectiveSection) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, problem, help) for each key of the section `objective` that the objective does not read, but
    for those that have their default: a file that was written from a whole config has them all."""
    for key, field in ObjectiveSection.model_fields.items():
        if key not in objective.read_keys and getattr(objective, key) != field.default:
            reads = _words(sorted(objective.read_keys))
            help_text = f"remove it; {_named(objective)} reads {reads}"
            yield f"objective.{key}", f"{_named(objective)} does not read {key}", help_text


def _named(objective: ObjectiveSection) -> str:
    special = objective.name == "dpo" and objective.loss_type != "sigmoid"
    return f"{objective.name} with loss_type {objective.loss_type}" if special else objective.name


def _words(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
