"""The names that config keys and values had before they became those of TrainingArguments and LoraConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

KEYS = {
    "adapter.kind": "train.method",
    "adapter.r": "lora.r",
    "adapter.alpha": "lora.lora_alpha",
    "adapter.dropout": "lora.lora_dropout",
    "adapter.use_rslora": "lora.use_rslora",
    "adapter.use_dora": "lora.use_dora",
    "adapter.target_modules": "lora.target_modules",
    "adapter.experts": "lora.experts",
    "adapter.start_from": "lora.start_from",
    "train.epochs": "train.num_train_epochs",
    "train.optimizer": "train.optim",
    "train.schedule": "train.lr_scheduler_type",
    "train.warmup": "train.warmup_steps",
    "train.decay": "train.decay_steps",
    "train.eval_every": "train.eval_steps",
    "checkpoint.every": "checkpoint.save_steps",
    "checkpoint.keep_best": "checkpoint.metric_for_best_model",
    "data.prepared": "data.tokenized",
    "evaluate.also": "evaluate.extra_sets",
}
"""Old key → new key."""
VALUES = {
    "train.optimizer": {"adamw": "adamw_torch", "paged_adamw": "paged_adamw_32bit"},
    "train.schedule": {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"},
}
"""Old key → old value → new value, where that changed too."""
RECIPES = {"sft": "chat"}
"""Old name → new name; several are joined by +."""


class RenamedKey(NamedTuple):
    """A key by its old name, what it is called now, the value to write there, and whether the new one is set too."""

    old: str
    new: str
    value: Any
    both: bool = False


def renamed_keys(tree: Mapping[str, Any]) -> Iterator[RenamedKey]:
    """Yield every key of a config that has another name now.

    >>> list(renamed_keys({"train": {"schedule": "wsd"}}))
    [RenamedKey(old='train.schedule', new='train.lr_scheduler_type', value='warmup_stable_decay', both=False)]
    """
    recipe = tree.get("recipe")
    if isinstance(recipe, str):
        value = " + ".join(RECIPES.get(name, name) for name in map(str.strip, recipe.split("+")))
        if any(name.strip() in RECIPES for name in recipe.split("+")):
            yield RenamedKey("recipe", "recipe", value)
    for old, new in KEYS.items():
        section, _, key = old.partition(".")
        here, there = tree.get(section), tree.get(new.partition(".")[0])
        if not isinstance(here, Mapping) or key not in here:
            continue
        value = here[key]
        both = isinstance(there, Mapping) and new.partition(".")[2] in there
        yield RenamedKey(old, new, VALUES.get(old, {}).get(value, value) if isinstance(value, str) else value, both)


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's values by their new names; where both are set, the new one's."""
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for old, new, value, both in list(renamed_keys(tree)):
        if old == new:
            changed[old] = value
            continue
        section, _, key = old.partition(".")
        del changed[section][key]
        if section == "adapter" and not changed[section]:
            del changed[section]
        section, _, key = new.partition(".")
        if both:
            continue
        changed[section] = (changed.get(section) or {}) | {key: value}
    return changed
