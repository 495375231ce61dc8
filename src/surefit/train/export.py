"""Export of a trained adapter or model, with its tokenizer, in the format that other tools load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.config.schema import ModelSection
from surefit.core.rundir import RunDir, directory_atomic, disk_errors
from surefit.generate.save import save_model
from surefit.model.adapter import require_complete_adapter
from surefit.model.identity import base_directory, write_record


def tensors_to_save(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors to save: an adapter's trained factors, or all of a model; not detached, so that shared tensors
    can be recognized."""
    adapter = isinstance(model, PeftModel)
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not adapter or tensor.requires_grad}


def export_trained_model(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    base: ModelSection,
    run: RunDir,
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, tuple[int, ...]],
) -> Path:
    """Write `adapter/` or `model/` atomically, and return its path.

    Args:
        model: a process's part of a sharded model is enough.
        tensors: result of `tensors_to_save` for the whole model.
        modules: `lora_modules` of the whole model; empty after full fine-tuning.

    Raises:
        GateError: the adapter is not complete (model/adapter.py); nothing is written.
        MachineError: the disk is full or may not be written to.
    """
    assert isinstance(model, PreTrainedModel | PeftModel)
    path = run.adapter if isinstance(model, PeftModel) else run.model
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    with directory_atomic(path) as temporary, disk_errors():
        if isinstance(model, PeftModel):
            # PEFT would write the directory that the base was loaded from: for surefit/nano, a path on this machine.
            model.active_peft_config.base_model_name_or_path = base.name_or_path
            # "auto" would ask the hub about the base model's vocabulary.
            model.save_pretrained(str(temporary), save_embedding_layers=False, state_dict=tensors)
            (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card
            tokenizer.save_pretrained(temporary)
            saved = get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)
            write_record(temporary, base, saved)
            require_complete_adapter(temporary, modules)
        else:
            save_model(model, tokenizer, base_directory(base), temporary, tensors)
            write_record(temporary, base, tensors)
    return path
