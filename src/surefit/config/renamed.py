"""Old names of config keys and values, before they became the names in TrainingArguments and LoraConfig."""

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
"""Old key → old value → new value, for keys whose values changed too."""
RECIPES = {"sft": "chat"}
"""Old recipe name → new name; a config can join several with +."""


class RenamedKey(NamedTuple):
    """A key with an old name: old and new name, the value for the new one, and whether the new one is set too."""

    old: str
    new: str
    value: Any
    both: bool = False


def renamed_keys(tree: Mapping[str, Any]) -> Iterator[RenamedKey]:
    """Yield every key of a config that has been renamed.

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
        old_section, new_section = tree.get(section), tree.get(new.partition(".")[0])
        if not isinstance(old_section, Mapping) or key not in old_section:
            continue
        value = old_section[key]
        both = isinstance(new_section, Mapping) and new.partition(".")[2] in new_section
        yield RenamedKey(old, new, VALUES.get(old, {}).get(value, value) if isinstance(value, str) else value, both)


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's values under their new names; where both names are set, the new one counts."""
    renamed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for old, new, value, both in list(renamed_keys(tree)):
        if old == new:
            renamed[old] = value
            continue
        section, _, key = old.partition(".")
        del renamed[section][key]
        if section == "adapter" and not renamed[section]:
            del renamed[section]
        section, _, key = new.partition(".")
        if both:
            continue
        renamed[section] = (renamed.get(section) or {}) | {key: value}
    return renamed
