"""The result of training: an adapter or a model that other tools load, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint.manager import disk_errors
from surefit.config.schema import ModelSection
from surefit.core.rundir import RunDir, directory_atomic
from surefit.model.adapter import completeness, lora_modules
from surefit.model.identity import write_record


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
            # "auto" would ask the hub about the base model's vocabulary.
            model.save_pretrained(str(temporary), save_embedding_layers=False)
            (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card
        else:
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if isinstance(model, PeftModel):
            write_record(temporary, base, get_peft_model_state_dict(model, save_embedding_layers=False))
            completeness(temporary, lora_modules(model))
        else:
            write_record(temporary, base, model.state_dict())
    return path
