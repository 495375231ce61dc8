"""An adapter as PEFT saves it, whoever trained it: which weights it changes, and by what.

Plain LoRA, rsLoRA and DoRA, on linear layers, embeddings and stacks of experts, with ranks and alphas by layer, biases,
modules that were trained whole and single trained tokens. What else PEFT knows is refused by name, before anything is
written.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file

from surefit.core.errors import GateError
from surefit.core.reading import library_errors, read_json_file
from surefit.facts.all_linear import ends_with
from surefit.facts.door import require_sound_adapter
from surefit.facts.safetensors import read_header
from surefit.model.adapter import CONFIG, PREFIX, ROWS, WEIGHTS

REFUSED = {
    "layer_replication": "the adapter repeats layers of the base",
    "megatron_config": "the adapter was made for Megatron's layers",
    "use_bdlora": "its factors are block-diagonal",
    "alora_invocation_tokens": "it is active after certain tokens only, which no weight can be",
}
"""Settings under which factors mean something else than W + scaling·B·A, and what is said of them."""
FRESH = (True, False, None, "gaussian", "orthogonal", "eva", "lora_ga")
"""Ways to initialise factors that leave the base's own weights as they are."""


@dataclass(frozen=True)
class Update:
    """What one layer's factors do: W' = W + scaling · B A; with a magnitude, each output is then given that length.

    Attributes:
        a: (r, inputs). b: (outputs, r). Of an embedding: (r, width) and (vocabulary, r). Of a stack of experts:
            (experts, r, inputs) and (experts, outputs, r).
        scaling: alpha / r, or alpha / √r (rsLoRA, Kalajdzievski 2023).
        magnitude: (outputs,) for DoRA (Liu et al. 2024), else None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None


Factors = tuple[torch.Tensor, torch.Tensor]
"""A and B."""
TokenRows = tuple[list[int], torch.Tensor]
"""Token ids, and their new rows."""


@dataclass(frozen=True)
class AdapterFile:
    """All that an adapter changes.

    Attributes:
        updates: layer's dotted name in the base model → its factors.
        wrapped: module of PEFT's around a stack of experts → its factors as they are saved (merge/experts.py).
        replaced: parameter's dotted name → the whole new tensor (modules_to_save, trained biases).
        added: parameter's dotted name → what is added to it (the factors' own bias).
        rows: parameter name of the embedding, or of the head → what of it is replaced.
        config: adapter_config.json.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    updates: Mapping[str, Update]
    wrapped: Mapping[str, Factors] = field(default_factory=dict)
    replaced: Mapping[str, torch.Tensor] = field(default_factory=dict)
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, TokenRows] = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        """The names of all parameters that the adapter changes."""
        layers = {parameter_of(name, update) for name, update in self.updates.items()}
        return layers | self.replaced.keys() | self.added.keys() | self.rows.keys()

    @property
    def read_by_peft(self) -> set[str]:
        """The names of the base's parameters that PEFT itself reads or writes while it loads the adapter."""
        return self.rows.keys() | {f"{name}.weight" for name in self.updates if f"{name}.weight" in self.replaced}


def read_adapter(directory: Path) -> AdapterFile:
    """Read and understand adapter_config.json and adapter_model.safetensors.

    Raises:
        GateError: missing or damaged files, a kind of adapter that cannot be merged, factors without their other half,
            values that are not finite.
    """
    config, tensors = _read(directory)
    _require_mergeable(directory, config)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX)
        module, separator, part = plain.partition(".lora_")
        if separator:
            factors.setdefault(module, {})[part] = tensor
        else:
            rest[plain.replace(".base_layer.", ".")] = tensor
    updates, added, wrapped = {}, {}, {}
    owners = {target.rpartition(".")[0] for target in config.get("target_parameters") or ()}
    for module, parts in factors.items():
        if any(ends_with(module.replace(".base_layer", ""), owner) for owner in owners):
            wrapped[module] = _pair(directory, module, parts)
            continue
        updates[module] = _update(directory, config, module, parts)
        if "B.bias" in parts:
            added[f"{module}.bias"] = parts["B.bias"].float() * updates[module].scaling
    rows = {
        f"{name.removesuffix(ROWS)}.weight": (_token_ids(directory, config, name.removesuffix(ROWS)), rest.pop(name))
        for name in list(rest)
        if name.endswith(ROWS)
    }
    return AdapterFile(directory, config, tensors, updates, wrapped, rest, added, rows)


def parameter_of(name: str, update: Update) -> str:
    """The parameter that an update with this name in `AdapterFile.updates` changes."""
    return name if update.a.ndim == 3 else f"{name}.weight"


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    again = f"name a directory with PEFT's {CONFIG} and {WEIGHTS} in it; copy a damaged one again, or train again"
    with library_errors(directory, GateError, "the adapter cannot be read", again):
        config = require_sound_adapter(read_json_file(directory / CONFIG), directory / CONFIG)
        if config.get("peft_type") == "LORA":
            missing = [key for key in ("r", "lora_alpha") if config.get(key) is None]
            if missing:
                raise ValueError(f"{CONFIG} has no {missing[0]}")
        if not stat.S_ISREG((directory / WEIGHTS).stat().st_mode):
            raise ValueError(f"{WEIGHTS} is no regular file")
        read_header(directory / WEIGHTS)
        tensors = load_file(directory / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise GateError(
                f"the adapter is not complete: {name} has values that are not finite",
                code="E6001",
                path=directory / WEIGHTS,
                help="do not use it; train again, and check the loss in metrics.jsonl",
            )
    return config, tensors


def _require_mergeable(directory: Path, config: Mapping[str, Any]) -> None:
    reason = next((text for key, text in REFUSED.items() if config.get(key)), None)
    if config.get("peft_type") != "LORA":
        reason = f"it is of the kind {config.get('peft_type')}"
    elif config.get("init_lora_weights", True) not in FRESH:
        reason = (
            f"its factors were initialised by {config['init_lora_weights']}, which takes their first values out of the "
            "base's weights"
        )
    if reason:
        raise GateError(
            f"the adapter cannot be merged by its weights: {reason}",
            code="E6002",
            path=directory / CONFIG,
            help="serve it beside its base model with PEFT, or convert it to plain LoRA with PEFT first",
        )


def _update(directory: Path, config: Mapping[str, Any], module: str, parts: Mapping[str, torch.Tensor]) -> Update:
    if "embedding_A" in parts and "embedding_B" in parts:  # (r, vocabulary), (width, r): the product is transposed
        a, b = parts["embedding_B"].T, parts["embedding_A"].T
    else:
        a, b = _pair(directory, module, parts)
    rank, scaling = rank_and_scaling(config, module)
    if a.shape[0] != b.shape[1] or len(a) != rank:
        raise incomplete(
            directory, f"{module} has factors {tuple(a.shape)} and {tuple(b.shape)} where the rank is {rank}"
        )
    magnitude = parts.get("magnitude_vector", parts.get("magnitude_vector.weight"))
    if (magnitude is not None) != bool(config.get("use_dora")):
        raise incomplete(directory, f"{module} has {'a' if magnitude is not None else 'no'} DoRA magnitude")
    return Update(a, b, scaling, magnitude)


def _pair(directory: Path, module: str, parts: Mapping[str, torch.Tensor]) -> Factors:
    if not {"A.weight", "B.weight"} <= parts.keys():
        raise incomplete(directory, f"{module} has {', '.join(f'lora_{part}' for part in parts)} and nothing else")
    return parts["A.weight"], parts["B.weight"]


def rank_and_scaling(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Those of a layer, or of a stack by its parameter's name, with the patterns of adapter_config.json."""
    rank = _of(config, "rank_pattern", name, config["r"])
    alpha = float(_of(config, "alpha_pattern", name, config["lora_alpha"]))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    patterns = config.get(pattern) or {}
    return patterns.get(get_pattern_key(list(patterns), module), default)


def _token_ids(directory: Path, config: Mapping[str, Any], module: str) -> list[int]:
    indices = config.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        indices = indices.get(get_pattern_key(list(indices), module))
    if not indices:
        raise incomplete(directory, f"nothing says which tokens the trained rows of {module} belong to")
    return [int(index) for index in indices]


def incomplete(directory: Path, problem: str) -> GateError:
    """The error of an adapter that has not all of its factors."""
    return GateError(
        f"the adapter is not complete: {problem}",
        code="E6003",
        path=directory / WEIGHTS,
        help="copy it again, or train again",
    )
