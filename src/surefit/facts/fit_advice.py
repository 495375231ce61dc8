"""Changes after which a run fits, as check and plan propose them. `plan/find_advice.py` tries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefit.config.resolve import one_line_yaml

PROPOSED_MODELS = (
    ("Qwen/Qwen3-32B", "32.8B", "Apache-2.0"),
    ("Qwen/Qwen3-14B", "14.8B", "Apache-2.0"),
    ("Qwen/Qwen2.5-7B-Instruct", "7.6B", "Apache-2.0"),
    ("Qwen/Qwen3-4B-Instruct-2507", "4.0B", "Apache-2.0"),
    ("Qwen/Qwen3-0.6B", "0.6B", "Apache-2.0"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "Apache-2.0"),
)
"""Models that are proposed where none is named or the named one is too large, the largest first, with parameters and
license; all of them are in the catalogue and need no permission."""

CARDS = {
    "rtx3060-12": 12, "rtx4080": 16, "rtx4090": 24, "rtx5090": 32, "rtx-a6000": 48, "a100-80": 80, "h200": 141,
    "b200": 180, "b300": 288,
}  # fmt: skip
"""Cards that are proposed, and their advertised GB: one of each size."""

Kind = Literal["settings", "card", "devices", "model"]
WORDS = {
    "train.method": "LoRA",
    "model.quantization": "the base in 4 bits",
    "data.max_length": "shorter rows",
    "train.per_device_train_batch_size": "a smaller micro batch",
    "train.gradient_checkpointing": "gradient checkpointing",
    "speed.chunked_loss": "a loss in chunks",
    "speed.tiled_mlp": "MLPs in tiles",
    "model.revision": "its own revision",
    "model.chat_template": "its own chat template",
    "model.chat_template_kwargs": "no switches of the template",
    "lora.target_modules": "LoRA in all linear layers",
}
"""What a changed setting means, for files in which it has another name."""


@dataclass(frozen=True)
class FitOption:
    """One way to make a run fit, which was tried.

    Attributes:
        kind: what is changed beside settings: nothing, the card, the number of devices, or the model.
        changes: dotted key → new value.
        name: the card or the model in words, such as "a 48 GB card".
    """

    kind: Kind
    changes: Mapping[str, Any]
    name: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The changes without card, number of devices and model."""
        others = ("hardware.gpu", "hardware.count", "model.name_or_path")
        return {key: value for key, value in self.changes.items() if key not in others}

    def text(self, own_keys: bool = True) -> str:
        """Return the option in words.

        Args:
            own_keys: whether the file has SureFit's keys; otherwise no key is named.
        """
        if own_keys:
            settings = ", ".join(f"{key}: {one_line_yaml(value)}" for key, value in self.settings.items())
        else:
            settings = " and ".join(dict.fromkeys(WORDS.get(key, key) for key in self.settings))
        using = f" with {settings}" if settings else ""
        match self.kind:
            case "settings":
                return f"{'set' if own_keys else 'use'} {settings}"
            case "card":
                return f"{self.name}{self._flag(own_keys, '--gpu', 'hardware.gpu')}{using}"
            case "devices":
                return f"{self.name}{self._flag(own_keys, '--gpus', 'hardware.count')}{using}"
            case "model":
                return f"a smaller model, {self.name}{using}"

    def _flag(self, own_keys: bool, flag: str, key: str) -> str:
        return f" ({flag} {self.changes[key]})" if own_keys and key in self.changes else ""


@dataclass(frozen=True)
class FitAdvice:
    """The ways to make a run fit that were tried and do, the least change first; none where nothing tried fits.

    Attributes:
        cards: whether larger cards and more of them were tried too, as they are for a run on a GPU.
    """

    options: Sequence[FitOption] = field(default_factory=tuple)
    cards: bool = True

    def text(self, own_keys: bool = True) -> str:
        """Return all options in one sentence."""
        if not self.options:
            cards = "no larger card, " if self.cards else ""
            return f"nothing that was tried fits: no saving setting, {cards}no smaller model of the catalogue"
        return "; or ".join(option.text(own_keys) for option in self.options)
