"""The return of a language model that was loaded alone into the multimodal model of its checkpoint.

From some checkpoints (Llama 4, Qwen3.5) transformers loads only the language model. It has to be saved as the whole
checkpoint again: every other weight bit for bit as it was, and the config of the whole.
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
    """Return the config of the checkpoint that a language model was loaded from, with the model's own config in its
    place; None where the model is the whole checkpoint.

    Args:
        part: the model's own config, at present, with its grown vocabulary.
        base: the checkpoint.
    """
    if not (base / "config.json").is_file() or read_model_config(base).get("model_type") == part.model_type:
        return None
    config: Any = _config_of(base)
    if config is None:
        return None
    section = next((name for name in config.sub_configs if type(getattr(config, name)) is type(part)), None)
    if section is None:
        return None
    setattr(config, section, copy.deepcopy(part))
    if hasattr(config, "quantization_config"):  # the saved model is not quantized
        del config.quantization_config
    config.tie_word_embeddings = part.tie_word_embeddings
    config.dtype = part.dtype
    return config  # type: ignore[no-any-return]


def renaming_to_multimodal(directory: Path) -> Callable[[str], str] | None:
    """Return the function from a tensor's name in a language model that is loaded alone to its name in the whole model;
    None where the whole is loaded.

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
    """Return a checkpoint's config; None where its code is its own, for which transformers has no class with images."""
    is_known = read_model_config(directory).get("model_type") in CONFIG_MAPPING
    return AutoConfig.from_pretrained(directory) if is_known else None


def _renaming(part: PreTrainedModel, whole: PreTrainedModel) -> Callable[[str], str]:
    """Return the function from a name in `part` to the name in `whole`, which contains `part`, or its decoder beside
    the same head."""
    decoder, inner = next(child for child in part.named_children() if isinstance(child[1], PreTrainedModel))
    for prefix, module in whole.named_modules():
        if isinstance(part, type(module)):
            return lambda name: f"{prefix}.{name}"
        if isinstance(inner, type(module)):
            return partial(re.compile(rf"^{decoder}(?=\.)").sub, prefix)
    return lambda name: name


class MultimodalWrapper:
    """The whole model that `part` belongs to, without weights, and the tensors of its checkpoint outside `part`.

    Raises:
        ModelError: the checkpoint's files lack some of the other tensors, or have them in another form.
    """

    def __init__(self, part: PreTrainedModel, config: PreTrainedConfig, base: Path) -> None:
        with library_errors(
            base, ModelError, "transformers cannot build a model from its config.json", "choose another model"
        ):
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
        if missing := unknown + sorted(name for name, file_name in self._rest.items() if file_name is None):
            raise ModelError(
                f"the untrained part cannot be saved unchanged: {missing[0]} is not in the checkpoint's files",
                code="E5078",
                path=base,
                help="train an adapter, or save the base again with save_pretrained of this version of transformers",
            )
        skipped = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._rest |= {
            name: name for name in self._weights.names if any(re.search(pattern, name) for pattern in skipped)
        }

    def state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors: these of the part, and the others from the checkpoint, in their dtype
        there."""
        trained = {self._names[name]: tensor for name, tensor in tensors.items()}
        return trained | {
            name: self._weights.read(file_name) for name, file_name in self._rest.items() if file_name is not None
        }

    def changed_in(self, directory: Path) -> list[str]:
        """Return the tensors beside the part that a saved model lacks, or does not have bit for bit."""
        saved = WeightFiles(directory)
        names = {name for name in self._rest.values() if name is not None}
        return sorted(
            name for name in names if name not in saved or not torch.equal(saved.read(name), self._weights.read(name))
        )
