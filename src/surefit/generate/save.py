"""A whole model on disk that ends its answers wherever it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint.manager import disk_errors
from surefit.core.rundir import read_json, write_json
from surefit.generate.engine import stop_token_ids

GENERATION_CONFIG = "generation_config.json"


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
    directory: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the weights, the tokenizer, and the base's generation config completed by `stop_token_ids`.

    Args:
        model: left as it was.
        base: the base model's folder.
        directory: a folder to fill.
        tensors: the weights, where the model itself has only a part of them.

    Raises:
        OSError: the disk is full; `core.rundir.directory_atomic` around this makes a MachineError of it.
    """
    stops = stop_token_ids(model, tokenizer)
    # Carried over as it is: transformers refuses to write settings that it finds inconsistent.
    generation = read_json(base / GENERATION_CONFIG) if (base / GENERATION_CONFIG).exists() else {}
    own, model.generation_config = model.generation_config, GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with disk_errors():
            model.save_pretrained(directory, state_dict=dict(tensors) if tensors is not None else None)
    finally:
        model.generation_config = own
    tokenizer.save_pretrained(directory)
    write_json(directory / GENERATION_CONFIG, generation | ({"eos_token_id": stops} if stops else {}))
