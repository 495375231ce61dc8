"""A language model that was loaded alone, put back into the model with images that its checkpoint holds.

transformers gives of some checkpoints (Llama 4, Qwen3.5) the language model alone. What is saved of it has to be the
whole checkpoint again: every other weight bit for bit as it was, and the config of the whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from surefit.core.errors import ModelError
from surefit.core.reading import library_errors
from surefit.facts.model import read_model_config
from surefit.model.classes import auto_class
from surefit.model.layerwise_forward import WeightFiles, names_in_files

WITH_IMAGES: Any = AutoModelForImageTextToText


def multimodal_config(part: PreTrainedConfig, base: Path) -> PreTrainedConfig | None:
    """The config of a checkpoint of which a model was loaded alone, with that model's config in its place; None where
    the model is all that the checkpoint holds.

    Args:
        part: the model's own; as it is now, with the vocabulary that it has grown to.
        base: the checkpoint.
    """
    if not (base / "config.json").is_file() or read_model_config(base).get("model_type") == part.model_type:
        return None
    config: Any = _config_of(base)
    if config is None:
        return None
    place = next((name for name in config.sub_configs if type(getattr(config, name)) is type(part)), None)
    if place is None:
        return None
    setattr(config, place, copy.deepcopy(part))
    if hasattr(config, "quantization_config"):  # what is saved is not quantised
        del config.quantization_config
    config.tie_word_embeddings = part.tie_word_embeddings
    config.dtype = part.dtype
    return config  # type: ignore[no-any-return]


def renaming_to_multimodal(directory: Path) -> Callable[[str], str] | None:
    """How what is in a language model that is loaded alone is called in the whole model; None where the whole is
    loaded.

    Args:
        directory: a checkpoint.
    """
    config = _config_of(directory)
    if config is None or getattr(config, "text_config", None) is None:
        return None
    with init_empty_weights():
        part = auto_class(config).from_config(config)
        if multimodal_config(part.config, directory) is None:
            return None
        return _renaming(part, WITH_IMAGES.from_config(config))


def _config_of(directory: Path) -> PreTrainedConfig | None:
    """A checkpoint's config; None where its code is its own, which transformers has no class with images for."""
    known = read_model_config(directory).get("model_type") in CONFIG_MAPPING
    return AutoConfig.from_pretrained(directory) if known else None


def _renaming(part: PreTrainedModel, whole: PreTrainedModel) -> Callable[[str], str]:
    """Name in `part` → name in `whole`, which has `part` in it, or its decoder beside the same head."""
    decoder, inner = next(each for each in part.named_children() if isinstance(each[1], PreTrainedModel))
    for prefix, module in whole.named_modules():
        if isinstance(part, type(module)):
            return lambda name: f"{prefix}.{name}"
        if isinstance(inner, type(module)):
            return partial(re.compile(rf"^{decoder}(?=\.)").sub, prefix)
    return lambda name: name


class MultimodalWrapper:
    """The whole model that `part` belongs to, without weights, and what of its checkpoint `part` does not hold.

    Raises:
        ModelError: the checkpoint's files do not have all of the rest, or have it in another form.
    """

    def __init__(self, part: PreTrainedModel, config: PreTrainedConfig, base: Path) -> None:
        with library_errors(base, ModelError, "transformers builds no model from its config.json", "take another"):
            with init_empty_weights():
                self.model: PreTrainedModel = WITH_IMAGES.from_config(config, dtype=part.dtype)
            self.model.tie_weights()
        self._weights = WeightFiles(base)
        renamed = _renaming(part, self.model)
        self._names = {name: renamed(name) for name in part.state_dict()}
        state = self.model.state_dict()
        stored = {name: name for name in state if name in self._weights} | names_in_files(self.model, self._weights)
        self._rest = {name: stored.get(name) for name in state if name not in self._names.values()}
        unknown = sorted(set(self._names.values()) - state.keys())
        if missing := unknown + sorted(name for name, place in self._rest.items() if place is None):
            raise ModelError(
                f"the untrained part cannot be saved unchanged: {missing[0]} is not in the checkpoint's files",
                code="E5078",
                path=base,
                help="train an adapter, or save the base anew with save_pretrained of this version of transformers",
            )
        skipped = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._rest |= {name: name for name in self._weights.names if any(re.search(each, name) for each in skipped)}

    def state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole model's tensors: these of the part, and the rest from the checkpoint, in the type it has there."""
        trained = {self._names[name]: tensor for name, tensor in tensors.items()}
        return trained | {name: self._weights.read(place) for name, place in self._rest.items() if place is not None}

    def changed_in(self, directory: Path) -> list[str]:
        """The tensors beside the part that a saved model lacks, or does not have bit for bit."""
        saved = WeightFiles(directory)
        kept = {name for name in self._rest.values() if name is not None}
        return sorted(
            name for name in kept if name not in saved or not torch.equal(saved.read(name), self._weights.read(name))
        )
