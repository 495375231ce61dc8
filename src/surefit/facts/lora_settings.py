"""Settings of an adapter_config.json that change the arithmetic of a LoRA adapter.

`merge`, `--with`, `certify`, `lora.start_from` and rule ADP005 read this one table. It was written from the source
of PEFT 0.20.0 and 0.21.2: `LoraConfig`, `LoraLayer.update_layer`, the `*_init` functions it calls, and variants.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surefit.facts.all_linear import ends_with

PREFIX = "base_model.model."
"""Prefix that PEFT writes before a module's name."""

READ = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_bias", "lora_dropout", "modules_to_save", "peft_type", "r", "rank_pattern", "revision", "target_modules",
    "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
"""Settings that SureFit or PEFT reads, or that do not affect the weights. PEFT sets `fan_in_fan_out` itself by the
kind of layer, so a wrong one changes nothing."""
TRAINING_ONLY = {
    "corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_core", "merge_weights",
    "monteclora_config", "peft_version", "qalora_group_size", "runtime_config", "velora_config",
    "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
}  # fmt: skip
"""Settings that only matter while an adapter is trained, such as VeLoRA's for the backward pass and MonteCLoRA's for
the noise; the trained adapter is W + scaling · B A. The last three are ms-swift's."""
OTHER_ARITHMETIC = {
    "layer_replication": "the adapter repeats layers of the base",
    "megatron_config": "the adapter was made for Megatron's layers",
    "use_bdlora": "its factors are block-diagonal",
    "alora_invocation_tokens": "it is active after certain tokens only, which a merged weight cannot express",
    "kasa_config": "KaSA removes the smallest singular values of the base, and has a third factor",
    "arrow_config": "a router chooses among several adapters for every token",
    "use_qalora": "its inputs are averaged in groups",
}
"""Settings under which factors mean something else than W + scaling · B A, with the reason for messages."""
KEEPS_BASE = ("true", "false", "none", "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights (lower case) that leave the base's own weights as they are."""
REPEATABLE = ("pissa", "olora")
"""Values that initialize the factors from the base's weights by a reproducible decomposition: PEFT repeats it while it
loads an adapter, and so computes the right answers."""
GRADIENT_OR_DATA = ("corda", "lora_ga", "loftq")
"""Values that initialize them by gradients, data or a quantization that the adapter does not hold. `pissa_niter_N`
draws at random and belongs to them."""
NOT_CONTINUED = (
    "bias", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "ensure_weight_tying", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Settings that `merge` reads, but that training does not continue with."""

LISTED = 50
"""Largest number of layers that are named one by one, where no common ending selects them."""
MERGE_IT = "merge it, name the merged model, and leave start_from out"
CONVERT = "save it where it was trained, with save_pretrained(…, path_initial_model_for_weight_conversion=…)"
SIDE_BY_SIDE = "serve it with its base model and PEFT"
CONVERTIBLE = frozenset(
    {"DELORA", "GRALORA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA", "TINYLORA", "UNILORA", "VERA"}
)
"""PEFT types that `peft.convert_to_lora` of PEFT 0.21 converts; each was tried."""


@dataclass(frozen=True)
class Problem:
    """A setting under which an adapter is not W + scaling · B A over its base.

    Attributes:
        key: setting in adapter_config.json.
        reason: half a sentence.
        help: a remedy, which was tried.
    """

    key: str
    reason: str
    help: str


def is_off(value: Any) -> bool:
    """Return whether a setting is switched off: null, false, or empty."""
    return value is None or value is False or value in ("none", "", {}, [])


def find_non_lora_setting(config: Mapping[str, Any]) -> Problem | None:
    """Return the first setting that makes an adapter something else than W + scaling · B A over its own base; None
    where there is none.

    Args:
        config: adapter_config.json, of the shape that `door.require_sound_adapter` checks.
    """
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        reason = f"its type is {kind}" if kind else "adapter_config.json has no peft_type"
        convert = ", or convert it to LoRA with peft.convert_to_lora" if kind in CONVERTIBLE else ""
        return Problem("peft_type", reason, f"{SIDE_BY_SIDE}{convert}")
    for key, reason in OTHER_ARITHMETIC.items():
        if not is_off(config.get(key)):
            return Problem(key, reason, SIDE_BY_SIDE)
    return _initialization(config.get("init_lora_weights", True)) or _unknown(config)


def _initialization(value: Any) -> Problem | None:
    """Return the problem of an adapter whose factors were split off from the base's weights, which changed the base."""
    key, name = "init_lora_weights", str(value).lower()
    if name in KEEPS_BASE and type(value) in (bool, str, type(None)):
        return None
    reason = f"its factors were initialized by {value}, which changes the base's weights"
    if name in REPEATABLE:
        again = "PeftModel.from_pretrained(base, adapter).merge_and_unload() merges it, as PEFT changes the base again"
        return Problem(key, reason, f"{CONVERT}; or, in Python, {again}")
    if name in GRADIENT_OR_DATA or name.startswith("pissa_niter_"):
        return Problem(
            key, f"{reason} in a way that cannot be reproduced", f"{CONVERT}, or train again without {value}"
        )
    return Problem(key, f"init_lora_weights is {value!r}, which PEFT 0.21 does not have", _newer({}))


def _unknown(config: Mapping[str, Any]) -> Problem | None:
    known_keys = READ | TRAINING_ONLY | OTHER_ARITHMETIC.keys()
    for key in sorted(config.keys() - known_keys):
        if not is_off(config[key]):
            value = f"{config[key]!r:.60}"
            return Problem(key, f"{key} is {value}, a setting that PEFT 0.21 does not have", _newer(config))
    return None


def _newer(config: Mapping[str, Any]) -> str:
    version = config.get("peft_version")
    by = f", which was written by PEFT {version}" if isinstance(version, str) else ""
    return (
        f"use a version of SureFit that knows this setting{by}; if it only matters in training, remove it from "
        "adapter_config.json"
    )


def find_setting_blocking_training(config: Mapping[str, Any]) -> str | None:
    """Return the first setting of an adapter that can be merged but not trained further; None if there is none."""
    return next((key for key in NOT_CONTINUED if not is_off(config.get(key))), None)


def adapters_below(directory: Path) -> list[Path]:
    """Return the adapters one level below a directory, where PEFT saves each adapter that has a name of its own."""
    return sorted(path.parent for path in directory.glob("*/adapter_config.json"))


def describe_nested_adapters(adapters: Iterable[Path]) -> str:
    """Return the end of a sentence that names adapters by their directories; empty if there are none."""
    names = [f"{path.name}/" for path in adapters]
    return f", but in {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} below" if names else ""


def modules_with_factors(tensors: Iterable[str]) -> set[str]:
    """Return the modules of the base that an adapter's tensors are factors of, by their dotted names."""
    return {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors if ".lora_" in name}


def matching_exactly(had: Iterable[str], layers: Iterable[str]) -> list[str] | None:
    """Return `target_modules` that match these layers and no other; None where only a longer list than `LISTED` does.

    >>> matching_exactly(["0.q", "1.q"], ["0.q", "1.q", "0.v"]), matching_exactly(["0.q"], ["0.q", "1.q"])
    (['q'], ['0.q'])
    """
    targets = set(had)
    last = sorted({name.rpartition(".")[2] for name in targets})
    if {name for name in layers if any(ends_with(name, ending) for ending in last)} == targets:
        return last
    return sorted(targets) if len(targets) <= LISTED else None


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that torch.compile, activation checkpointing and FSDP put into the names of modules."""
_NAMED = re.compile(
    r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(\.(?!weight|bias)[^.]+)(?:\.weight|\.bias)?$"
)


def rename_problem(names: Iterable[str]) -> tuple[str, str | None] | None:
    """Describe the fault of an adapter's tensor names that PEFT would not find, and how to correct them.

    PEFT reads names that `PeftModel.save_pretrained` writes, ignores all others and then computes as the base does.

    Returns:
        (half a sentence with the first such name, a Python expression in `k` that gives the right name, None where no
        such expression does); None where every name is one of PEFT's.

    >>> rename_problem(["base_model.model.q_proj.lora_A.default.weight"])[1]
    "k.replace('.default', '')"
    >>> rename_problem(["base_model.model.q_proj.lora_A.weight"]) is None
    True
    """
    name_list = list(names)
    adapters = sorted({match[1] for name in name_list if (match := _NAMED.search(name))})
    if len(adapters) > 1:
        adapter_names = ", ".join(name.removeprefix(".") for name in adapters)
        return f"it holds the factors of {len(adapters)} adapters, {adapter_names}", None
    steps: list[tuple[str, Callable[[str], str]]] = []
    for part in (*(part for part in WRAPPERS if any(part in name for name in name_list)), *adapters):
        steps.append((f".replace({part!r}, '')", partial(_without, part)))
    if name_list and all(name.startswith("module.") for name in name_list):
        steps.append((".removeprefix('module.')", lambda name: name.removeprefix("module.")))
    if name_list and all(name.startswith(PREFIX * 2) for name in name_list):
        steps.append((f".removeprefix({PREFIX!r})", lambda name: name.removeprefix(PREFIX)))
    expression, right = "k" + "".join(text for text, _ in steps), name_list
    for _, change in steps:
        right = [change(name) for name in right]
    if bare := [name for name in right if not name.startswith(PREFIX)]:
        all_bare = len(bare) == len(right)
        expression = f"{PREFIX!r} + {expression}" if all_bare else f"k if k.startswith({PREFIX!r}) else {PREFIX!r} + k"
        if steps and not all_bare:
            return f"{bare[0]} is not a name that PEFT reads", None
    first = next((old for old, new in zip(name_list, right, strict=True) if old != new or new in bare), None)
    return (f"{first} is not a name that PEFT reads", expression) if first else None


def _without(part: str, name: str) -> str:
    return name.replace(part, "")
