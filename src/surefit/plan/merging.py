"""The device memory of merging: the steps of `merge.merge` on tensors without data.

The weights of a LoRA's base come from its files: on a GPU one matrix at a time to fold the factors in and to check the
result, then one layer at a time to read `PROMPTS` held-out rows. Only a quantized base, and a model all of whose
weights were trained, is held whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import PeftModel

from surefit.config.schema import LoraSection
from surefit.facts.lora_settings import PREFIX
from surefit.merge.adapter_file import Update
from surefit.merge.certify import LOGITS_COMPUTED_AT_ONCE, TOKENS_READ, read_logits, read_states
from surefit.merge.fold import fold_update, rounding_error
from surefit.merge.merge import PROMPTS
from surefit.model.adapter import lora_modules
from surefit.model.layerwise_forward import LayerwiseModel, Slot, stub_parameters
from surefit.plan.step_config import StepConfig
from surefit.plan.trace import Recorder

COMPARED = 4
"""Number of models that the certificate compares, in the host's memory: the base, the adapter, the merged model, and
the model with every weight nudged."""


def merge_reads_files(setting: StepConfig) -> bool:
    """Return whether the models that are compared run from their files."""
    return setting.adapter is not None and setting.quantization == "none"


def run_merge(model: torch.nn.Module, setting: StepConfig, recorder: Recorder) -> None:
    """Run the steps of `merge.merge` on its device, real or fake; the caller records.

    Nudging the weights needs less memory than the logits, and is left out.

    Args:
        model: with its adapter; its other weights are on the meta device if `merge_reads_files`, and made here while
            they are needed.
    """
    model.eval()
    recorder.start("merge")
    with recorder.naming(model):
        if merge_reads_files(setting):
            assert isinstance(model, PeftModel)
            _fold(model, setting, recorder)
            with _WithoutFiles(model).running(model):
                _forward_to_the_head(model, setting, recorder)
            return
        if setting.adapter is None:
            for tensor in model.state_dict().values():
                bool(torch.isfinite(tensor).all())
        _forward_compared_rows(model, setting, recorder)


def _fold(model: PeftModel, setting: StepConfig, recorder: Recorder) -> None:
    """Fold the adapter into each matrix. On a CPU a merged matrix stays until its file is written, which may hold the
    whole model."""
    dtype = getattr(torch, setting.dtype)
    adapted = lora_modules(model)
    assert setting.adapter is not None
    kept = []
    for name, parameter in model.get_base_model().named_parameters():
        if parameter.requires_grad:
            continue
        layer = name.replace(".base_layer", "").removesuffix(".weight")
        if layer in adapted:
            work = partial(_merge_one_matrix, parameter.shape, dtype, setting.adapter)
            recorder.repeating((parameter.shape, dtype), f"{PREFIX}{layer}", work)
        with recorder.inside(f"{PREFIX}{name}"):
            matrix = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            recorder.tag([matrix], "weights")
            kept += [] if setting.cuda else [matrix]


def _merge_one_matrix(shape: torch.Size, dtype: torch.dtype, adapter: LoraSection) -> None:
    """Merge one matrix, then make it again and compare it with the written one."""
    *experts, outputs, inputs = shape
    lengths = torch.empty(outputs, device="cpu") if adapter.use_dora else None
    a = torch.empty(*experts, adapter.r, inputs, device="cpu")
    b = torch.empty(*experts, outputs, adapter.r, device="cpu")
    update = Update(a, b, 1.0, lengths)
    matrix = torch.empty(shape, dtype=dtype, device="cpu")
    fold_update(matrix, update)
    rounding_error(matrix, update, matrix)


def _compared_rows(setting: StepConfig) -> list[list[int]]:
    """Return the compared rows, each with its largest share of `TOKENS_READ`; real rows differ in length, so they are
    padded."""
    return [[0] * min(setting.length, TOKENS_READ)] * PROMPTS


def _forward_compared_rows(model: torch.nn.Module, setting: StepConfig, recorder: Recorder) -> None:
    """Run the forward pass of every model over the compared rows, and hold their logits."""
    rows = _compared_rows(setting)
    logits = recorder.repeat_keeping(lambda: read_logits(model, rows, "cpu"), 1 if setting.cuda else COMPARED)
    del logits


def _forward_to_the_head(model: torch.nn.Module, setting: StepConfig, recorder: Recorder) -> None:
    """Run the forward pass of every model over the compared rows, hold the states before the head, and compute the
    logits of some positions at once."""
    rows = _compared_rows(setting)
    count = 1 if setting.cuda else COMPARED
    sources = recorder.repeat_keeping(lambda: read_states(model, rows, "cpu"), count)
    positions = min(sources[0].positions, max(1, LOGITS_COMPUTED_AT_ONCE // sources[0].vocabulary))
    blocks = recorder.repeat_keeping(lambda: sources[0].read(0, positions), count)
    del blocks


class _WithoutFiles(LayerwiseModel):
    """A model whose weights are made without data instead of being read."""

    def __init__(self, model: torch.nn.Module) -> None:
        stored = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        stub_parameters(model, "cpu", only_meta=True)
        self._stored = {model.get_parameter(name): name for name in stored}

    def _fill(self, slots: list[Slot], *_: Any) -> None:
        for module, attribute, parameter in slots:
            weight = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            setattr(module, attribute, torch.nn.Parameter(weight, requires_grad=False))
