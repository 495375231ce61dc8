"""Reads an adapter in PEFT's format, from any tool: the weights that it changes, and their updates.

Supported are plain LoRA, rsLoRA and DoRA, on linear layers, embeddings and stacks of experts, with ranks and alphas by
layer, biases, fully trained modules and single trained tokens. Other kinds of PEFT adapters raise an error that names
them, before anything is written.
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
from surefit.facts.lora_settings import PREFIX, find_non_lora_setting
from surefit.facts.safetensors import read_header
from surefit.facts.validate_model_files import require_sound_adapter
from surefit.model.adapter import (
    CONFIG,
    ROWS,
    TOKENS,
    WEIGHTS,
    require_readable_names,
    require_values,
    require_weights_file,
)

NOT_FACTORS = ("monteclora_sampler.", "velora_embed")
"""Prefixes of tensors that PEFT saves beside the factors and needs for training only (facts/lora_settings.py)."""


@dataclass(frozen=True)
class Update:
    """Low-rank update of one layer: W' = W + scaling · B A; with a magnitude, each output row is then rescaled to that
    length.

    Attributes:
        a: (r, inputs). b: (outputs, r). For an embedding: (r, width) and (vocabulary, r), with a magnitude (r,
            vocabulary) and (width, r). For a stack of experts: (experts, r, inputs) and (experts, outputs, r).
        scaling: alpha / r, or alpha / √r (rsLoRA, Kalajdzievski 2023).
        magnitude: (outputs,) for DoRA (Liu et al. 2024), else None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None


Factors = tuple[torch.Tensor, torch.Tensor]
"""The LoRA factors (A, B)."""
TokenRows = tuple[list[int], torch.Tensor]
"""Token ids, and their new embedding rows."""


@dataclass(frozen=True)
class AdapterFile:
    """The settings, tensors and weight changes of an adapter.

    Attributes:
        updates: layer's dotted name in the base model → its factors.
        wrapped: PEFT module that wraps a stack of experts → its factors as saved (merge/experts.py).
        replaced: parameter's dotted name → the full new tensor of the trained copy that replaces its module
            (modules_to_save); another parameter that is tied to it keeps the base's weight.
        base: parameter's dotted name → the tensor that PEFT loads into the base model itself, and so into every
            parameter that is tied to it (trained biases; the embeddings, if the vocabulary was resized).
        added: parameter's dotted name → tensor that is added to it (the bias of the factors).
        rows: parameter name of the embedding or the head → the rows that are replaced.
        config: content of adapter_config.json.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    updates: Mapping[str, Update]
    wrapped: Mapping[str, Factors] = field(default_factory=dict)
    replaced: Mapping[str, torch.Tensor] = field(default_factory=dict)
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, TokenRows] = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        """Names of all parameters that the adapter changes."""
        layers = {parameter_of(name, update) for name, update in self.updates.items()}
        return layers | self.replaced.keys() | self.base.keys() | self.added.keys() | self.rows.keys()

    @property
    def read_by_peft(self) -> set[str]:
        """Names of the base's parameters that PEFT itself reads or writes while it loads the adapter."""
        return self.rows.keys() | self.base.keys()


def read_adapter(directory: Path) -> AdapterFile:
    """Read adapter_config.json and adapter_model.safetensors, and parse the weight changes.

    Raises:
        GateError: missing or damaged files, a kind of adapter that cannot be merged, an A or B without the other,
            values that are not finite.
    """
    config, tensors = _read(directory)
    _require_mergeable(directory, config)
    require_readable_names(tensors, directory)
    require_values(tensors, directory)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    other_tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX)
        module, separator, part = plain.partition(".lora_")
        if not separator:
            other_tensors[plain] = tensor
        elif not part.startswith(NOT_FACTORS):
            factors.setdefault(module, {})[part] = tensor
    updates, added, wrapped = {}, {}, {}
    owners = {target.rpartition(".")[0] for target in config.get("target_parameters") or ()}
    for module, parts in factors.items():
        if any(ends_with(module.replace(".base_layer", ""), owner) for owner in owners):
            wrapped[module] = _pair(directory, module, parts)
            continue
        _require_targeted(directory, config, module)
        updates[module] = _update(directory, config, module, parts)
        if "B.bias" in parts:
            added[f"{module}.bias"] = parts["B.bias"].float() * updates[module].scaling
    rows = _token_rows(directory, config, other_tensors)
    replaced, base = _whole_tensors(config, other_tensors)
    return AdapterFile(directory, config, tensors, updates, wrapped, replaced, base, added, rows)


def _token_rows(directory: Path, config: Mapping[str, Any], rest: Mapping[str, torch.Tensor]) -> dict[str, TokenRows]:
    """Return the trained rows of the embedding and the head. If the head is tied to the embedding, PEFT saves it again
    after a resize of the vocabulary; its rows are then the embedding's."""
    trained_rows = {name.removesuffix(ROWS): tensor for name, tensor in rest.items() if name.endswith(ROWS)}
    ids_by_module = {module: ids for module in trained_rows if (ids := _token_ids(config, module))}
    rows = {}
    for module, tensor in trained_rows.items():
        ids = ids_by_module.get(module) or next(
            (
                module_ids
                for other_module, module_ids in ids_by_module.items()
                if torch.equal(trained_rows[other_module], tensor)
            ),
            [],
        )
        if not ids:
            raise build_incomplete_error(
                directory, f"the adapter does not record which tokens the trained rows of {module} belong to"
            )
        rows[f"{module}.weight"] = ids, tensor
    return rows


def _whole_tensors(
    config: Mapping[str, Any], rest: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split the full tensors into the copies that PEFT trained, and the tensors that it loads into the base.

    If the vocabulary was resized, PEFT saves every tensor under the embeddings' names: beside the copy, under the
    module's own name, the copy again (`modules_to_save`) and the base's tensor (`original_module`, `base_layer`).
    """
    modules_to_save = config.get("modules_to_save") or ()
    endings = (modules_to_save,) if isinstance(modules_to_save, str) else tuple(modules_to_save)
    # With ensure_weight_tying, a head that the settings do not name is a copy, too.
    copies = {name.partition(".modules_to_save.")[0] for name in rest if ".modules_to_save." in name}
    replaced: dict[str, torch.Tensor] = {}
    base: dict[str, torch.Tensor] = {}
    for name, tensor in rest.items():
        if name.endswith(ROWS) or ".modules_to_save." in name:
            continue
        plain = name.replace(f"{TOKENS}.", ".").replace(".original_module.", ".").replace(".base_layer.", ".")
        parts = plain.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts))]
        copied = any(module in copies or module.endswith(endings) for module in modules)
        (replaced if copied and plain == name else base)[plain] = tensor
    return replaced, base


def parameter_of(name: str, update: Update) -> str:
    """Return the parameter that an update with this name in `AdapterFile.updates` changes."""
    return name if update.a.ndim == 3 else f"{name}.weight"


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    require_weights_file(directory)
    advice = f"name a directory with PEFT's {CONFIG} and {WEIGHTS} in it; copy a damaged one again, or train again"
    with library_errors(directory, GateError, "the adapter cannot be read", advice):
        config = require_sound_adapter(read_json_file(directory / CONFIG), directory / CONFIG)
        if config.get("peft_type") == "LORA":
            missing = [key for key in ("r", "lora_alpha") if config.get(key) is None]
            if missing:
                raise ValueError(f"{CONFIG} has no {missing[0]}")
        if not stat.S_ISREG((directory / WEIGHTS).stat().st_mode):
            raise ValueError(f"{WEIGHTS} is not a regular file")
        read_header(directory / WEIGHTS)
        tensors = load_file(directory / WEIGHTS)
    return config, tensors


def _require_mergeable(directory: Path, config: Mapping[str, Any]) -> None:
    problem = find_non_lora_setting(config)
    if problem is not None:
        raise GateError(
            f"the adapter cannot be merged by its weights: {problem.reason}",
            code="E6002",
            path=directory / CONFIG,
            field=problem.key,
            help=problem.help,
        )


def _update(directory: Path, config: Mapping[str, Any], module: str, parts: Mapping[str, torch.Tensor]) -> Update:
    if "embedding_A" in parts and "embedding_B" in parts:  # (r, vocabulary), (width, r): the product is transposed
        a, b = parts["embedding_B"].T, parts["embedding_A"].T
        if config.get("use_dora"):  # DoRA's magnitude belongs to the transposed matrix: one length per column
            a, b = parts["embedding_A"], parts["embedding_B"]
    else:
        a, b = _pair(directory, module, parts)
    rank, scaling = rank_and_scaling(config, module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or len(a) != rank:
        raise build_incomplete_error(
            directory, f"{module} has factors {tuple(a.shape)} and {tuple(b.shape)}, but the rank is {rank}"
        )
    magnitude = parts.get("magnitude_vector", parts.get("magnitude_vector.weight"))
    if (magnitude is not None) != bool(config.get("use_dora")):
        raise build_incomplete_error(directory, f"{module} has {'a' if magnitude is not None else 'no'} DoRA magnitude")
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise build_incomplete_error(
            directory, f"{module} has a DoRA magnitude {tuple(magnitude.shape)} for {len(b)} outputs"
        )
    return Update(a, b, scaling, magnitude)


def _require_targeted(directory: Path, config: Mapping[str, Any], module: str) -> None:
    """Raise if a layer with factors is not in target_modules: PEFT ignores its factors when it loads the adapter,
    though it saves such adapters itself (ensure_weight_tying with GPT-2's head)."""
    targets = config.get("target_modules")
    if targets and isinstance(targets, list) and not any(ends_with(module, target) for target in targets):
        raise GateError(
            f"the adapter's file has factors of {module}, which its target_modules do not name: PEFT ignores them",
            code="E6750",
            path=directory / CONFIG,
            field="target_modules",
            help=f"add {module.rpartition('.')[2]!r} to target_modules there if it was trained with these factors",
        )


def _pair(directory: Path, module: str, parts: Mapping[str, torch.Tensor]) -> Factors:
    if not {"A.weight", "B.weight"} <= parts.keys():
        raise build_incomplete_error(directory, f"{module} has {', '.join(f'lora_{part}' for part in parts)} only")
    return parts["A.weight"], parts["B.weight"]


def rank_and_scaling(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank and scaling of a layer, or of a stack by its parameter's name, by adapter_config.json and its
    patterns."""
    rank = _of(config, "rank_pattern", name, config["r"])
    alpha = float(_of(config, "alpha_pattern", name, config["lora_alpha"]))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    patterns = config.get(pattern) or {}
    return patterns.get(get_pattern_key(list(patterns), module), default)


def _token_ids(config: Mapping[str, Any], module: str) -> list[int]:
    indices = config.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        indices = indices.get(get_pattern_key(list(indices), module))
    return [int(index) for index in indices or ()]


def build_incomplete_error(directory: Path, problem: str) -> GateError:
    """Build the error for an adapter that lacks some of its factors."""
    return GateError(
        f"the adapter is not complete: {problem}",
        code="E6003",
        path=directory / WEIGHTS,
        help="copy it again from the training machine, or save it there again with PeftModel.save_pretrained",
    )
