"""The result of training: an adapter or a model that other tools load, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint.manager import disk_errors
from surefit.config.schema import ModelSection
from surefit.core.rundir import RunDir, directory_atomic
from surefit.generate.save import save_model
from surefit.model.adapter import completeness, lora_modules
from surefit.model.identity import base_directory, write_record


def export(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, base: ModelSection, run: RunDir
) -> Path:
    """Write `adapter/` or `model/` whole or not at all, and return it.

    Raises:
        GateError: the adapter is not complete (model/adapter.py); nothing is written.
        MachineError: the disk is full or may not be written to.
    """
    path = run.adapter if isinstance(model, PeftModel) else run.model
    with directory_atomic(path) as temporary, disk_errors():
        if isinstance(model, PeftModel):
            # PEFT would write the folder that the base was loaded from: of surefit/nano, a path of this machine.
            model.active_peft_config.base_model_name_or_path = base.name_or_path
            # "auto" would ask the hub about the base model's vocabulary.
            model.save_pretrained(str(temporary), save_embedding_layers=False)
            (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card
            tokenizer.save_pretrained(temporary)
            write_record(temporary, base, get_peft_model_state_dict(model, save_embedding_layers=False))
            completeness(temporary, lora_modules(model))
        else:
            save_model(model, tokenizer, base_directory(base), temporary)
            write_record(temporary, base, model.state_dict())
    return path
