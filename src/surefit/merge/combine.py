"""Several adapters of one base become one: their exact weighted sum, or what PEFT's other ways make of them.

PEFT's own `add_weighted_adapter` is not used. It scales the sum of rsLoRA adapters by √r too much
(huggingface/peft#3449), and leaves out biases, whole modules, token rows and DoRA's magnitudes. Here every factor
carries its own scaling, what cannot be summed is an error by name, and the merged weights are compared with the sum of
the adapters themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, magnitude_prune, task_arithmetic, ties
from safetensors.torch import save_file
from transformers import PreTrainedModel

from surefit.core.errors import ConfigError, GateError
from surefit.core.rundir import write_json
from surefit.facts.lora_settings import PREFIX, is_off
from surefit.merge.adapter_file import AdapterFile, Update, parameter_of, read_adapter
from surefit.merge.stream import misfits
from surefit.model.adapter import CONFIG, WEIGHTS
from surefit.model.identity import adapter_identity

EXACT = "cat"
WAYS = (EXACT, "linear", "ties", "dare_ties", "dare_linear", "magnitude_prune", "svd")
"""Named as `combination_type` of PEFT's add_weighted_adapter. cat is the exact weighted sum of the updates, and svd its
best approximation of the adapters' rank. The others combine A and B separately, which is not the sum: ties (Yadav et
al. 2023) and dare (Yu et al. 2024) leave out what is small or at odds, and need adapters of one rank."""
DENSITY = 0.5
"""The share of each adapter that ties, dare and magnitude_prune keep."""
SPARSE = {"ties": ties, "dare_ties": dare_ties, "dare_linear": dare_linear, "magnitude_prune": magnitude_prune}


@dataclass(frozen=True)
class Combined:
    """How one adapter was made of several.

    Attributes:
        way: one of `WAYS`.
        adapters: (directory, weight).
    """

    way: str
    adapters: tuple[tuple[Path, float], ...]

    def parts(self) -> dict[str, list[Update]] | None:
        """Return what the merged weights have to be the sum of: parameter → updates, read from the adapters' own files
        and scaled by their weights; None where the combination is no sum."""
        if self.way != EXACT:
            return None
        found: dict[str, list[Update]] = {}
        for path, weight in self.adapters:
            for name, update in read_adapter(path).updates.items():
                scaled = replace(update, scaling=update.scaling * weight)
                found.setdefault(parameter_of(name, update), []).append(scaled)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return what certificate.json says of the combination."""
        adapters = [
            {"name": path.name, "weight": weight, "sha256": adapter_identity(path)} for path, weight in self.adapters
        ]
        return {"way": self.way, "exact_sum": self.way == EXACT, "adapters": adapters}


def combine(model: PreTrainedModel, combined: Combined, directory: Path, density: float = DENSITY) -> Path:
    """Write the combination of adapters as one that PEFT reads; returns its directory.

    Args:
        model: their base; its weights are not looked at.
        combined: at least two adapters.
        directory: an empty folder.

    Raises:
        GateError: an adapter that does not fit the base, or is more than factors beside linear layers and embeddings.
        ConfigError: these adapters cannot be combined in this way.
    """
    adapters = [(_summable(path, model), weight) for path, weight in combined.adapters]
    layers = [name for name, _ in model.named_modules() if any(name in adapter.updates for adapter, _ in adapters)]
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # dare drops at random: the same adapters shall give the same model
        for name in layers:
            parts = [(each.updates[name], weight) for each, weight in adapters if name in each.updates]
            a, b = _factors(combined.way, parts, density)
            ranks[name] = len(a)
            module = f"{PREFIX}{name}"
            if isinstance(model.get_submodule(name), torch.nn.Embedding):  # PEFT holds both transposed
                tensors |= {f"{module}.lora_embedding_A": b.T, f"{module}.lora_embedding_B": a.T}
            else:
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    target = directory / "combined"
    target.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / WEIGHTS, metadata={"format": "pt"})
    write_json(target / CONFIG, _settings(adapters[0][0].config, ranks))
    return target


def _summable(path: Path, model: PreTrainedModel) -> AdapterFile:
    """Read an adapter, and require that it is nothing but factors that can be summed."""
    adapter = read_adapter(path)
    config = adapter.config
    beyond = {
        "use_dora": "DoRA gives every output a length of its own, and two lengths have no sum",
        "lora_bias": "its factors have biases",
        "bias": "it has trained biases",
        "modules_to_save": "it has whole modules (modules_to_save), which replace the base's and have no sum",
        "trainable_token_indices": "it has trained rows of single tokens, which replace the base's and have no sum",
    }
    found = next(((key, reason) for key, reason in beyond.items() if not is_off(config.get(key))), None)
    if found is None and (adapter.replaced or adapter.base or adapter.rows or adapter.added):
        first = next(iter([*adapter.replaced, *adapter.base, *adapter.rows, *adapter.added]))
        found = ("", f"it holds {first} as a whole, beside its factors")
    if found is not None:
        key, reason = found
        raise GateError(
            f"the adapter cannot be summed with another: {reason}",
            code="E6400",
            path=path,
            field=key or None,
            help="merge it alone; an adapter that is plain LoRA can then be merged into the result, with --base MERGED",
        )
    if adapter.wrapped:
        raise GateError(
            "it has factors for experts, which are not combined",
            code="E6004",
            path=path,
            field="target_parameters",
            help="combine adapters of linear layers and embeddings, or merge one alone",
        )
    if problems := misfits(adapter, model):
        raise GateError(
            f"the adapter does not fit the base: {problems[0]}",
            code="E6005",
            path=path,
            help="combine adapters of one base",
        )
    return adapter


def _factors(way: str, parts: Sequence[tuple[Update, float]], density: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of one layer, whose product is its update, in float32."""
    scaled = [(update.a.double(), update.b.double(), update.scaling * weight) for update, weight in parts]
    if way == EXACT:
        return torch.cat([a for a, _, _ in scaled]).float(), torch.cat([s * b for _, b, s in scaled], dim=1).float()
    if way == "svd":
        rank = max(len(a) for a, _, _ in scaled)
        total = torch.stack([s * (b @ a) for a, b, s in scaled]).sum(0)
        left, values, right = torch.linalg.svd(total, full_matrices=False)
        return right[:rank].float(), (left[:, :rank] * values[:rank]).float()
    if len({len(a) for a, _, _ in scaled}) > 1:
        ranks = " and ".join(str(len(a)) for a, _, _ in scaled)
        raise ConfigError(
            f"adapters of the ranks {ranks} cannot be combined by {way}",
            code="E6006",
            field="--combine",
            help="adapters of different ranks can be summed by cat",
        )
    # Each factor gets the square root of weight · scaling; a negative sign stands on one side, or it would be lost.
    roots = torch.tensor([math.sqrt(abs(s)) for _, _, s in scaled])
    signs = torch.tensor([math.copysign(1.0, s) for _, _, s in scaled])
    mix = task_arithmetic if way == "linear" else partial(SPARSE[way], density=density)
    a = mix([a.float() for a, _, _ in scaled], roots * signs)
    return a, mix([b.float() for _, b, _ in scaled], roots)


def _settings(first: Any, ranks: dict[str, int]) -> dict[str, Any]:
    """Return an adapter_config.json under which every layer's scaling is 1: alpha is its rank."""
    usual = max(set(ranks.values()), key=[*ranks.values()].count)
    other = {re.escape(name): rank for name, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type") or "CAUSAL_LM",
        "base_model_name_or_path": first.get("base_model_name_or_path"),
        "inference_mode": True,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": other,
        "alpha_pattern": other,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }
