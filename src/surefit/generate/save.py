"""Saving of a whole model that ends its answers wherever it is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surefit.core.rundir import disk_errors, read_json, write_json
from surefit.facts.tokenizer import GENERATION_CONFIG
from surefit.generate.engine import stop_token_ids
from surefit.model.compat import without_deepspeed
from surefit.model.load import PROCESSOR
from surefit.model.multimodal_wrapper import MultimodalWrapper, multimodal_config
from surefit.model.remote_code import remote_code_files


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
    directory: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the weights, the tokenizer, and the base's generation config completed by `stop_token_ids`.

    Args:
        model: left unchanged. For a checkpoint with images it may be the language model alone; the whole checkpoint is
            written.
        base: the base model's folder.
        directory: a folder to fill.
        tensors: the weights, if the model itself has only a part of them.

    Raises:
        ModelError: the other parts of such a checkpoint are not in the base's files in the required form.
        OSError: the disk is full; `core.rundir.directory_atomic` around this makes a MachineError of it.
    """
    original, model.generation_config = model.generation_config, GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with disk_errors(), without_deepspeed():
            _write_weights(model, base, directory, tensors)
    finally:
        model.generation_config = original
    save_surroundings(model, tokenizer, base, directory)


def require_savable(model: PreTrainedModel, base: Path) -> None:
    """Raise before training the errors that `save_model` would raise after it."""
    config = multimodal_config(model.config, base)
    if config is not None:
        MultimodalWrapper(model, config, base)


def _write_weights(
    model: PreTrainedModel, base: Path, directory: Path, tensors: Mapping[str, torch.Tensor] | None
) -> None:
    config = multimodal_config(model.config, base)
    if config is None:
        model.save_pretrained(directory, state_dict=dict(tensors) if tensors is not None else None)
        return
    wrapper = MultimodalWrapper(model, config, base)
    wrapper.model.save_pretrained(
        directory, state_dict=wrapper.state(model.state_dict() if tensors is None else tensors)
    )


def save_surroundings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base: Path, directory: Path) -> None:
    """Write all that belongs to a model's weights: config, tokenizer with its chat template, the image processor's
    files, the Python code that config.json names, and the base's generation config completed by `stop_token_ids`."""
    stops = stop_token_ids(model, tokenizer)
    # Copied unchanged: transformers raises for settings that it finds inconsistent.
    generation = read_json(base / GENERATION_CONFIG) if (base / GENERATION_CONFIG).exists() else {}
    config: Any = multimodal_config(model.config, base)
    if config is None:
        config = model.config
        config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in (*(base / name for name in PROCESSOR), *remote_code_files(base)):
        if file.is_file():
            shutil.copyfile(file, directory / file.name)
    write_json(directory / GENERATION_CONFIG, generation | ({"eos_token_id": stops} if stops else {}))
