"""Loading the models, adapters and tokenizer that a run has saved, with the settings of its training."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.config.resolve import HardwareLike
from surefit.config.schema import ModelSection
from surefit.core.errors import ModelError
from surefit.core.rundir import RunDir
from surefit.facts.named_templates import TEMPLATE_FILE, templates_in, to_template_dict
from surefit.model.adapter import adapter_errors, factors_in_compute_dtype
from surefit.model.layers import load_for_generation
from surefit.model.layerwise_forward import config_to_load
from surefit.model.tokenizer import Resized, load_tokenizer
from surefit.model.vocabulary import resize_vocabulary


def load_run_tokenizer(
    section: ModelSection, run: RunDir, asked: ModelSection | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model that a run has trained, or is training; with `asked`'s settings where its
    template has other values for generation.

    Raises:
        ModelError: its chat template differs from the one that training saved beside the weights: the file was edited
            since, or the base model has a new one.
    """
    tokenizer = load_tokenizer(section)
    for directory in (run.adapter, run.model):
        trained = templates_in(directory)
        if not trained:
            continue  # nothing is trained yet, or without a template
        if to_template_dict(tokenizer.chat_template) != trained:
            kept = directory if len(trained) > 1 else directory / TEMPLATE_FILE
            raise ModelError(
                "the chat template has changed since training",
                code="E5065",
                path=section.chat_template or section.name_or_path,
                field="model.chat_template",
                help=f"use the template from training, --set model.chat_template={kept}, or train again",
            )
    return tokenizer if asked in (None, section) else load_tokenizer(asked)


def load_saved(section: ModelSection, directory: Path, hardware: HardwareLike) -> PreTrainedModel:
    """Load a whole model from a run's model/ or merged/, in the dtype and on the device of the base model.

    It is not quantized: a model merged from a quantized base would lose the merge to rounding.

    Raises:
        ModelError: weights are missing or damaged.
    """
    saved = {"name_or_path": str(directory), "revision": None, "quantization": "none"}
    return load_for_generation(section.model_copy(update=saved), hardware)


def load_adapted(section: ModelSection, directory: Path, hardware: HardwareLike) -> PeftModel:
    """Load a base model with a run's adapter beside its weights, in evaluation mode.

    The factors keep the dtype of the base, as in training (see `add_adapter`).

    Raises:
        ModelError: the base's weights are missing or damaged.
        GateError: the adapter is not one for this base.
    """
    return with_adapter(load_for_generation(section, hardware), directory)


def load_resized(section: ModelSection, hardware: HardwareLike, resized: Resized | None) -> PreTrainedModel:
    """Load a base model, with its vocabulary resized unless `resized` is None."""
    base = load_for_generation(section, hardware)
    if resized is not None:
        resize_vocabulary(base, resized)
    return base


def with_adapter(base: PreTrainedModel, directory: Path) -> PeftModel:
    """Return a loaded base model with an adapter beside its weights, in evaluation mode; see `load_adapted`."""
    with adapter_errors(directory):
        adapted = PeftModel.from_pretrained(
            base, str(directory), config=config_to_load(directory), autocast_adapter_dtype=False
        )
    assert isinstance(adapted, PeftModel)
    factors_in_compute_dtype(adapted)
    return adapted.eval()
