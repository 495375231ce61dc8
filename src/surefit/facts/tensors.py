"""Tensors of a model to train, by name and shape: those in its files, and those that processes share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from surefit.config.schema import LoraSection
from surefit.facts.activations import LLAMA_LIKE as LLAMA_LIKE
from surefit.facts.experts import factor_shapes, wrappers
from surefit.facts.memory_formula import OUTPUT_HEADS, target_modules
from surefit.facts.model import ModelFacts
from surefit.facts.vocabulary import row_shapes

Shape = tuple[int, ...]
KNOWN = 64
"""Number of models whose tensors are cached."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter; `trained` where the optimizer updates it."""

    name: str
    shape: Shape
    trained: bool

    @property
    def decayed(self) -> bool:
        """Return whether weight decay applies, as `train/optim.py` decides: not to norms and biases."""
        return len(self.shape) > 1 and not self.name.endswith("bias")


_known: dict[tuple[Any, ...], tuple[ParameterSpec, ...]] = {}


def list_parameters(model: ModelFacts, adapter: LoraSection | None) -> tuple[ParameterSpec, ...]:
    """List every parameter once, a tied head as the embedding; without an adapter all of them count as trained."""
    # A search needs the same thousands of names for every candidate.
    size = (model.parameters, model.num_layers, model.new_tokens)
    key = (model.name, model.source, size, adapter and adapter.model_dump_json())
    if key not in _known:
        if len(_known) > KNOWN:
            _known.clear()
        _known[key] = tuple(_tensors(model, adapter))
    return _known[key]


def _tensors(model: ModelFacts, adapter: LoraSection | None) -> Iterator[ParameterSpec]:
    for name, shape in base_parameters(model):
        if not (model.tied_embeddings and name.rpartition(".")[0].rpartition(".")[2] in OUTPUT_HEADS):
            yield ParameterSpec(name, shape, adapter is None)
    if adapter is not None:
        for name, shape in adapter_parameters(model, adapter):
            yield ParameterSpec(name, shape, True)


def adapter_parameters(model: ModelFacts, adapter: LoraSection) -> Iterator[tuple[str, Shape]]:
    """Yield an adapter's trained tensors by their names in the PEFT model: factors, DoRA's magnitudes, new tokens'
    rows."""
    for name, (outputs, inputs) in target_modules(model, adapter).items():
        yield f"base_model.model.{name}.lora_A.default.weight", (adapter.r, inputs)
        yield f"base_model.model.{name}.lora_B.default.weight", (outputs, adapter.r)
        if adapter.use_dora:
            yield f"base_model.model.{name}.lora_magnitude_vector.default.weight", (outputs,)
    experts = list(factor_shapes(model.expert_stacks, adapter, model.routers))
    within = wrappers(name for name, *_ in experts)
    for name, a, b in experts:
        yield f"base_model.model.{within[name]}.lora_A.default.weight", a
        yield f"base_model.model.{within[name]}.lora_B.default.weight", b
    for name, shape in zip(("model.embed_tokens", "lm_head"), row_shapes(model), strict=False):
        yield f"base_model.model.{name}.token_adapter.trainable_tokens_delta.default", shape


def base_parameters(model: ModelFacts) -> list[tuple[str, Shape]]:
    """Return the parameters of a model by name; matrices alone where the architecture is not one of `LLAMA_LIKE`."""
    parameters: list[tuple[str, Shape]] = [(f"{name}.weight", shape) for name, shape in model.linear_modules.items()]
    parameters.append(("model.embed_tokens.weight", (model.vocab_size, model.hidden_size)))
    if model.architecture not in LLAMA_LIKE:
        return parameters
    norms: dict[str, int] = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), model.hidden_size)
    if LLAMA_LIKE[model.architecture]:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), model.head_dim)
    layers = [f"model.layers.{layer}." for layer in range(model.num_layers)]
    parameters += [(f"{layer}{name}.weight", (width,)) for layer in layers for name, width in norms.items()]
    parameters.append(("model.norm.weight", (model.hidden_size,)))
    biases = {
        f"self_attn.{name}.bias": (model.linear_modules[f"model.layers.0.self_attn.{name}"][0],)
        for name in ("q_proj", "k_proj", "v_proj")
    }
    if sum(math.prod(shape) for _, shape in parameters) != model.parameters:
        parameters += [(f"{layer}{name}", shape) for layer in layers for name, shape in biases.items()]
    return parameters
