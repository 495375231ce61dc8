"""Preparation of a loaded model for training: every option of the config, in the one order that works.

The adapter comes first: the later steps change its layers too. Attention is checked on plain layers before anything is
fused. Tiles and compiled code wrap the forward pass that exists by then, so they come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from surefit.config.resolve import HardwareLike
from surefit.config.schema import SureFitConfig
from surefit.core.units import plural
from surefit.facts.activations import TILE
from surefit.model import attention
from surefit.model.adapter import add_adapter, load_initial_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.compile import compile_layers
from surefit.model.fused_lora import fuse_lora, unfused_layers
from surefit.model.kernels import require_kernels, use_kernels
from surefit.model.neftune import Neftune
from surefit.model.tiling import tile_mlps
from surefit.model.tokenizer import new_tokens


def prepare_for_training(
    model: PreTrainedModel, config: SureFitConfig, hardware: HardwareLike
) -> tuple[PreTrainedModel | PeftModel, list[str]]:
    """Apply the options of the sections adapter, speed and train to the model, in place.

    Args:
        model: from `load_model`, quantized or not.
        config: nothing in it is "auto".
        hardware: the device that the model is on.

    Returns:
        The model with its adapter, or whole; and notes for the user.

    Raises:
        ConfigError, ModelError, MachineError: an option that this model or this machine does not support.
    """
    train, speed = config.train, config.speed
    notes: list[str] = []
    ready: PreTrainedModel | PeftModel = model
    if config.adapter is not None:
        new = new_tokens(config.model)
        ready = add_adapter(model, config.adapter, train.seed, new.ids if new else ())
        if config.lora.start_from is not None:
            notes += load_initial_adapter(ready, Path(config.lora.start_from).expanduser(), config.model)
    notes += _set_attention(ready, config, hardware)
    if speed.fused_lora is True and isinstance(ready, PeftModel):
        notes += _fuse(ready)
    if speed.kernels is True:
        notes += _use_kernels(ready, hardware)
    assert train.gradient_checkpointing != "auto"
    enable_checkpointing(ready, train.gradient_checkpointing)
    if speed.tiled_mlp is True:
        tile_mlps(ready, TILE)
    if speed.compile:
        notes.append(f"{plural(compile_layers(ready), 'layer')} will be compiled when they are first run")
    if train.neftune_noise_alpha is not None:
        Neftune(ready, train.neftune_noise_alpha)
    return ready, notes


def _set_attention(model: PreTrainedModel | PeftModel, config: SureFitConfig, hardware: HardwareLike) -> list[str]:
    """Set the attention implementation; for padded batches `load_model`'s choice stays, unless the config sets
    another."""
    base, packed = unwrap_base_model(model), config.data.packing is True
    implementation = attention.resolve_attention(
        config.speed.attention,
        packed=packed,
        dtype=config.model.dtype,
        capability=torch.cuda.get_device_capability() if hardware.kind == "cuda" else None,
        config=base.config.to_dict(),
    )
    if implementation.name == attention.NAME:
        attention.use_varlen(model)
    elif packed or implementation.name != "sdpa":
        base.set_attn_implementation(implementation.name)
    if not packed:
        return []
    attention.require_packable(model)
    if config.speed.shared_prompts is True:
        attention.require_shareable_prompts(model)
    shared = ", each prompt once for both answers" if config.speed.shared_prompts is True else ""
    return [f"packed{shared}, attention {implementation.name}: {implementation.reason}"]


def _fuse(model: PeftModel) -> list[str]:
    fuse_lora(model)
    unfused = unfused_layers(model)
    if not unfused:
        return []
    name, why = next(iter(unfused.items()))
    return [f"{plural(len(unfused), 'LoRA layer')} computed by PEFT, not fused: {name}, {why}"]


def _use_kernels(model: torch.nn.Module, hardware: HardwareLike) -> list[str]:
    if hardware.kind != "cuda":
        return ["fused kernels need a GPU: the model runs without them on a CPU"]
    require_kernels()
    counts = use_kernels(model)
    return [f"fused kernels for {plural(counts.norms, 'norm')}, {plural(counts.mlps, 'MLP')} and the rope of "
            f"{plural(counts.rotations, 'layer')}"]  # fmt: skip


@contextmanager
def reads_padding(model: torch.nn.Module) -> Iterator[None]:
    """Let a model that was prepared for packed batches read padded ones in this block, as generation requires."""
    base = unwrap_base_model(model)
    config: Any = base.config
    outer = config._attn_implementation
    if outer == attention.NAME:
        plain = attention.resolve_attention(
            "auto", packed=False, dtype=str(base.dtype).removeprefix("torch."), capability=None, config=config.to_dict()
        )
        base.set_attn_implementation(plain.name)
    try:
        yield
    finally:
        if outer == attention.NAME:
            base.set_attn_implementation(outer)


def unwrap_base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside an adapter, or the model itself."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base
