"""Combines several adapters of one base: their exact weighted sum, or one of PEFT's other combinations.

PEFT's own `add_weighted_adapter` is not used. It scales the sum of rsLoRA adapters by √r too much
(huggingface/peft#3449), and leaves out biases, whole modules, token rows and DoRA's magnitudes. Here every factor
keeps its own scaling, a part that cannot be summed raises an error that names it, and the merged weights are compared
with the sum of the adapters themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, magnitude_prune, task_arithmetic, ties
from safetensors.torch import save_file

from surefit.core.errors import ConfigError, GateError
from surefit.core.rundir import write_json
from surefit.facts.lora_settings import PREFIX, is_off
from surefit.merge.adapter_file import AdapterFile, Update, parameter_of, read_adapter
from surefit.merge.stream import find_misfits
from surefit.model.adapter import CONFIG, WEIGHTS
from surefit.model.identity import adapter_identity
from surefit.model.layerwise_forward import LayerwiseModel, cast

EXACT = "cat"
COMBINATION_TYPES = (EXACT, "linear", "ties", "dare_ties", "dare_linear", "magnitude_prune", "svd")
"""Named as `combination_type` of PEFT's add_weighted_adapter. cat is the exact weighted sum of the updates, and svd its
best approximation of the adapters' rank. The others combine A and B separately, which is not the sum: ties (Yadav et
al. 2023) and dare (Yu et al. 2024) drop small or conflicting entries, and need adapters of equal rank."""
DENSITY = 0.5
"""Share of each adapter's entries that ties, dare and magnitude_prune keep."""
CANCELED = 1e-6
"""Size of a sum that is zero, relative to the adapters' updates, that float32 factors may leave."""
SPARSE = {"ties": ties, "dare_ties": dare_ties, "dare_linear": dare_linear, "magnitude_prune": magnitude_prune}


@dataclass(frozen=True)
class AdapterCombination:
    """Several adapters with weights, and the method that combines them into one.

    Attributes:
        way: one of `COMBINATION_TYPES`.
        adapters: (directory, weight).
    """

    way: str
    adapters: tuple[tuple[Path, float], ...]

    def parts(self) -> dict[str, list[Update]] | None:
        """Return the updates that the merged weights must be the sum of: parameter → updates, read from the adapters'
        own files and scaled by their weights; None if the combination is no sum."""
        if self.way != EXACT:
            return None
        updates: dict[str, list[Update]] = {}
        for path, weight in self.adapters:
            for name, update in read_adapter(path).updates.items():
                scaled = replace(update, scaling=update.scaling * weight)
                updates.setdefault(parameter_of(name, update), []).append(scaled)
        return updates

    def as_dict(self) -> dict[str, Any]:
        """Return the combination's entry in certificate.json."""
        adapters = [
            {"name": path.name, "weight": weight, "sha256": adapter_identity(path)} for path, weight in self.adapters
        ]
        return {"way": self.way, "exact_sum": self.way == EXACT, "adapters": adapters}


def combine_adapters(base: LayerwiseModel, combined: AdapterCombination, directory: Path) -> Path:
    """Write the combination of adapters as one adapter that PEFT reads; return its directory.

    Args:
        combined: at least two adapters of this base.
        directory: an empty folder.

    Raises:
        GateError: an adapter does not fit the base, or has more than factors of linear layers and embeddings.
        ConfigError: these adapters cannot be combined by this method, or their combination changes nothing.
    """
    adapters = [(_read_summable(path, base), weight) for path, weight in combined.adapters]
    modules = dict(base.model.named_modules())
    layers = [name for name in modules if any(name in adapter.updates for adapter, _ in adapters)]
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    canceled = True
    with torch.random.fork_rng():
        torch.manual_seed(0)  # dare drops entries at random; the same adapters must give the same model
        for name in layers:
            parts = [(adapter.updates[name], weight) for adapter, weight in adapters if name in adapter.updates]
            a, b = _factors(combined.way, parts)
            canceled = canceled and _is_canceled(a, b, parts)
            ranks[name] = len(a)
            module = f"{PREFIX}{name}"
            if isinstance(modules[name], torch.nn.Embedding):  # PEFT holds both transposed
                tensors |= {f"{module}.lora_embedding_A": b.T, f"{module}.lora_embedding_B": a.T}
            else:
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    if canceled:
        raise ConfigError(
            f"the adapters cancel out: their combination ({combined.way}) is zero in every layer",
            code="E6800",
            field="--with",
            help="give them other weights: ADAPTER:0.5",
        )
    target = directory / "combined"
    target.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / WEIGHTS, metadata={"format": "pt"})
    write_json(target / CONFIG, _settings(adapters[0][0].config, ranks))
    return target


def _read_summable(path: Path, base: LayerwiseModel) -> AdapterFile:
    """Read an adapter, and raise if it holds more than factors that can be summed."""
    adapter = read_adapter(path)
    config = adapter.config
    not_summed = {
        "use_dora": "DoRA magnitudes cannot be added",
        "lora_bias": "its factors have biases",
        "bias": "it has trained biases",
        "modules_to_save": "it has whole modules (modules_to_save), which replace the base's and cannot be added",
        "trainable_token_indices": "it has trained rows of single tokens, which replace the base's and cannot be added",
    }
    obstacle = next(((key, reason) for key, reason in not_summed.items() if not is_off(config.get(key))), None)
    full_tensors = [*adapter.replaced, *_changed_in_base(adapter, base), *adapter.rows, *adapter.added]
    if obstacle is None and full_tensors:
        obstacle = ("", f"it has {full_tensors[0]} as a full tensor that differs from the base's")
    if obstacle is not None:
        key, reason = obstacle
        raise GateError(
            f"the adapter cannot be summed with another: {reason}",
            code="E6400",
            path=path,
            field=key or None,
            help="merge it alone; an adapter that is plain LoRA can then be merged into the result, with --base MERGED",
        )
    if adapter.wrapped:
        raise GateError(
            "it has factors for experts, which cannot be combined",
            code="E6004",
            path=path,
            field="target_parameters",
            help="combine adapters of linear layers and embeddings, or merge one alone",
        )
    if problems := find_misfits(adapter, base.model):
        raise GateError(
            f"the adapter does not fit the base: {problems[0]}",
            code="E6005",
            path=path,
            help="combine adapters of the same base",
        )
    return adapter


def _changed_in_base(adapter: AdapterFile, base: LayerwiseModel) -> Iterator[str]:
    """Yield the tensors that PEFT would load into the base and that differ from the base's: beside the factors of an
    embedding, `save_pretrained` saves its matrix, usually unchanged."""
    for name, tensor in adapter.base.items():
        stored = base.names.get(name)
        if stored is None:
            yield name
            continue
        dtype = base.model.get_parameter(name).dtype
        base_tensor, adapter_tensor = (
            cast(base.model, name, weight, dtype) for weight in (base.weights.read(stored), tensor)
        )
        if not torch.equal(base_tensor, adapter_tensor):
            yield name


def _is_canceled(a: torch.Tensor, b: torch.Tensor, parts: Sequence[tuple[Update, float]]) -> bool:
    """Return whether the product of combined factors is zero, relative to the updates that it is made of."""
    sizes = [abs(update.scaling * weight) * _norm_of_product(update.a, update.b) for update, weight in parts]
    return _norm_of_product(a, b) <= CANCELED * math.fsum(sizes)


def _norm_of_product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Frobenius norm of B A from the triangular QR factors, (r, r), without computing the product."""
    triangles = [torch.linalg.qr(factor.double(), mode="r").R for factor in (b, a.T)]
    return float(torch.linalg.matrix_norm(triangles[0] @ triangles[1].T))


def _factors(way: str, parts: Sequence[tuple[Update, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of one layer, in float32; their product is its update."""
    scaled = [(update.a.double(), update.b.double(), update.scaling * weight) for update, weight in parts]
    if way == EXACT:
        return torch.cat([a for a, _, _ in scaled]).float(), torch.cat([s * b for _, b, s in scaled], dim=1).float()
    if way == "svd":
        rank = max(len(a) for a, _, _ in scaled)
        # The sum is B A of all factors concatenated. With B = Q_b R_b and Aᵀ = Q_a R_a its singular values are those of
        # R_b R_aᵀ, which is as small as the ranks: the sum itself may have 10⁸ numbers.
        b_q, b_r = torch.linalg.qr(torch.cat([s * b for _, b, s in scaled], dim=1))
        a_q, a_r = torch.linalg.qr(torch.cat([a for a, _, _ in scaled]).T)
        u, singular_values, vh = torch.linalg.svd(b_r @ a_r.T, full_matrices=False)
        return (vh[:rank] @ a_q.T).float(), (b_q @ (u[:, :rank] * singular_values[:rank])).float()
    if len({len(a) for a, _, _ in scaled}) > 1:
        ranks = " and ".join(str(len(a)) for a, _, _ in scaled)
        raise ConfigError(
            f"adapters with ranks {ranks} cannot be combined by {way}",
            code="E6006",
            field="--combine",
            help="cat can sum adapters of different ranks",
        )
    # Each factor gets the square root of |weight · scaling|; only one of them gets the sign, or it would cancel.
    roots = torch.tensor([math.sqrt(abs(s)) for _, _, s in scaled])
    signs = torch.tensor([math.copysign(1.0, s) for _, _, s in scaled])
    mix = task_arithmetic if way == "linear" else partial(SPARSE[way], density=DENSITY)
    a = mix([a.float() for a, _, _ in scaled], roots * signs)
    return a, mix([b.float() for _, b, _ in scaled], roots)


def _settings(first: Any, ranks: dict[str, int]) -> dict[str, Any]:
    """Build an adapter_config.json in which every layer's scaling is 1: alpha is its rank."""
    common_rank = max(set(ranks.values()), key=[*ranks.values()].count)
    rank_pattern = {re.escape(name): rank for name, rank in ranks.items() if rank != common_rank}
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type") or "CAUSAL_LM",
        "base_model_name_or_path": first.get("base_model_name_or_path"),
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_rank,
        "rank_pattern": rank_pattern,
        "alpha_pattern": rank_pattern,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }
