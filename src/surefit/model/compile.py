"""torch.compile of a model's decoder layers, one at a time: short to compile, and like layers share the result."""

from __future__ import annotations

import importlib.util
import shutil

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from surefit.core.errors import ConfigError, MachineError
from surefit.model.fused_lora import disable_projection_groups

FIELD = "speed.compile"
KINDS = 32
"""Compiled forms that layers of one class may have together, before torch falls back to uncompiled code. They differ by
sliding window or none, by the input needing a gradient or not (the first layer's), by training or evaluation, by one
row or several; torch's own limit is 8."""


def compile_layers(model: PreTrainedModel | PeftModel) -> int:
    """Compile the forward of every decoder layer, in place; return how many there are.

    Nothing is compiled before the first call, which takes seconds to minutes. All sizes that may change are symbolic
    from the start, so that another length runs the same code. Call it after the adapter is added and fused and after
    checkpointing is switched on.

    Raises:
        ConfigError: the model has no layers of transformers' kind.
        MachineError: there is no compiler.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no decoder layers that SureFit can compile",
            code="E5045",
            field=FIELD,
            help="set speed.compile: false",
        )
    _require_compiler(next(model.parameters()).device.type)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    for layer in layers:
        if layer.gradient_checkpointing:
            disable_projection_groups(layer)
        layer.compile(dynamic=True)
    return len(layers)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that transformers checkpoints one by one, in their order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _require_compiler(device: str) -> None:
    if device == "cuda":
        lacking = "triton" if importlib.util.find_spec("triton") is None else "a C compiler" if not _c() else None
    else:
        lacking = None if _cpp() else "a C++ compiler"
    if lacking:
        raise MachineError(
            f"torch.compile needs {lacking}, which is not installed",
            code="E5046",
            field=FIELD,
            help="set speed.compile: false, or install it (triton: pip install triton; compilers: apt install g++)",
        )


def _c() -> bool:
    """Return whether there is a C compiler: Triton compiles its launchers with any of these."""
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def _cpp() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False
