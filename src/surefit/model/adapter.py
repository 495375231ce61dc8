"""LoRA: adding the factors to a model, and the gate that a trained adapter is complete."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefit.config.schema import AdapterSection
from surefit.core.errors import ConfigError, GateError, did_you_mean
from surefit.facts.budget import ends_with

FIELD = "adapter.target_modules"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""What PEFT writes before a module's name."""


def add_adapter(model: PreTrainedModel, section: AdapterSection, seed: int = 0) -> PeftModel:
    """Freeze `model` and put LoRA factors beside its linear layers, in place.

    The factors are in the dtype of the base weights: PEFT's own default, float32 factors, would make a float32 copy of
    every layer's input. The optimizer keeps float32 masters of them (train/optim.py). The initial values depend on
    `seed` alone, and drawing them leaves torch's global random numbers as they were.

    Raises:
        ConfigError: an entry of `target_modules` matches no linear layer.
    """
    targets = adapted_modules(model, section.target_modules)
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type] # PEFT only divides by r, so a fraction is fine
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 asks transformers 5.23 things by their old names
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    assert lora_modules(adapted) == targets, "PEFT adapted other layers than we announce"
    # PEFT keeps a set, whose order changes from process to process; the saved config should not.
    config.target_modules = sorted(config.target_modules or ())
    return adapted


def adapted_modules(model: PreTrainedModel, target_modules: str | list[str]) -> dict[str, tuple[int, int]]:
    """The linear layers that get factors: full dotted name → (outputs, inputs).

    Args:
        model: the base model, without an adapter.
        target_modules: "all-linear" (all but the output head), or name endings such as `q_proj`.

    Raises:
        ConfigError: an ending matches no linear layer, or a head that shares its weight with the embedding.
    """
    layers = _linear_shapes(model)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    heads = {name for name, module in model.named_modules() if module is head}
    if target_modules == "all-linear":
        return {name: shape for name, shape in layers.items() if name not in heads}
    for ending in target_modules:
        if not any(ends_with(name, ending) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"no linear layer's name ends in {ending!r}{did_you_mean(ending, known)}",
                field=FIELD,
                help=f"choose from {', '.join(known)}, or all-linear",
            )
    chosen = {name: shape for name, shape in layers.items() if any(ends_with(name, e) for e in target_modules)}
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    if shared and heads & chosen.keys():
        raise ConfigError(
            f"the output head {', '.join(sorted(heads))} shares its weight with the input embedding",
            field=FIELD,
            help="leave it out: merged into the shared weight, the adapter would change the embedding as well",
        )
    return chosen


def lora_modules(model: PeftModel) -> dict[str, tuple[int, int]]:
    """The layers of `model` that have LoRA factors: full dotted name in the base model → (outputs, inputs)."""
    wrapped = {name: shape for name, shape in _linear_shapes(model).items() if name.endswith(".base_layer")}
    return {name.removeprefix(PREFIX).removesuffix(".base_layer"): shape for name, shape in wrapped.items()}


def trainable_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(trained, all) parameters, shared ones counted once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def completeness(directory: Path, modules: Mapping[str, tuple[int, int]]) -> None:
    """The gate between training and everything after it: the saved adapter is whole and has learnt.

    Args:
        directory: an adapter as PEFT saves it.
        modules: full dotted name → (outputs, inputs) of every layer it must adapt, from `adapted_modules` or
            `lora_modules`.

    Raises:
        GateError: files missing or damaged; a layer without factors, or factors for no layer; wrong shapes; values that
            are not finite; a `lora_B` that is still all zero, which is how it starts.
    """
    try:
        rank = int(json.loads((directory / CONFIG).read_text(encoding="utf-8"))["r"])
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise GateError(f"the adapter cannot be read: {error}", path=directory, help="train again") from error
    expected = {}
    for name, (outputs, inputs) in modules.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = (rank, inputs)
        expected[f"{PREFIX}{name}.lora_B.weight"] = (outputs, rank)
    problems = [
        _fault(name, tensors.get(name), expected.get(name)) for name in sorted(expected.keys() | tensors.keys())
    ]
    if found := [problem for problem in problems if problem]:
        rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise GateError(
            f"the adapter is not complete: {'; '.join(found[:3])}{rest}",
            path=directory / WEIGHTS,
            help="do not use it; train again, and check the loss in metrics.jsonl",
        )


def _fault(name: str, tensor: torch.Tensor | None, shape: tuple[int, int] | None) -> str | None:
    if tensor is None:
        return f"{name} is missing"
    if shape is None:
        return f"{name} belongs to no layer of the model"
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)} where {shape} fits"
    if not bool(torch.isfinite(tensor).all()):
        return f"{name} has values that are not finite"
    if ".lora_B." in name and not bool(tensor.any()):
        return f"{name} is all zero: this layer was not trained"
    return None


def _linear_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape  # GPT-2's layers hold their weight transposed
            shapes[name] = (outputs, inputs)
    return shapes
